"""Attention over a split sequence on GPUs: copies and kernels on addresses, and the operation on two ranks."""

import dataclasses

import pytest
import torch

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.kernels.attention import MathAttention, SplitMask
from commfuse_megatron.kernels.strided_copy import bind_copy
from commfuse_megatron.problem import RowRange, VisibleKeys
from tests.gpu.test_query_split import BASE, assert_near, heads_of, kernel_or_skip
from tests.harness import run_spawned
from tests.threaded import test_ulysses_block as block
from tests.threaded.test_ulysses import Case, draw, run, ulysses_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]
two_gpus = pytest.mark.multi_gpu(2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("shape", "of"), [
    ((2, 300, 2, 4, 128), lambda tensor: tensor[..., 1:3, :].transpose(0, 3)),
    ((513, 3, 8, 64), lambda tensor: tensor.unflatten(2, (2, 4))[:, :, :, :3].permute(2, 0, 1, 3, 4)),
    ((7, 1, 2, 24), lambda tensor: tensor.permute(2, 0, 1, 3)[:, None].expand(2, 3, 7, 1, 24)),
    ((5, 33), lambda tensor: tensor[:, 1:]),
])  # fmt: skip
def test_copies_between_views_are_exact(shape, of, dtype):
    device = torch.device("cuda", 0)
    source = of(torch.randn(shape, device=device, dtype=torch.float64).to(dtype))
    whole = torch.full((*source.shape[:-1], source.size(-1) + 8), torch.nan, device=device, dtype=dtype)
    target = whole[..., : source.size(-1)]
    is_aligned = source.data_ptr() % 16 == 0
    copy = bind_copy(target, source, device=device, is_aligned=is_aligned)
    copy(torch.cuda.current_stream().cuda_stream, target.data_ptr(), source.data_ptr())
    assert torch.equal(target, source)
    assert whole[..., source.size(-1) :].isnan().all()


@pytest.mark.parametrize("kind", [
    BASE, dataclasses.replace(BASE, kv_heads=1), dataclasses.replace(BASE, right=None),
    dataclasses.replace(BASE, head_dim=192, value_dim=128),
])  # fmt: skip
def test_cudnn_reads_and_writes_heads_side_by_side(kind):
    """What travels of a group: for each token its queries, keys and values; the gradients likewise."""
    kernel, device = kernel_or_skip("cudnn", kind), torch.device("cuda", 0)
    *heads, grad = heads_of(kind, device)
    sizes = [each.size(2) * each.size(3) for each in heads]
    tokens = torch.cat([each.flatten(2) for each in heads], dim=-1)
    views, gradients = (
        [part.unflatten(-1, each.shape[2:]) for part, each in zip(whole.split(sizes, dim=-1), heads, strict=True)]
        for whole in (tokens, torch.full_like(tokens, torch.nan))
    )
    mask = SplitMask(VisibleKeys(RowRange(0, kind.rows), None, kind.right))
    out = torch.empty_like(grad)
    stats = torch.empty(kind.batch, kind.heads, kind.rows, 1, device=device)
    forward = kernel.bind_forward((*views, out), mask, 0.11)
    backward = kernel.bind_backward(grad, (*views, out), mask, 0.11, gradients)
    assert backward is not None, "cuDNN refuses strided gradients: backward passes will run step by step"
    scratch = torch.empty(max(forward.scratch_bytes, backward.scratch_bytes), dtype=torch.uint8, device=device)
    loaded = [tensor.data_ptr() for tensor in (*views, out, stats)]
    stream = torch.cuda.current_stream().cuda_stream
    forward.run(stream, scratch.data_ptr(), *loaded)
    backward.run(stream, scratch.data_ptr(), *loaded, *(tensor.data_ptr() for tensor in (grad, *gradients)))
    exact = torch.empty_like(grad, dtype=torch.float64)
    wide = (*(each.double() for each in heads), exact)
    MathAttention().forward(wide, mask, 0.11, None)
    wanted = (exact, *MathAttention().backward(grad.double(), wide, (), mask, 0.11, None))
    for what, found, right in zip(("out", "dq", "dk", "dv"), (out, *gradients), wanted, strict=True):
        assert_near(found, right, out.dtype, what)


