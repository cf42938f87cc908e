"""Checks of single layers, each run on every rank of one spawn. Order matters only for the last ones, which destroy."""

import copy
import logging
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import CONFIG_VARIABLE, FallbackConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseRowParallelLinear,
    apply_to_spec,
    convert_model,
    model_report,
    unsupported_reason,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear
from commfuse_megatron.plugin.contexts import close_contexts, open_contexts
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.spec import gpt_layer_spec
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, tensor_parallel, transformer_config
from tests.megatron.layers import (
    BATCH,
    IN,
    KINDS,
    OUT,
    ROWS,
    assert_equal,
    assert_overlapped,
    assert_stock,
    build,
    config,
    count_batches,
    example_input,
    pair,
    run,
    stop_counting,
)


def check_plain_call(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        assert_overlapped(ours)


def check_skip_bias_add(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size, skip_bias_add=True)
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        assert_overlapped(ours)
        assert ours(x)[1] is ours.bias


def check_no_bias(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        for layer in (stock, ours):
            layer.bias = None
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        assert_overlapped(ours)


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


def check_expanded_gradient(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        backward = lambda output: output.sum().backward()  # noqa: E731
        assert_equal(run(stock, x, backward=backward), run(ours, x, backward=backward))
        assert_overlapped(ours)


def check_strided_input_and_gradient(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        strided = x.transpose(0, 1).contiguous().transpose(0, 1)
        assert not strided.is_contiguous()

        def backward(output: torch.Tensor) -> None:
            weights = torch.arange(output.numel(), dtype=output.dtype).view(*reversed(output.shape)).permute(2, 1, 0)
            output.backward(weights / output.numel())

        assert_equal(run(stock, x, backward=backward), run(ours, strided, backward=backward))
        assert_overlapped(ours)


def check_changing_lengths(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        for rows in (4, 1, 7, 4):
            x = example_input(kind, group_size, rows)
            assert_equal(run(stock, x), run(ours, x))
        assert_overlapped(ours, calls=4)


def check_16_and_32_bit(group_size: int) -> None:
    for kind in KINDS:
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
            stock, ours = pair(kind, group_size, config(group_size, dtype=dtype))
            x = example_input(kind, group_size, dtype=dtype)
            assert_equal(run(stock, x), run(ours, x), tolerance)
            assert_overlapped(ours)


def check_autocast(group_size: int) -> None:
    for kind in KINDS:
        _, ours = pair(kind, group_size, config(group_size, dtype=torch.float32))
        x = example_input(kind, group_size, dtype=torch.float32)
        expected = run(ours, x)
        with torch.autocast("cpu", torch.bfloat16):
            output, _ = ours(x)
        assert output.dtype == torch.bfloat16
        error = (output - expected["output"]).abs().max() / expected["output"].abs().max()
        assert error < 3e-2
        assert_overlapped(ours, calls=2)


def check_output_is_fresh(group_size: int) -> None:
    for kind in KINDS:
        _, ours = pair(kind, group_size)
        first, _ = ours(example_input(kind, group_size))
        assert not first._is_view()
        assert first.is_contiguous()
        kept = first.detach().clone()
        second, _ = ours(2 * example_input(kind, group_size))
        assert first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        assert torch.equal(first, kept)


def check_frozen_weight(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
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


def check_frozen_weight_trainable_bias(group_size: int) -> None:
    for kind in KINDS:
        _, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        expected = run(ours, x)["gradient of bias"]
        ours.weight.requires_grad_(False)
        assert_equal({"bias": expected}, {"bias": run(ours, x)["gradient of bias"]})


def check_frozen_input(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        gradients = []
        for layer in (stock, ours):
            output, _ = layer(x)
            output.sum().backward()
            gradients.append({name: p.grad for name, p in layer.named_parameters()})
        assert_equal(*gradients)
        assert_overlapped(ours)


def check_main_grad(group_size: int) -> None:
    for kind in KINDS:
        for zero_out in (False, True):
            for dtype in (torch.float64, torch.float32):
                _check_main_grad(kind, group_size, zero_out, dtype)


def _check_main_grad(kind: str, group_size: int, zero_out: bool, dtype: torch.dtype) -> None:
    # Stock needs Apex for this, so the expected sum comes from its ordinary gradients.
    stock, ours = pair(kind, group_size)
    x = example_input(kind, group_size)
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


def check_main_grad_replaced_between_passes(group_size: int) -> None:
    # A weight used by two layers (tied, several heads) may have main_grad bound anew before backward runs.
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        ours.gradient_accumulation_fusion = True
        first = ours.weight.main_grad = torch.zeros_like(ours.weight)
        output, _ = ours(x)
        ours.weight.main_grad = torch.zeros_like(ours.weight)
        output.sum().backward()
        assert ours.weight.main_grad is first
        expected = run(stock, x, backward=lambda output: output.sum().backward())["gradient of weight"]
        assert_equal({"main_grad": expected}, {"main_grad": first})


def check_fusion_with_frozen_weight(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        for layer in (stock, ours):
            layer.requires_grad_(False)
        ours.gradient_accumulation_fusion = True
        assert_equal(run(stock, x), run(ours, x))
        assert_overlapped(ours)


def check_fusion_without_main_grad(group_size: int) -> None:
    for kind in KINDS:
        _, ours = pair(kind, group_size)
        ours.gradient_accumulation_fusion = True
        x = example_input(kind, group_size)
        ours(x)
        assert_stock(ours, "has no main_grad")
        with torch.no_grad():
            ours(x)
        assert state_of(ours).overlapped_calls == 1


def check_explicit_expert_comm(group_size: int) -> None:
    # Shared experts set this after construction and communicate around the layer.
    for kind in KINDS:
        stock, ours = pair(kind, group_size, skip_bias_add=True)
        x = example_input(kind, group_size)
        for layer in (stock, ours):
            layer.explicit_expert_comm = True
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "explicit_expert_comm")


def check_sequence_parallel_toggled(group_size: int) -> None:
    # Inference switches sequence parallelism off on the built model; decoding brings one token.
    for kind in KINDS:
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


def check_evaluation(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
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


def check_two_dimensions(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)[:, 0].contiguous()
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "2 dimensions")


def check_one_rank(group_size: int) -> None:
    groups = [dist.new_group([rank]) for rank in range(group_size)]
    for kind in KINDS:
        stock, ours = pair(kind, 1, config(group_size), tp_group=groups[dist.get_rank()])
        x = example_input(kind, 1)
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "one rank")


def check_switched_off(group_size: int) -> None:
    for kind in KINDS:
        transformer = config(group_size)
        transformer.commfuse = False
        strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
        stock, _ = pair(kind, group_size)
        cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
        ours = build(kind, cls, transformer, overlap_config=strict)
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "config.commfuse is False")
        transformer.commfuse = True
        ours(x)
        assert state_of(ours).overlapped_calls == 1


def check_raises_instead_of_falling_back(group_size: int) -> None:
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    for kind in KINDS:
        cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
        ours = build(kind, cls, config(group_size), overlap_config=strict)
        ours.sequence_parallel = False
        x = example_input(kind, group_size)
        reason = unsupported_reason(ours, x)
        assert reason is not None
        with pytest.raises(UnsupportedError) as raised:
            ours(x)
        assert reason in str(raised.value)


def check_logged_once(group_size: int) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("commfuse_megatron.plugin.decision")
    logger.addHandler(handler)
    try:
        _, ours = pair("column", group_size, tp_comm_buffer_name="fc1")
        x = example_input("column", group_size)[:, 0].contiguous()
        for _ in range(3):
            ours(x)
    finally:
        logger.removeHandler(handler)
    assert len(records) == (1 if dist.get_rank() == 0 else 0), "the first rank of a group speaks for all"
    assert state_of(ours).stock_calls == {unsupported_reason(ours, x): 3}
    for record in records:
        assert unsupported_reason(ours, x) in record.getMessage()
        assert record.getMessage().startswith("fc1 (CommFuseColumnParallelLinear)")


def check_report(group_size: int) -> None:
    model = torch.nn.ModuleDict(
        {
            "stock": build("row", RowParallelLinear, config(group_size)),
            "ours": build("row", CommFuseRowParallelLinear, config(group_size)),
            "off": build("column", CommFuseColumnParallelLinear, config(group_size)),
        }
    )
    model["off"].sequence_parallel = False
    before = {layer.name: layer for layer in model_report(model).layers}
    assert before["ours"].path == before["off"].path == "not called"
    assert before["ours"].reasons == ()
    assert "sequence_parallel is off" in before["off"].reasons[0]
    x = example_input("row", group_size)
    model["ours"](x)
    report = model_report(model)
    after = {layer.name: layer for layer in report.layers}
    assert (after["stock"].path, after["ours"].path) == ("stock", "overlapped")
    assert "Megatron's own class" in after["stock"].reasons[0]
    assert (report.overlapped_calls, report.stock_calls) == (1, 0)
    assert {record.op for record in report.ops} >= {"linear_reduce_scatter"}
    model["ours"].sequence_parallel = False
    model["ours"](x)
    assert model_report(model).layers[1].path == "mixed"
    assert report.to_dict()["layers"][1]["overlapped_calls"] == 1


def check_config_file(group_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ring.yaml"
        file.write_text("linear: {fprop: {algorithm: ring}}\n", encoding="utf-8")
        transformer = config(group_size)
        transformer.commfuse_config = str(file)
        x = example_input("row", group_size)
        stock, ours = pair("row", group_size, transformer)
        assert_equal(run(stock, x), run(ours, x))
        assert state_of(ours).context.config.linear.fprop.algorithm == "ring"
        os.environ[CONFIG_VARIABLE] = str(file)
        try:
            _, ours = pair("row", group_size)
            ours(x)
        finally:
            del os.environ[CONFIG_VARIABLE]
        assert state_of(ours).context.config.linear.fprop.algorithm == "ring"
        file.write_text("linear: {fprop: {algorithm: rong}}\n", encoding="utf-8")
        _, ours = pair("row", group_size, transformer)
        with pytest.raises(ConfigError, match="algorithm"):
            ours(x)


def check_layers_share_a_context(group_size: int) -> None:
    x = example_input("row", group_size)
    layers = [pair("row", group_size)[1] for _ in range(3)]
    layers[2] = build("row", CommFuseRowParallelLinear, config(group_size), overlap_config=OverlapConfig(record=True))
    for layer in layers:
        layer(x)
    contexts = [state_of(layer).context for layer in layers]
    assert contexts[0] is contexts[1]
    assert contexts[2] is not contexts[0]
    assert contexts[2].config.record


def check_deterministic_mode_never_measures(group_size: int) -> None:
    transformer = config(group_size)
    transformer.deterministic_mode = True
    layers = [build("column", CommFuseColumnParallelLinear, transformer) for _ in range(2)]
    for layer in layers:
        for _ in range(2):
            layer(example_input("column", group_size))
    context = state_of(layers[0]).context
    assert context.config.plan.measure == "never"
    assert state_of(layers[1]).context is context
    ordinary = build("column", CommFuseColumnParallelLinear, config(group_size))
    ordinary(example_input("column", group_size))
    assert state_of(ordinary).context.config.plan.measure == "auto"


def check_nothing_but_scalars_on_the_config(group_size: int) -> None:
    transformer = config(group_size)
    before = {name: id(value) for name, value in vars(transformer).items()}
    _, ours = pair("row", group_size, transformer)
    run(ours, example_input("row", group_size))
    assert {name: id(value) for name, value in vars(transformer).items()} == before
    assert vars(copy.deepcopy(transformer)).keys() == before.keys()


def check_state_is_not_copied(group_size: int) -> None:
    overlap = OverlapConfig(record=True)
    ours = build("row", CommFuseRowParallelLinear, config(group_size), overlap_config=overlap)
    run(ours, example_input("row", group_size))
    for copied in (copy.deepcopy(state_of(ours)), pickle.loads(pickle.dumps(state_of(ours)))):
        assert copied.overlap_config == overlap
        assert (copied.context, copied.overlapped_calls) == (None, 0)
    assert not any("commfuse" in key for key in ours.state_dict())


def check_convert_model(group_size: int) -> None:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    stock = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
    expected = loss_of(stock, tokens)
    hooked: list[Any] = []
    stock.output_layer.register_forward_hook(lambda *_: hooked.append(1))
    parameters = dict(stock.named_parameters())
    overlap = OverlapConfig(record=True)
    assert convert_model(stock) is stock
    assert convert_model([stock], overlap)[0] is stock
    assert convert_model(stock) is stock
    assert type(stock.output_layer) is CommFuseColumnParallelLinear
    assert all(p is parameters[name] for name, p in stock.named_parameters())
    found = loss_of(stock, tokens)
    assert abs(found - expected) <= 1e-13 * abs(expected)
    report = model_report(stock)
    assert [layer.path for layer in report.layers] == ["overlapped"] * 5
    assert hooked == [1]
    assert state_of(stock.output_layer).context.config == overlap
    assert state_of(stock.output_layer).name == "output_layer"
    with pytest.raises(ConfigError, match="torch module"):
        convert_model("model")


def check_spec_carries_config(group_size: int) -> None:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    overlap = OverlapConfig(record=True)
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=overlap)
    loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1)))
    assert all(state_of(m).context.config == overlap for m in model.modules() if "CommFuse" in type(m).__name__)


def check_whole_model_evaluates_and_decodes(group_size: int) -> None:
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    stock, ours = (build_gpt(gpt, transformer_config(gpt, group_size), overlap=o).eval() for o in (False, True))
    with torch.no_grad():
        assert abs(loss_of(ours, tokens) - loss_of(stock, tokens)) <= 1e-13
        assert model_report(ours).stock_calls == 0
        for model in (stock, ours):
            set_model_to_sequence_parallel(model, False)
        one_token = tokens[:, :2]
        assert abs(loss_of(ours, one_token) - loss_of(stock, one_token)) <= 1e-13
    assert {layer.path for layer in model_report(ours).layers} == {"mixed"}


def check_experts_stay_stock(group_size: int) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.plugin.spec import block_spec

    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    losses, gradients = [], []
    for overlap in (False, True):
        transformer = transformer_config(
            gpt,
            group_size,
            num_moe_experts=4,
            moe_ffn_hidden_size=32,
            moe_router_topk=2,
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_intermediate_size=32,
            expert_tensor_parallel_size=group_size,
        )
        torch.manual_seed(7)
        spec = apply_to_spec(get_gpt_layer_local_spec(num_experts=4))
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=block_spec(spec, transformer),
            vocab_size=256,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
        transformer.commfuse = overlap
        loss = loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1)))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert abs(losses[1] - losses[0]) <= 1e-13
    assert_equal(*gradients)
    paths = {layer.name: layer for layer in model_report(model).layers}
    experts = [layer for name, layer in paths.items() if "local_experts" in name]
    assert len(experts) == 8
    assert all(layer.path == "stock" and "expert" in layer.reasons[0] for layer in experts if layer.stock_calls)
    shared = [layer for name, layer in paths.items() if "shared_experts" in name]
    assert [layer.path for layer in shared] == ["overlapped", "overlapped"]


