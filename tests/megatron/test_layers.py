"""Single layers against stock Megatron's, two ranks on the CPU in float64; layers that take Megatron's own path."""

import logging
from typing import Any

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import FallbackConfig
from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseRowParallelLinear,
    unsupported_reason,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear
from commfuse_megatron.plugin.decision import state_of
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import (
    BATCH,
    IN,
    OUT,
    ROWS,
    assert_equal,
    assert_overlapped,
    assert_overlapped_as_stock,
    assert_stock,
    assert_stock_as_stock,
    build,
    config,
    count_batches,
    example_input,
    pair,
    pair_and_input,
    run,
    stop_counting,
)


def check_plain_call(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    assert_overlapped_as_stock(stock, ours, x)


def check_skip_bias_add(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size, skip_bias_add=True)
    assert_overlapped_as_stock(stock, ours, x)
    assert ours(x)[1] is ours.bias


def check_no_bias(group_size: int, kind: str) -> None:
    stock, ours = pair(kind, group_size)
    for layer in (stock, ours):
        layer.bias = None
    x = example_input(kind, group_size)
    assert_overlapped_as_stock(stock, ours, x)


def check_gathered_output(group_size: int) -> None:
    x = example_input("column", group_size)
    stock, ours = pair("column", group_size, gather_output=True)
    assert_equal(run(stock, x), run(ours, x))
    assert run(ours, x)["output"].shape == (ROWS * group_size, BATCH, OUT)
    assert_equal(run(stock, x, runtime_gather_output=False), run(ours, x, runtime_gather_output=False))
    stock, ours = pair("column", group_size)
    assert_equal(run(stock, x, runtime_gather_output=True), run(ours, x, runtime_gather_output=True))
    assert_overlapped(ours)


def check_external_weight(group_size: int) -> None:
    x = example_input("column", group_size)
    weights = []
    for cls in (ColumnParallelLinear, CommFuseColumnParallelLinear):
        layer = build("column", cls, config(group_size), skip_weight_param_allocation=True)
        assert layer.weight is None
        generator = torch.Generator().manual_seed(4)
        weight = torch.randn(OUT // group_size, IN, dtype=torch.float64, generator=generator).requires_grad_()
        results = run(layer, x, weight=weight)
        weights.append((results, weight.grad))
        with pytest.raises(RuntimeError, match="skip_weight_param_allocation"):
            layer(x)
    assert_equal(weights[0][0], weights[1][0])
    assert_equal({"weight": weights[0][1]}, {"weight": weights[1][1]})
    assert_overlapped(layer)


def check_expanded_gradient(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    backward = lambda output: output.sum().backward()  # noqa: E731
    assert_equal(run(stock, x, backward=backward), run(ours, x, backward=backward))
    assert_overlapped(ours)


def check_strided_input_and_gradient(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    strided = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert not strided.is_contiguous()

    def backward(output: torch.Tensor) -> None:
        weights = torch.arange(output.numel(), dtype=output.dtype).view(*reversed(output.shape)).permute(2, 1, 0)
        output.backward(weights / output.numel())

    assert_equal(run(stock, x, backward=backward), run(ours, strided, backward=backward))
    assert_overlapped(ours)


def check_changing_lengths(group_size: int, kind: str) -> None:
    stock, ours = pair(kind, group_size)
    for rows in (4, 1, 7, 4):
        x = example_input(kind, group_size, rows)
        assert_equal(run(stock, x), run(ours, x))
    assert_overlapped(ours, calls=4)


def check_16_and_32_bit(group_size: int, kind: str) -> None:
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        stock, ours, x = pair_and_input(kind, group_size, dtype=dtype)
        assert_equal(run(stock, x), run(ours, x), tolerance)
        assert_overlapped(ours)


def check_autocast(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size, dtype=torch.float32)
    expected = run(ours, x)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = ours(x)
        assert output.dtype == stock(x)[0].dtype == torch.float32, "the bias, which autocast leaves alone, is fp32"
    error = (output - expected["output"]).abs().max() / expected["output"].abs().max()
    assert error < 3e-2
    assert_overlapped(ours, calls=2)


def check_bias_of_another_dtype(group_size: int, kind: str) -> None:
    """Fails without adding such a bias afterwards: our operations take one dtype for all."""
    stock, ours = pair(kind, group_size, config(group_size, dtype=torch.bfloat16))
    for layer in (stock, ours):
        layer.bias = torch.nn.Parameter(0.1 * torch.arange(layer.bias.numel(), dtype=torch.float32))
    x = example_input(kind, group_size, dtype=torch.bfloat16)
    if kind == "column":  # stock adds the bias within the operation, whose backward pass then refuses
        assert torch.equal(stock(x)[0], ours(x)[0])
    else:
        found = run(ours, x)
        assert found["output"].dtype == torch.float32
        assert_equal(run(stock, x), found, tolerance=2**-7)  # bf16 partials, summed in another order
    assert_overlapped(ours)


def check_compiled(group_size: int, kind: str) -> None:
    # Fails without leaving the layers out of the graph: the compiler cannot trace them.
    stock, ours, x = pair_and_input(kind, group_size)
    compiled = torch.compile(ours, backend="aot_eager")
    assert_equal(run(stock, x), run(ours, x))

    def double(x: torch.Tensor, layer: Any = compiled) -> tuple[torch.Tensor, Any]:
        return layer(x)[0] * 2, None

    output, _ = torch.compile(double, backend="aot_eager")(x)
    assert_equal({"output": 2 * stock(x)[0].detach()}, {"output": output.detach()})
    output.sum().backward()
    assert_overlapped(ours, calls=2)


def check_output_is_fresh(group_size: int, kind: str) -> None:
    _, ours = pair(kind, group_size)
    first, _ = ours(example_input(kind, group_size))
    assert not first._is_view()
    assert first.is_contiguous()
    kept = first.detach().clone()
    second, _ = ours(2 * example_input(kind, group_size))
    assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
    assert torch.equal(first, kept)


def check_frozen_weight(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    run(ours, x)
    trainable = count_batches(ours)
    run(ours, x)
    stop_counting(ours)
    for layer in (stock, ours):
        layer.requires_grad_(False)
    frozen = count_batches(ours)
    found = run(ours, x)
    stop_counting(ours)
    assert_equal(run(stock, x), found)
    assert found["gradient of weight"] is None
    steps = group_size - 1
    # fprop; re-gather of x and scatter of dgrad, or gather of dy
    assert trainable[0] == (3 * steps if kind == "column" else 2 * steps), trainable
    assert frozen[0] == 2 * steps, frozen
    assert_overlapped(ours, calls=3)


def check_frozen_weight_trainable_bias(group_size: int, kind: str) -> None:
    _, ours, x = pair_and_input(kind, group_size)
    expected = run(ours, x)["gradient of bias"]
    ours.weight.requires_grad_(False)
    assert_equal({"bias": expected}, {"bias": run(ours, x)["gradient of bias"]})


def check_frozen_input(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    gradients = []
    for layer in (stock, ours):
        output, _ = layer(x)
        output.sum().backward()
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    assert_equal(*gradients)
    assert_overlapped(ours)


def check_main_grad(group_size: int, kind: str) -> None:
    for zero_out in (False, True):
        for dtype in (torch.float64, torch.float32):
            _check_main_grad(kind, group_size, zero_out, dtype)


def _check_main_grad(kind: str, group_size: int, zero_out: bool, dtype: torch.dtype) -> None:
    # Stock needs Apex for this, so the expected sum comes from its ordinary gradients.
    stock, ours, x = pair_and_input(kind, group_size)
    weight = ours.weight
    ours.gradient_accumulation_fusion = True
    main_grad = weight.main_grad = torch.ones(weight.shape, dtype=dtype)
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = zero_out
    once = run(stock, x)["gradient of weight"]
    for calls in (1, 2):
        weight.grad_added_to_main_grad = False
        dummy = run(ours, x)["gradient of weight"]
        assert weight.grad_added_to_main_grad is True
        assert weight.main_grad is main_grad
        assert dummy.shape == weight.shape
        assert dummy.dtype == weight.dtype
        assert not zero_out or not dummy.any()
        tolerance = 1e-13 if dtype == torch.float64 else 1e-6
        assert_equal({"main_grad": (1 + calls * once).to(dtype)}, {"main_grad": main_grad}, tolerance)
    del weight.grad_added_to_main_grad
    assert run(ours, x)["gradient of weight"] is None
    assert_equal({"main_grad": (1 + 3 * once).to(dtype)}, {"main_grad": main_grad}, tolerance)
    assert_overlapped(ours, calls=3)


def check_dummies_are_zeros_where_somebody_looks_at_them(group_size: int, kind: str) -> None:
    """Fails without zeros: anomaly mode found "nan values in its 1th output", and deterministic dummies were NaN."""
    stock, ours, x = pair_and_input(kind, group_size)
    once = run(stock, x)["gradient of weight"]
    ours.gradient_accumulation_fusion = True
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    ours.weight.grad_added_to_main_grad = False
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
    stock, ours, x = pair_and_input(kind, group_size)
    ours.gradient_accumulation_fusion = True
    first = ours.weight.main_grad = torch.zeros_like(ours.weight)
    output, _ = ours(x)
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    output.sum().backward()
    assert ours.weight.main_grad is first
    expected = run(stock, x, backward=lambda output: output.sum().backward())["gradient of weight"]
    assert_equal({"main_grad": expected}, {"main_grad": first})


def check_fusion_with_frozen_weight(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    for layer in (stock, ours):
        layer.requires_grad_(False)
    ours.gradient_accumulation_fusion = True
    assert_overlapped_as_stock(stock, ours, x)


def check_fusion_without_main_grad(group_size: int, kind: str) -> None:
    _, ours = pair(kind, group_size)
    ours.gradient_accumulation_fusion = True
    x = example_input(kind, group_size)
    ours(x)
    assert_stock(ours, "has no main_grad")
    with torch.no_grad():
        ours(x)
    assert state_of(ours).overlapped_calls == 1


def check_no_more_is_saved_than_by_stock(group_size: int, kind: str) -> None:
    """Fails without the choice of what is saved: with a frozen weight ours kept its input, stock does not."""
    for frozen in ((), ("weight",), ("x",), ("bias",), ("weight", "bias"), ("x", "bias")):
        for skip_bias_add in (False, True):
            found = [_saved_by(layer, kind, frozen) for layer in pair(kind, group_size, skip_bias_add=skip_bias_add)]
            assert found[1] <= found[0], (kind, frozen, skip_bias_add, found)
            assert "weight" not in frozen or found[1] == found[0], (kind, frozen, skip_bias_add, found)


def _saved_by(layer: Any, kind: str, frozen: tuple[str, ...]) -> int:
    """Bytes that autograd keeps of one call."""
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in frozen)
    x = example_input(kind, layer.tp_group.size()).requires_grad_("x" not in frozen)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(storages.values())


def check_explicit_expert_comm(group_size: int, kind: str) -> None:
    # Shared experts set this after construction and communicate around the layer.
    stock, ours, x = pair_and_input(kind, group_size, skip_bias_add=True)
    for layer in (stock, ours):
        layer.explicit_expert_comm = True
    assert_stock_as_stock(stock, ours, x, "explicit_expert_comm")


def check_sequence_parallel_toggled(group_size: int, kind: str) -> None:
    # Inference switches sequence parallelism off on the built model; decoding brings one token.
    stock, ours = pair(kind, group_size)
    x = example_input(kind, group_size)[:1]
    for layer in (stock, ours):
        layer.sequence_parallel = False
        layer.allreduce_dgrad = True
        layer.eval()
    with torch.no_grad():
        assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
    assert_stock(ours, "sequence_parallel is off")
    ours.sequence_parallel = True
    ours.allreduce_dgrad = False
    ours(example_input(kind, group_size))
    assert state_of(ours).overlapped_calls == 1


def check_evaluation(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    for layer in (stock, ours):
        layer.eval()
    with torch.no_grad():
        assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
    with torch.inference_mode():
        assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
    assert_overlapped(ours, calls=2)


def check_length_not_divisible(group_size: int) -> None:
    stock, ours = pair("row", group_size)
    x = example_input("row", group_size)[:-1]
    for layer in (stock, ours):
        with pytest.raises(AssertionError, match="divisible"):
            layer(x)
    assert_stock(ours, "not divisible by the")


def check_two_dimensions(group_size: int, kind: str) -> None:
    stock, ours, x = pair_and_input(kind, group_size)
    x = x[:, 0].contiguous()
    assert_stock_as_stock(stock, ours, x, "2 dimensions")


def check_one_rank(group_size: int, kind: str) -> None:
    groups = [dist.new_group([rank]) for rank in range(group_size)]
    stock, ours = pair(kind, 1, config(group_size), tp_group=groups[dist.get_rank()])
    x = example_input(kind, 1)
    assert_stock_as_stock(stock, ours, x, "one rank")


def check_switched_off(group_size: int, kind: str) -> None:
    transformer = config(group_size)
    transformer.commfuse = False
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    stock, _ = pair(kind, group_size)
    cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
    ours = build(kind, cls, transformer, overlap_config=strict)
    x = example_input(kind, group_size)
    assert_stock_as_stock(stock, ours, x, "config.commfuse is False")
    transformer.commfuse = True
    ours(x)
    assert state_of(ours).overlapped_calls == 1


def check_raises_instead_of_falling_back(group_size: int, kind: str) -> None:
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
    ours = build(kind, cls, config(group_size), overlap_config=strict)
    ours.sequence_parallel = False
    x = example_input(kind, group_size)
    reason = unsupported_reason(ours, x)
    assert reason is not None
    with pytest.raises(UnsupportedError) as raised:
        ours(x)
    assert reason in str(raised.value)


def check_one_rank_decides_differently(group_size: int, kind: str) -> None:
    # Without the comparison one rank waits in an all-reduce and the other for a transfer.
    stock, _ = pair(kind, group_size)
    cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
    ours = build(kind, cls, config(group_size), overlap_config=OverlapConfig(check_decisions=True))
    x = example_input(kind, group_size)
    assert_equal(run(stock, x), run(ours, x))
    first = state_of(ours).place
    for layer in (stock, ours):
        layer.explicit_expert_comm = layer.skip_bias_add = True
    ours(x)
    assert state_of(ours).stock_calls, "what all ranks decide alike is no error"
    for layer in (stock, ours):
        layer.explicit_expert_comm = layer.skip_bias_add = False
    faults = {
        "sequence_parallel is off": (ours, "sequence_parallel"),
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
        assert_equal(run(stock, x), run(ours, x))


def check_a_main_grad_of_another_shape_is_named(group_size: int, kind: str) -> None:
    """Fails without its name: the error was of an argument that the user had not given, of a layer not named."""
    ours = pair(kind, group_size, tp_comm_buffer_name="fc9")[1]
    ours.gradient_accumulation_fusion = True
    ours.weight.main_grad = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(ShapeError, match=r"main_grad of fc9 is \[2, 2\] on cpu, but the weight is"):
        ours(example_input(kind, group_size))


def check_logged_once(group_size: int) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("commfuse_megatron.plugin.decision")
    logger.addHandler(handler)
    try:
        _, ours, x = pair_and_input("column", group_size, tp_comm_buffer_name="fc1")
        x = x[:, 0].contiguous()
        for _ in range(3):
            ours(x)
    finally:
        logger.removeHandler(handler)
    assert len(records) == (1 if dist.get_rank() == 0 else 0), "the first rank of a group speaks for all"
    assert state_of(ours).stock_calls == {unsupported_reason(ours, x): 3}
    for record in records:
        assert unsupported_reason(ours, x) in record.getMessage()
        assert record.getMessage().startswith("fc1 (CommFuseColumnParallelLinear)")


test_layers = make_cpu_test(2, checks_of_module(__name__, 2))