CASES = (
    Case(rows=256, heads=8, kv_heads=4, head_dim=64, value_dim=64),
    Case(rows=250, heads=4, kv_heads=4, head_dim=128, value_dim=128, batch=1),
    Case(rows=64, heads=8, kv_heads=1, head_dim=64, value_dim=64, keywords={"causal": False}),
    Case(rows=96, heads=8, kv_heads=2, head_dim=64, value_dim=64, keywords={"window": (20, 0)}),
    Case(rows=512, heads=8, kv_heads=4, head_dim=128, value_dim=128, keywords={"order": "zigzag"}),
    Case(rows=256, heads=8, kv_heads=8, head_dim=192, value_dim=128, keywords={"order": "zigzag"}),
    Case(rows=3, heads=2, kv_heads=2, head_dim=64, value_dim=64),
)


def settings(backend, path="overlapped", head_groups=None, kernel="auto"):
    others = {"attention": AttentionConfig(kernel=kernel), "transport": TransportConfig(backend=backend)}
    return ulysses_config(path, head_groups, **others)


def _on_device(case, group, device):
    operands, grad_y = draw(dataclasses.replace(case, dtype=torch.bfloat16), group.rank(), group.size())
    return [each.to(device) for each in operands], grad_y.to(device)


def _compare(case, group, device, context, limit=0.03):
    """Against the reference in fp64 on the GPU; the same operands, rounded to the dtype."""
    operands, grad_y = _on_device(case, group, device)
    keywords = {"total_rows": case.rows, **case.keywords}
    found = run(operands, grad_y, ops.ulysses_attention, context=context, **keywords)
    wide = [each.double() for each in operands]
    exact = run(wide, grad_y.double(), ops.reference.ulysses_attention, group=group, **keywords)
    for name, value in exact.items():
        scale = value.abs().max().clamp(min=1e-3)
        error = ((found[name].double() - value).abs().max() / scale).item()
        assert error <= limit, (case, name, error)


def _operation(group, device, backend, kernel):
    for path, head_groups in (("overlapped", 1), ("overlapped", 2), ("overlapped", 4), ("sequential", None)):
        with OverlapContext(group, settings(backend, path, head_groups, kernel)) as context:
            for _ in range(4):
                for case in CASES:
                    if kernel != "flash" or case.head_dim == case.value_dim:  # flash takes heads of one size
                        _compare(case, group, device, context)
            assert {record.path for record in context.report()} == {path}


@two_gpus
@pytest.mark.parametrize("backend", ["nccl", "copy_engine"])
@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
def test_every_path_equals_the_reference(backend, kernel):
    run_spawned(2, _operation, backend, kernel, backend="nccl")


def _long_rows(group, device, backend, order):
    """Transfers and kernels that last long enough to be caught out of order; and the same bits each time."""
    case = Case(rows=8192, batch=1, heads=16, kv_heads=4, head_dim=128, value_dim=128, keywords={"order": order})
    modes = []
    for head_groups in (1, 2):
        with OverlapContext(group, settings(backend, head_groups=head_groups)) as context:
            small = dataclasses.replace(case, rows=2048)
            for seed in range(6):
                _compare(dataclasses.replace(small, seed=seed), group, device, context, 0.05)
            operands, grad_y = _on_device(case, group, device)
            leaves = [each.requires_grad_() for each in operands]
            again = []
            for _ in range(8):  # nothing of a call stays on the GPU, so that the next one finds the same addresses
                y = ops.ulysses_attention(*leaves, context=context, **case.keywords)
                found = torch.autograd.grad(y, leaves, grad_y)
                again.append([each.detach().cpu() for each in (y, *found)])
                del y, found
            # Gradients of queries are sums in an order that cuDNN leaves open.
            for each in again:
                assert torch.equal(each[0], again[0][0])
                for found, first in zip(each[1:], again[0][1:], strict=True):
                    torch.testing.assert_close(found, first, atol=2e-2, rtol=2e-2)
            modes.append([record.modes for record in context.report() if case.rows == record.M])
    return modes


@two_gpus
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("backend", ["nccl", "copy_engine"])
def test_long_sequences(backend, order):
    kernel_or_skip("cudnn", BASE)
    for of_rank in run_spawned(2, _long_rows, backend, order, backend="nccl"):
        for passes in of_rank:
            assert all(("graph" in modes) == (backend == "copy_engine") for modes in passes), passes


def _planned(group, device, backend):
    case = Case(rows=4096, batch=1, heads=16, kv_heads=4, head_dim=128, value_dim=128)
    with OverlapContext(group, settings(backend, "auto")) as context:
        for _ in range(2):
            _compare(case, group, device, context, 0.05)
        return [(record.path, record.chunks_per_shard, record.reason, record.calls) for record in context.report()]


