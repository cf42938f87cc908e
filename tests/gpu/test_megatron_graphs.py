"""Megatron's CUDA graphs on two GPUs: layers inside them are overlapped, and give what they give outside.

`cuda_graph_impl` local: every transformer layer is a graph of its forward and one of its backward pass, recorded in the
first step and replayed in the others, between an embedding and an output layer that stay outside. full_iteration: one
graph of both passes of the whole model. At every step there are new tokens and the weights are moved, so that whatever
a graph has kept of the capture is wrong by far.

Limits: in fp32 a gradient is off by some 1e-6 of its largest element when sums of a few hundred terms are in another
order, by 1e-1 and more when a transfer is lost or comes from another step. Transformer Engine multiplies fp32 in TF32,
so against it ours may be off by 1e-2; ours in and outside of graphs are still the same GEMMs. In bf16 only those two
are compared: the same kernels, up to what attention's backward adds in any order.
"""

import functools
import gc
import sys
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig, LinearConfig, PassConfig, TransportConfig
from tests.gpu import models
from tests.gpu.models import LENGTH, gradients_of, make_gpt, tokens_of
from tests.harness.checks import make_test

NUM_STEPS, WARM_UP = 6, 2
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2**-6}
TF32 = 1e-2

pytestmark = models.NEEDS_TWO_GPUS