def check_spec_for_the_command_line(group_size: int) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.training.models.gpt import GPTModelConfig

    gpt = SmallGPT(dtype=torch.float64)
    transformer = transformer_config(gpt, group_size)
    spec = gpt_layer_spec(GPTModelConfig(transformer=transformer, vocab_size=256, seq_length=64), vp_stage=None)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))).backward()
    paths = [layer.path for layer in model_report(model).layers]
    assert paths.count("overlapped") == 8
    assert paths.count("stock") == 1, "a spec does not reach the output layer"


def check_close_contexts(group_size: int) -> None:
    _, ours = pair("row", group_size)
    x = example_input("row", group_size)
    ours(x)
    context = state_of(ours).context
    close_contexts()
    assert open_contexts() == []
    assert not context.is_usable
    ours(x)
    assert state_of(ours).context is not context


def check_groups_destroyed_and_made_again(group_size: int) -> None:
    from megatron.core import parallel_state

    from commfuse_megatron.testing.gpt import tensor_parallel

    x = example_input("row", group_size)
    stock, ours = pair("row", group_size)
    expected = run(stock, x)
    assert_equal(expected, run(ours, x))
    old = state_of(ours).context
    parallel_state.destroy_model_parallel()
    with tensor_parallel(group_size):
        stock, ours = pair("row", group_size)
        assert_equal(expected, run(ours, x))
        new = state_of(ours).context
        assert new is not old
        assert not old.is_usable, "a context whose group Megatron has dropped is closed"
        assert open_contexts() == [new]
        assert new.group is parallel_state.get_tensor_model_parallel_group()


def check_group_destroyed_in_torch(group_size: int) -> None:
    # The fixture's parallel state is gone by now; explicit groups do without it.
    with tensor_parallel(group_size):
        x = example_input("row", group_size)
        groups = [dist.new_group(list(range(group_size))) for _ in range(2)]
        _, ours = pair("row", group_size, tp_group=groups[0])
        ours(x)
        first = state_of(ours).context
        dist.destroy_process_group(groups[0])
        _, ours = pair("row", group_size, tp_group=groups[1])
        ours(x)
        assert not first.is_usable
        assert state_of(ours).context.is_usable