@two_gpus
@pytest.mark.parametrize("backend", ["nccl", "copy_engine"])
def test_all_ranks_measure_and_choose_alike(backend):
    first, second = run_spawned(2, _planned, backend, backend="nccl")
    assert first == second
    forward, backward = first
    assert forward[2].startswith("measured: ")
    assert backward == (*forward[:2], "as the forward pass", 2)


BLOCKS = (
    block.Case(rows=256, heads=8, kv_heads=4, head_dim=64, value_dim=64, features=128),
    block.Case(rows=250, heads=4, kv_heads=4, head_dim=128, value_dim=128, features=128, batch=1, has_bias=False),
    block.Case(rows=64, heads=8, kv_heads=1, head_dim=64, value_dim=64, features=128, keywords={"causal": False}),
    block.Case(rows=512, heads=8, kv_heads=8, head_dim=128, value_dim=128, features=256, keywords={"order": "zigzag"}),
    block.Case(rows=3, heads=2, kv_heads=2, head_dim=64, value_dim=64, features=64),
)


def _block_on_device(case, group, device):
    """Weights as large as a model's: large scores would make much of what rounding does to queries and keys."""
    (x, *weights), grad_y = block.draw(dataclasses.replace(case, dtype=torch.bfloat16), group.rank(), group.size())
    weights[:2] = [each * (3 * each.size(1) ** -0.5) for each in weights[:2]]
    return [each.to(device) for each in (x, *weights)], grad_y.to(device)


def _blocks(group, device, backend):
    """Against the reference in fp64; errors are those of some more roundings than the attention's."""
    for path, head_groups in (("overlapped", 1), ("overlapped", 2), ("overlapped", 4), ("sequential", None)):
        with OverlapContext(group, settings(backend, path, head_groups)) as context:
            for _ in range(3):
                for case in BLOCKS:
                    operands, grad_y = _block_on_device(case, group, device)
                    found = block.run(operands, grad_y, ops.ulysses_block, is_fused=True, context=context, **case.sizes)
                    wide = [each.double() for each in operands]
                    where = {"group": group, "head_dim": case.head_dim, **case.sizes}
                    exact = block.run(wide, grad_y.double(), ops.reference.ulysses_block, is_fused=False, **where)
                    del exact["angle.grad"]  # one sum of everything, small beside what is added and subtracted
                    for name, value in exact.items():
                        error = (found[name].double() - value).norm() / value.norm().clamp(min=1e-3)
                        assert error <= 0.03, (case, name, error.item())
            assert {record.path for record in context.report()} == {path}
            assert all("graph" not in record.modes for record in context.report() if path == "overlapped")


@two_gpus
@pytest.mark.parametrize("backend", ["nccl", "copy_engine"])
def test_blocks_equal_the_reference(backend):
    run_spawned(2, _blocks, backend, backend="nccl")


def _long_blocks(group, device, backend):
    """Transfers that last long enough to be caught out of order: the same bits in every call, whatever is beside."""
    sizes = {"heads": 16, "kv_heads": 8, "head_dim": 128, "value_dim": 128, "features": 2048, "has_bias": False}
    case = block.Case(rows=8192, batch=1, keywords={"order": "zigzag"}, **sizes)
    with OverlapContext(group, settings(backend, head_groups=4)) as context:
        operands, grad_y = _block_on_device(case, group, device)
        leaves, again = [each.requires_grad_() for each in operands], []
        for _ in range(8):
            y = ops.ulysses_block(*leaves, context=context, **case.sizes)
            found = torch.autograd.grad(y, leaves, grad_y)
            again.append([each.detach().cpu() for each in (y, *found)])
            del y, found
        by_parts = ops.ulysses_block(*operands, context=context, **case.sizes).detach()
        mode = "tape" if backend == "copy_engine" else "stepped"
        assert all(set(record.modes) == {mode} for record in context.report())
    with OverlapContext(group, settings(backend, "sequential")) as context:
        whole = ops.ulysses_block(*operands, context=context, **case.sizes).detach()
    assert (by_parts - whole).norm() / whole.norm() < 0.02
    for each in again:
        assert torch.equal(each[0], again[0][0])
        for found, first in zip(each[1:], again[0][1:], strict=True):
            assert (found - first).norm() / first.norm() < 0.01  # cuDNN leaves the order of some sums open


@two_gpus
@pytest.mark.parametrize("backend", ["nccl", "copy_engine"])
def test_long_blocks_are_the_same_in_every_call(backend, monkeypatch):
    kernel_or_skip("cudnn", BASE)
    run_spawned(2, _long_blocks, backend, backend="nccl")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as Megatron sets it under context parallelism
    run_spawned(2, _long_blocks, backend, backend="nccl")