class Steps(NamedTuple):
    """What a model gave at every step, and what became of its layers."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    report: object


def _config(transport, path="sliced", *, m=1, attention="row_parallel"):
    forward = chosen = PassConfig()
    if path != "auto":
        chosen = PassConfig(path=path, algorithm="direct", chunks_per_shard=m)
        forward = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=m)
    return OverlapConfig(
        linear=LinearConfig(fprop=forward, dgrad=chosen),
        transport=TransportConfig(backend=transport, timeout_s=20.0),
        attention=AttentionConfig(path=attention),
    )


def _build(device, spec, dtype, overlap, graphs, **options):
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    is_te = spec == "te"
    model_parallel_cuda_manual_seed(1234, te_rng_tracker=is_te, use_cudagraphable_rng=True, force_reset_rng=True)
    options |= {"cuda_graph_impl": graphs, "cuda_graph_modules": [], "cuda_graph_warmup_steps": WARM_UP}
    return models.build(make_gpt(dtype), 2, device, overlap=overlap, is_te=is_te, **options)


def _set_weights(model):
    """By name, whatever the class of the layer, equally on all ranks."""
    with torch.no_grad():
        for number, (name, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(number)
            noise = 0.05 * torch.randn(parameter.shape, generator=generator)
            values = noise + 1 if name.endswith(("layernorm.weight", "layer_norm_weight")) else noise
            parameter.copy_(values.to(parameter.device, parameter.dtype))


def _move_weights(model, step):
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            generator = torch.Generator().manual_seed(1000 * (step + 1) + number)
            parameter.add_((0.01 * torch.randn(parameter.shape, generator=generator)).to(parameter))


def _clean_up():
    """Graphs go before the communicators that they captured: NCCL destroys none that a graph still holds.

    Megatron only forgets its graphs, stock ones too, and autograd's nodes of replays go on holding some.
    """
    from megatron.core.transformer.cuda_graphs import delete_cuda_graphs

    from commfuse_megatron.plugin import reset_contexts

    torch.cuda.synchronize()
    delete_cuda_graphs()
    gc.collect()
    for graph in [held for held in gc.get_objects() if isinstance(held, torch.cuda.CUDAGraph)]:
        graph.reset()
    torch.cuda.set_stream(torch.cuda.default_stream())
    reset_contexts()
    gc.collect()


def _train(device, spec, dtype, overlap, *, graphs="none", fuses_gradients=False, options=None):
    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.testing.training import Training
    from tests.megatron.models import fuse_gradients

    model = _build(device, spec, dtype, overlap, graphs, **(options or {}))
    _set_weights(model)
    if fuses_gradients:
        fuse_gradients(model)
    run = Training(model, with_mask=False)
    steps = Steps([], [], None)
    for step in range(NUM_STEPS):
        _move_weights(model, step)
        steps.losses.append(run.backward(tokens_of(device, step)))
        steps.gradients.append({name: g.cpu() for name, g in gradients_of(model).items()})
    steps = steps._replace(report=model_report(model) if overlap else None)
    del run, model
    _clean_up()
    return steps


@functools.cache
def _stock(device, spec, dtype):
    return _train(device, spec, dtype, False)


def _error(expected, found):
    """The largest difference of a loss or a gradient, of the largest element; where; and whether all bits agree."""
    worst, where, is_equal = 0.0, "", True
    for step in range(NUM_STEPS):
        pairs = {"loss": (torch.tensor(expected.losses[step]), torch.tensor(found.losses[step]))}
        assert expected.gradients[step].keys() == found.gradients[step].keys()
        pairs |= {name: (g, found.gradients[step][name]) for name, g in expected.gradients[step].items()}
        for name, (a, b) in pairs.items():
            error = ((a - b).abs().max() / a.abs().max()).item()
            is_equal = is_equal and torch.equal(a, b)
            if not error <= worst:  # not a number counts
                worst, where = error, f"{name} at step {step}"
    return worst, where, is_equal


def _say(text):
    if dist.get_rank() == 0:
        sys.stderr.write(f"    {text}\n")


def _assert_near(what, expected, found, limit):
    error, where, is_equal = _error(expected, found)
    _say(f"{what}: {'bit for bit' if is_equal else f'{error:.1e} ({where})'}")
    assert error <= limit, f"{what}: {where} differs by {error:.1e}, more than {limit:.1e}"


def _assert_overlapped(report, graphs, *, is_forced, splits_queries, is_over_nccl):
    """Layers in graphs were called when recorded, in the warm-up and at the capture, and overlapped every time.

    Over NCCL the captured call is Megatron's own.
    """
    from commfuse_megatron.plugin import capture

    in_graphs = {"none": NUM_STEPS, "local": 1 + WARM_UP + 1, "full_iteration": WARM_UP + 1}[graphs]
    stays = int(is_over_nccl and graphs != "none")
    assert len(report.layers) == 2 * 4 + 2, report.layers
    for layer in report.layers:
        is_in_graph = ".layers." in layer.name or graphs == "full_iteration"
        calls, stock_calls = (in_graphs - stays, stays) if is_in_graph else (NUM_STEPS, 0)
        assert layer.stock_calls == stock_calls, layer
        assert layer.reasons == ((capture.OVER_NCCL,) if stock_calls else ()), layer
        if is_forced:
            assert layer.overlapped_calls == calls, layer
        else:
            assert layer.overlapped_calls + layer.sequential_calls == calls, layer
    for attention in report.attentions:
        assert attention.overlapped_calls == (in_graphs - stays if splits_queries else 0), attention


def _stock_graphs(device, spec, dtype):
    found = _train(device, spec, dtype, False, graphs="local")
    _assert_near("stock's graphs, and stock", _stock(device, spec, dtype), found, LIMITS[dtype])


def _compare(device, spec, dtype, config, fuses_gradients=False, options=None):
    train = functools.partial(
        _train, device, spec, dtype, config, fuses_gradients=fuses_gradients, options=options or {}
    )
    eager, captured = train(), train(graphs="local")
    if config.linear.fprop.path != "auto":  # two trials may choose two plans
        _assert_near("ours in graphs, and ours", eager, captured, LIMITS[dtype])
    if dtype == torch.float32:
        limit = TF32 if spec == "te" else LIMITS[dtype]
        _assert_near("ours in graphs, and stock", _stock(device, spec, dtype), captured, limit)
    elif config.linear.fprop.path == "auto":
        _assert_near("ours in graphs, and ours", eager, captured, 2 * LIMITS[dtype])
    splits_queries = config.attention.path == "query_split"
    is_forced = config.linear.fprop.path != "auto"
    is_over_nccl = config.transport.backend == "nccl"
    for steps, graphs in ((eager, "none"), (captured, "local")):
        _assert_overlapped(
            steps.report, graphs, is_forced=is_forced, splits_queries=splits_queries, is_over_nccl=is_over_nccl
        )


def _full_iteration(device, config):
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, get_shared_capture_stream

    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.testing.gpt import loss_of
    from commfuse_megatron.testing.training import Training

    def forward_backward(*, data_iterator, model, **_):
        loss = loss_of(model, next(data_iterator[0])["tokens"], with_mask=False)
        loss.backward()
        return loss.detach()

    steps = Steps([], [], None)
    # Gradients are added up on the stream on which the wrapper was made; Megatron makes it on this one too.
    stream = get_shared_capture_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = _build(device, "local", torch.float32, config, "full_iteration")
        _set_weights(model)
        run = Training(model, with_mask=False)
        step_graph = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=WARM_UP)
        for step in range(NUM_STEPS):
            _move_weights(model, step)
            run.wrapped.zero_grad_buffer()
            data = iter([{"tokens": tokens_of(device, step)}])
            loss = step_graph(
                model=run.wrapped, data_iterator=data, num_microbatches=1, seq_length=LENGTH, forward_only=False
            )
            finalize_model_grads([run.wrapped])
            steps.losses.append(loss.item())
            steps.gradients.append({name: g.cpu() for name, g in gradients_of(model).items()})
        report = model_report(model)
        step_graph.reset_cuda_graph()
    del run, model, step_graph, loss
    _clean_up()
    eager = _train(device, "local", torch.float32, config)
    _assert_near("ours in one graph, and ours", eager, steps, LIMITS[torch.float32])
    _assert_near("ours in one graph, and stock", _stock(device, "local", torch.float32), steps, LIMITS[torch.float32])
    is_over_nccl = config.transport.backend == "nccl"
    _assert_overlapped(report, "full_iteration", is_forced=True, splits_queries=False, is_over_nccl=is_over_nccl)


FP32, BF16 = torch.float32, torch.bfloat16
CHECKS = {
    "stock, local layers, fp32": (_stock_graphs, "local", FP32),
    "copy engine, local layers, fp32, sliced": (_compare, "local", FP32, _config("copy_engine")),
    "copy engine, local layers, fp32, two chunks": (_compare, "local", FP32, _config("copy_engine", m=2)),
    "copy engine, local layers, fp32, bulk": (_compare, "local", FP32, _config("copy_engine", "bulk")),
    "copy engine, local layers, fp32, fused gradients": (_compare, "local", FP32, _config("copy_engine"), True),
    "copy engine, local layers, fp32, planned": (_compare, "local", FP32, _config("copy_engine", "auto")),
    "copy engine, local layers, fp32, query-split": (_compare, "local", FP32, _config("copy_engine",
     attention="query_split")),
    "copy engine, local layers, bf16, query-split": (_compare, "local", BF16, _config("copy_engine",
     attention="query_split")),
    "nccl, local layers, fp32, sliced": (_compare, "local", FP32, _config("nccl")),
    "nccl, local layers, fp32, query-split": (_compare, "local", FP32, _config("nccl", attention="query_split")),
    "copy engine, whole iteration": (_full_iteration, _config("copy_engine")),
    "nccl, whole iteration": (_full_iteration, _config("nccl")),
    "stock, Transformer Engine, fp32": (_stock_graphs, "te", FP32),
    "copy engine, Transformer Engine, fp32": (_compare, "te", FP32, _config("copy_engine")),
    "copy engine, Transformer Engine, bf16": (_compare, "te", BF16, _config("copy_engine")),
    "copy engine, Transformer Engine, bf16, query-split": (_compare, "te", BF16, _config("copy_engine",
     attention="query_split")),
}  # fmt: skip


@contextmanager
def _enter(group, device):
    from commfuse_megatron.testing.gpt import tensor_parallel

    def run(name):
        if "Transformer" in name and not models.HAS_TRANSFORMER_ENGINE:
            pytest.skip("Transformer Engine is not installed")
        body, *arguments = CHECKS[name]
        body(device, *arguments)

    with tensor_parallel(group.size()):
        yield run


test_graphs = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")(
    make_test(2, _enter, CHECKS, backend="nccl")
)
