"""Single layers against stock Megatron's, two ranks on the CPU in float64; layers that take Megatron's own path."""

import logging
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import FallbackConfig
from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.plugin import unsupported_reason
from commfuse_megatron.plugin.decision import state_of
from tests.megatron import layers
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import BATCH, IN, OUT, ROWS, Pair, assert_equal, assert_overlapped, pair, run

STRICT = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))


def sum_up(output: torch.Tensor) -> None:
    output.sum().backward()


def check_plain_call(group_size: int, kind: str) -> None:
    pair(kind, group_size).assert_overlapped()


def check_skip_bias_add(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size, skip_bias_add=True)
    layer.assert_overlapped()
    assert layer.ours(layer.x)[1] is layer.ours.bias


def check_no_bias(group_size: int, kind: str) -> None:
    pair(kind, group_size).set(bias=None).assert_overlapped()


def check_gathered_output(group_size: int) -> None:
    gathered, plain = pair("column", group_size, gather_output=True), pair("column", group_size)
    assert gathered.compare()["output"].shape == (ROWS * group_size, BATCH, OUT)
    gathered.compare(runtime_gather_output=False)
    plain.assert_overlapped(runtime_gather_output=True)


def check_external_weight(group_size: int) -> None:
    without = pair("column", group_size, skip_weight_param_allocation=True)
    weights, results = [], []
    for layer in without[:2]:
        assert layer.weight is None
        weights.append(layers.random((OUT // group_size, IN), 4).requires_grad_())
        results.append(run(layer, without.x, weight=weights[-1]) | {"gradient of weight": weights[-1].grad})
        with pytest.raises(RuntimeError, match="skip_weight_param_allocation"):
            layer(without.x)
    assert_equal(*results)
    assert_overlapped(without.ours)


def check_expanded_gradient(group_size: int, kind: str) -> None:
    pair(kind, group_size).assert_overlapped(backward=sum_up)


def check_strided_input_and_gradient(group_size: int, kind: str) -> None:
    stock, ours, x = pair(kind, group_size)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()

    def backward(output: torch.Tensor) -> None:
        weights = torch.arange(output.numel(), dtype=output.dtype).view(*reversed(output.shape)).permute(2, 1, 0)
        output.backward(weights / output.numel())

    Pair(stock, ours, strided).assert_overlapped(backward=backward)


def check_changing_lengths(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size)
    for rows in (4, 1, 7, 4):
        layer._replace(x=layers.example_input(kind, group_size, rows)).compare()
    assert_overlapped(layer.ours, calls=4)


def check_16_and_32_bit(group_size: int, kind: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        pair(kind, group_size, dtype=dtype).assert_overlapped(tolerance)


def check_autocast(group_size: int, kind: str) -> None:
    stock, ours, x = pair(kind, group_size, dtype=torch.float32)
    expected = run(ours, x)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = ours(x)
        assert output.dtype == stock(x)[0].dtype == torch.float32, "the bias, which autocast leaves alone, is fp32"
    error = (output - expected["output"]).abs().max() / expected["output"].abs().max()
    assert error < 3e-2
    assert_overlapped(ours, calls=2)


def check_bias_of_another_dtype(group_size: int, kind: str) -> None:
    """Fails without adding such a bias afterwards: our operations take one dtype for all."""
    layer = pair(kind, group_size, dtype=torch.bfloat16)
    size = layer.ours.bias.numel()
    for each in layer[:2]:
        each.bias = torch.nn.Parameter(0.1 * torch.arange(size, dtype=torch.float32))
    if kind == "column":  # stock adds the bias within the operation, whose backward pass then refuses
        assert torch.equal(layer.stock(layer.x)[0], layer.ours(layer.x)[0])
        assert_overlapped(layer.ours)
    else:  # bf16 partials, summed in another order
        assert layer.assert_overlapped(2**-7)["output"].dtype == torch.float32


def check_compiled(group_size: int, kind: str) -> None:
    # Fails without leaving the layers out of the graph: the compiler cannot trace them.
    layer = pair(kind, group_size)
    compiled = torch.compile(layer.ours, backend="aot_eager")
    layer.compare()

    def double(x: torch.Tensor, layer: Any = compiled) -> tuple[torch.Tensor, Any]:
        return layer(x)[0] * 2, None

    output, _ = torch.compile(double, backend="aot_eager")(layer.x)
    assert_equal({"output": 2 * layer.stock(layer.x)[0].detach()}, {"output": output.detach()})
    output.sum().backward()
    assert_overlapped(layer.ours, calls=2)


def check_output_is_fresh(group_size: int, kind: str) -> None:
    _, ours, x = pair(kind, group_size)
    first, _ = ours(x)
    assert not first._is_view()
    assert first.is_contiguous()
    kept = first.detach().clone()
    second, _ = ours(2 * x)
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert torch.equal(first, kept)


def check_frozen_weight(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size)
    run(layer.ours, layer.x)
    trainable, _ = layers.count_batches(layer.ours, lambda: run(layer.ours, layer.x))
    layer.train(False)
    frozen, found = layers.count_batches(layer.ours, layer.compare)
    assert found["gradient of weight"] is None
    steps = group_size - 1
    # fprop; re-gather of x and scatter of dgrad, or gather of dy
    assert trainable == (3 * steps if kind == "column" else 2 * steps)
    assert frozen == 2 * steps
    assert_overlapped(layer.ours, calls=3)


def check_frozen_weight_trainable_bias(group_size: int, kind: str) -> None:
    _, ours, x = pair(kind, group_size)
    expected = run(ours, x)["gradient of bias"]
    ours.weight.requires_grad_(False)
    assert_equal({"bias": expected}, {"bias": run(ours, x)["gradient of bias"]})


def check_frozen_input(group_size: int, kind: str) -> None:
    stock, ours, x = pair(kind, group_size)
    gradients = []
    for layer in (stock, ours):
        sum_up(layer(x)[0])
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    assert_equal(*gradients)
    assert_overlapped(ours)


def fuse(ours: Any, main_grad: torch.Tensor) -> None:
    """Gradients of the weight go into `main_grad`. Stock needs Apex for this."""
    ours.gradient_accumulation_fusion = True
    ours.weight.main_grad, ours.weight.grad_added_to_main_grad = main_grad, False


def check_main_grad(group_size: int, kind: str) -> None:
    for zero_out in (False, True):
        for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
            stock, ours, x = pair(kind, group_size)
            once, weight = run(stock, x)["gradient of weight"], ours.weight
            main_grad = torch.ones(weight.shape, dtype=dtype)
            weight.zero_out_wgrad = zero_out
            for calls in (1, 2):
                fuse(ours, main_grad)
                dummy = run(ours, x)["gradient of weight"]
                assert weight.grad_added_to_main_grad is True
                assert weight.main_grad is main_grad
                assert dummy.shape == weight.shape
                assert dummy.dtype == weight.dtype
                assert not zero_out or not dummy.any()
                assert_equal({"main_grad": (1 + calls * once).to(dtype)}, {"main_grad": main_grad}, tolerance)
            del weight.grad_added_to_main_grad
            assert run(ours, x)["gradient of weight"] is None
            assert_equal({"main_grad": (1 + 3 * once).to(dtype)}, {"main_grad": main_grad}, tolerance)
            assert_overlapped(ours, calls=3)


def check_dummies_are_zeros_where_somebody_looks_at_them(group_size: int, kind: str) -> None:
    """Fails without zeros: anomaly mode found "nan values in its 1th output", and deterministic dummies were NaN."""
    stock, ours, x = pair(kind, group_size)
    once = run(stock, x)["gradient of weight"]
    fuse(ours, torch.zeros_like(ours.weight))
    torch.use_deterministic_algorithms(True)
    try:
        # Anomaly mode warns that it is slow.
        with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
            assert not run(ours, x)["gradient of weight"].any()
        assert not run(ours, x)["gradient of weight"].any()
    finally:
        torch.use_deterministic_algorithms(False)
    assert_equal({"main_grad": 2 * once}, {"main_grad": ours.weight.main_grad})
    assert_overlapped(ours, calls=2)


def check_main_grad_replaced_between_passes(group_size: int, kind: str) -> None:
    # A weight used by two layers (tied, several heads) may have main_grad bound anew before backward runs.
    stock, ours, x = pair(kind, group_size)
    first = torch.zeros_like(ours.weight)
    fuse(ours, first)
    output, _ = ours(x)
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    sum_up(output)
    assert ours.weight.main_grad is first
    assert_equal({"main_grad": run(stock, x, backward=sum_up)["gradient of weight"]}, {"main_grad": first})


def check_fusion_with_frozen_weight(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size)
    layer.train(False)
    layer.ours.gradient_accumulation_fusion = True
    layer.assert_overlapped()


def check_fusion_without_main_grad(group_size: int, kind: str) -> None:
    _, ours, x = pair(kind, group_size)
    ours.gradient_accumulation_fusion = True
    ours(x)
    layers.assert_stock(ours, "has no main_grad")
    with torch.no_grad():
        ours(x)
    assert state_of(ours).overlapped_calls == 1


def check_no_more_is_saved_than_by_stock(group_size: int, kind: str) -> None:
    """Fails without the choice of what is saved: with a frozen weight ours kept its input, stock does not."""
    for frozen in ((), ("weight",), ("x",), ("bias",), ("weight", "bias"), ("x", "bias")):
        for skip_bias_add in (False, True):
            stock, ours, x = pair(kind, group_size, skip_bias_add=skip_bias_add)
            found = [_saved_by(layer, x, frozen) for layer in (stock, ours)]
            assert found[1] <= found[0], (kind, frozen, skip_bias_add, found)
            assert "weight" not in frozen or found[1] == found[0], (kind, frozen, skip_bias_add, found)


def _saved_by(layer: Any, x: torch.Tensor, frozen: tuple[str, ...]) -> int:
    """Bytes that autograd keeps of one call."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x.detach().requires_grad_("x" not in frozen))
    return sum(storages.values())


def check_explicit_expert_comm(group_size: int, kind: str) -> None:
    # Shared experts set this after construction and communicate around the layer.
    pair(kind, group_size, skip_bias_add=True).set(explicit_expert_comm=True).assert_stock("explicit_expert_comm")


def check_sequence_parallel_toggled(group_size: int, kind: str) -> None:
    # Inference switches sequence parallelism off on the built model; decoding brings one token.
    layer = pair(kind, group_size)
    layer.set(sequence_parallel=False, allreduce_dgrad=True, training=False)
    with torch.no_grad():
        layer._replace(x=layer.x[:1]).compare_outputs()
    layers.assert_stock(layer.ours, "sequence_parallel is off")
    layer.set(sequence_parallel=True, allreduce_dgrad=False)
    layer.ours(layer.x)
    assert state_of(layer.ours).overlapped_calls == 1


def without_sequence_parallelism(kind: str, group_size: int, rows: int = 6, **options: Any) -> layers.Pair:
    """Any number of rows, of which a row linear brings its features, and a column linear what all ranks have."""
    both = layers.config(group_size, sequence_parallel=False)
    layer = pair(kind, group_size, transformer=both, **options)
    features = layers.IN // (group_size if kind == "row" else 1)
    seed = 100 + (dist.get_rank() if kind == "row" else 0)
    return layer._replace(x=layers.random((rows, layers.BATCH, features), seed))


def check_all_reduces(group_size: int, kind: str) -> None:
    for rows in (6, 5, 1):
        layer = without_sequence_parallelism(kind, group_size, rows)
        found = layer.assert_overlapped()
        name = "output" if kind == "row" else "gradient of x"
        every = [torch.empty_like(found[name]) for _ in range(group_size)]
        dist.all_gather(every, found[name])
        assert all(torch.equal(each, every[0]) for each in every)
    layer = without_sequence_parallelism(kind, group_size, skip_bias_add=True)
    assert layer.assert_overlapped()["returned bias"] is not None
    layer.train(False, "weight")
    layer.compare()
    layer.train(False)
    layer.compare()


def check_all_reduces_into_main_grad(group_size: int, kind: str) -> None:
    stock, ours, x = without_sequence_parallelism(kind, group_size)
    expected = run(stock, x)
    once, main_grad = expected.pop("gradient of weight"), torch.ones_like(ours.weight)
    fuse(ours, main_grad)
    for calls in (1, 2):
        found = run(ours, x)
        assert found.pop("gradient of weight") is not None  # a dummy, for the hooks of the data-parallel wrapper
        assert_equal(expected, found)
        assert_equal({"main_grad": 1 + calls * once}, {"main_grad": main_grad})
    assert_overlapped(ours, calls=2)


def check_prefills_and_decodes(group_size: int, kind: str) -> None:
    layer = without_sequence_parallelism(kind, group_size, rows=100).set(training=False)
    with torch.no_grad():
        layer.compare_outputs()
        assert_overlapped(layer.ours)
        layer._replace(x=layer.x[:1]).compare_outputs()
    (reason,) = state_of(layer.ours).stock_calls
    assert "as decoding does" in reason


def check_evaluation(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size).set(training=False)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            layer.compare_outputs()
    assert_overlapped(layer.ours, calls=2)


def check_length_not_divisible(group_size: int) -> None:
    stock, ours, x = pair("row", group_size)
    for layer in (stock, ours):
        with pytest.raises(AssertionError, match="divisible"):
            layer(x[:-1])
    layers.assert_stock(ours, "not divisible by the")


def check_two_dimensions(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size)
    layer._replace(x=layer.x[:, 0].contiguous()).assert_stock("2 dimensions")


def check_one_rank(group_size: int, kind: str) -> None:
    groups = [dist.new_group([rank]) for rank in range(group_size)]
    transformer = layers.config(group_size)
    pair(kind, 1, transformer=transformer, tp_group=groups[dist.get_rank()]).assert_stock("one rank")


def check_switched_off(group_size: int, kind: str) -> None:
    layer = pair(kind, group_size, overlap=STRICT)
    layer.ours.config.commfuse = False
    layer.assert_stock("config.commfuse is False")
    layer.ours.config.commfuse = True
    layer.ours(layer.x)
    assert state_of(layer.ours).overlapped_calls == 1


def check_raises_instead_of_falling_back(group_size: int, kind: str) -> None:
    _, ours, x = pair(kind, group_size, overlap=STRICT)
    ours.explicit_expert_comm = True
    reason = unsupported_reason(ours, x)
    assert reason is not None
    with pytest.raises(UnsupportedError) as raised:
        ours(x)
    assert reason in str(raised.value)


def check_one_rank_decides_differently(group_size: int, kind: str) -> None:
    # Without the comparison one rank waits in an all-reduce and the other for a transfer.
    layer = pair(kind, group_size, overlap=OverlapConfig(check_decisions=True))
    _, ours, x = layer
    layer.compare()
    first = state_of(ours).place
    layer.set(explicit_expert_comm=True, skip_bias_add=True)
    ours(x)
    assert state_of(ours).stock_calls, "what all ranks decide alike is no error"
    layer.set(explicit_expert_comm=False, skip_bias_add=False)
    without = {
        "column": "sequence_parallel and allreduce_dgrad are off",
        "row": "overlapped, and sequence_parallel is off",
    }
    faults = {
        without[kind]: (ours, "sequence_parallel"),
        "config.commfuse is False": (ours.config, "commfuse"),
    }
    numbers = [first]
    for words, (owner, name) in faults.items():
        if dist.get_rank() == 1:
            setattr(owner, name, False)
        with pytest.raises(ShapeError, match="do not agree") as raised:
            ours(x)
        lines = str(raised.value).splitlines()[1:]
        number = int(lines[0].split("compared layer call ")[1].split()[0])
        assert number > numbers[-1]
        numbers.append(number)
        for rank, decision in enumerate(("overlapped", words)):
            place = f"{type(ours).__qualname__}), compared layer call {number} (this layer's first was {first}): "
            assert lines[rank].startswith(f"  group rank {rank}: layer ({place}{decision}"), lines[rank]
        ours.sequence_parallel = ours.config.commfuse = True
        layer.compare()


def check_a_main_grad_of_another_shape_is_named(group_size: int, kind: str) -> None:
    """Fails without its name: the error was of an argument that the user had not given, of a layer not named."""
    _, ours, x = pair(kind, group_size, tp_comm_buffer_name="fc9")
    fuse(ours, torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ShapeError, match=r"main_grad of fc9 is \[2, 2\] on cpu, but the weight is"):
        ours(x)


def check_logged_once(group_size: int) -> None:
    _, ours, x = pair("column", group_size, tp_comm_buffer_name="fc1")
    x = x[:, 0].contiguous()
    with mock.patch.object(logging.getLogger("commfuse_megatron.plugin.decision"), "handle") as handle:
        for _ in range(3):
            ours(x)
    records = [call.args[0] for call in handle.call_args_list]
    assert len(records) == (1 if dist.get_rank() == 0 else 0), "the first rank of a group speaks for all"
    assert state_of(ours).stock_calls == {unsupported_reason(ours, x): 3}
    for record in records:
        assert unsupported_reason(ours, x) in record.getMessage()
        assert record.getMessage().startswith("fc1 (CommFuseColumnParallelLinear)")


test_layers = make_cpu_test(2, checks_of_module(__name__, 2))
