"""Query-split attention on GPUs: kernels one by one against the plain one, and the operation on two ranks."""

import dataclasses
import gc

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import AttentionConfig, TransportConfig
from commfuse_megatron.kernels import attention_pieces
from commfuse_megatron.kernels.attention import Dropout, MathAttention, SplitMask
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from commfuse_megatron.transport.mapped_window import MappedWindow
from tests.harness import on_processes, run_spawned
from tests.harness.captures import CapturedStep
from tests.threaded.test_query_split_attention import Case, draw, run

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(240)]
two_gpus = pytest.mark.multi_gpu(2)
BACKENDS = pytest.mark.parametrize("backend", ["nccl", "copy_engine"])

NAMES = ("cudnn", "flash")
BASE = AttentionProblem(
    pass_name="fprop", rows=512, batch=2, heads=4, kv_heads=4, head_dim=64, value_dim=64, N=64, dtype="bfloat16",
    group_size=4, right=0,
)  # fmt: skip
PROBLEMS = {
    "causal": BASE, "full": dataclasses.replace(BASE, right=None), "grouped": dataclasses.replace(BASE, kv_heads=2),
    "one group": dataclasses.replace(BASE, kv_heads=1, batch=1),
    "128 features": dataclasses.replace(BASE, head_dim=128, value_dim=128),
    "latent": dataclasses.replace(BASE, head_dim=192, value_dim=128),
    "latent, odd rows": dataclasses.replace(BASE, head_dim=192, value_dim=128, rows=509, batch=1),
    "latent, full": dataclasses.replace(BASE, head_dim=192, value_dim=128, right=None, dtype="float16"),
    "values of half the features": dataclasses.replace(BASE, head_dim=128, value_dim=64),
    "float16": dataclasses.replace(BASE, dtype="float16"), "odd rows": dataclasses.replace(BASE, rows=509),
    "window before": dataclasses.replace(BASE, left=70), "window": dataclasses.replace(BASE, left=70, right=33),
}  # fmt: skip


def kernel_or_skip(name, problem):
    kernels = AttentionKernels(torch.device("cuda", 0))
    reason = kernels.unavailable_reason(name, problem)
    if reason is not None:
        pytest.skip(reason)
    return kernels.choose(problem, name)


def heads_of(problem, device):
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, problem.dtype)
    lead = (problem.rows, problem.batch)
    shapes = (
        (*lead, problem.heads, problem.head_dim),
        (*lead, problem.kv_heads, problem.head_dim),
        (*lead, problem.kv_heads, problem.value_dim),
        (*lead, problem.heads, problem.value_dim),
    )
    return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]


def assert_near(found, exact, dtype, what):
    # Inputs, probabilities and results are rounded to the dtype; a key too many or too few errs by order 0.1.
    error = (found.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-3)
    assert error.item() <= 4 * torch.finfo(dtype).eps + 1e-3, (what, error.item())


def splits_of(problem, whole):
    """(mask, (q, k, v, gradient of the output)) of every split."""
    for (queries,) in chunk_ranges(problem.rows, problem.group_size, 1):
        band = problem.visible_keys(queries)
        rows, keys = slice(queries.start, queries.stop), slice(band.keys.start, band.keys.stop)
        yield SplitMask(band), [tensor[part] for tensor, part in zip(whole, (rows, keys, keys, rows), strict=True)]


def both_passes(kernel, mask, operands, scale=0.11):
    """The output, and the gradients of q, k and v."""
    *inputs, grad = operands
    out = torch.empty_like(grad)
    state = kernel.forward((*inputs, out), mask, scale, None)
    return out, *kernel.backward(grad, (*inputs, out), state, mask, scale, None)


def assert_near_the_plain_one(found, mask, operands):
    exact = both_passes(MathAttention(), mask, [tensor.double() for tensor in operands])
    for what, value, right in zip(("out", "dq", "dk", "dv"), found, exact, strict=True):
        assert value.shape == right.shape
        assert_near(value, right, value.dtype, (what, mask))


# A kernel's name, and what it takes for cuDNN to compute a split's backward pass in two pieces: nothing, or too much.
WAYS = {"cudnn in pieces": ("cudnn", 0), "cudnn whole": ("cudnn", 1e30), "flash": ("flash", 0)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_splits_of_a_kernel_equal_the_plain_one(way, kind, monkeypatch):
    name, worth = WAYS[way]
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", worth)
    problem = PROBLEMS[kind]
    kernel, device = kernel_or_skip(name, problem), torch.device("cuda", 0)
    for mask, operands in splits_of(problem, heads_of(problem, device)):
        assert_near_the_plain_one(both_passes(kernel, mask, operands), mask, operands)


@pytest.mark.parametrize("worth", [0, 1e30], ids=["in pieces", "whole"])
@pytest.mark.parametrize("kind", ["causal", "grouped", "latent", "odd rows"])
def test_cudnn_bound_to_addresses_equals_the_plain_one(kind, worth, monkeypatch):
    """Two streams at a time, launched again from CUDA graphs."""
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", worth)
    problem, device = PROBLEMS[kind], torch.device("cuda", 0)
    kernel = kernel_or_skip("cudnn", problem)
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    calls = []
    for number, (mask, operands) in enumerate(splits_of(problem, heads_of(problem, device))):
        q, k, v, grad = operands
        out, gradients = torch.empty_like(grad), [torch.empty_like(tensor) for tensor in (q, k, v)]
        stats = torch.empty(problem.batch, problem.heads, grad.size(0), 1, device=device)
        bound = (
            kernel.bind_forward((q, k, v, out), mask, 0.11),
            kernel.bind_backward(grad, (q, k, v, out), mask, 0.11),
        )
        loaded = [tensor.data_ptr() for tensor in (q, k, v, out, stats)]
        more = [tensor.data_ptr() for tensor in (grad, *gradients)]
        calls.append((streams[number % 2], bound, loaded, more, operands, mask, (out, *gradients), stats))

    scratch_bytes = max(each.scratch_bytes for _, bound, *_ in calls for each in bound)
    scratch = {stream: torch.empty(scratch_bytes, dtype=torch.uint8, device=device) for stream in streams}

    def launch(side):
        for stream, (forward, backward), loaded, more, *_ in calls:
            if stream is side:
                handle, scratch_at = stream.cuda_stream, scratch[stream].data_ptr()
                forward.run(handle, scratch_at, *loaded)
                backward.run(handle, scratch_at, *loaded, *more)

    graphs = []
    torch.cuda.synchronize()
    for stream in streams:  # what is kept for a stream is made before it is captured
        with torch.cuda.stream(stream):
            launch(stream)
    torch.cuda.synchronize()
    for stream in streams:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], stream=stream):
            launch(stream)
    for *_, found, _ in calls:
        for tensor in found:
            tensor.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(3):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for *_, operands, mask, found, _ in calls:
        assert_near_the_plain_one(found, mask, operands)


@pytest.mark.parametrize("name", NAMES)
def test_strided_operands(name):
    problem = BASE
    kernel, device = kernel_or_skip(name, problem), torch.device("cuda", 0)
    q, k, v, grad = heads_of(problem, device)
    mask = SplitMask(problem.visible_keys(RowRange(128, 256)))
    results = []
    for is_strided in (False, True):
        operands = [q[128:256], k[:256], v[:256]]
        if is_strided:  # as views into a fused projection
            operands = [torch.cat([t, t], dim=-1)[..., : t.size(-1)] for t in operands]
            assert not operands[0].is_contiguous()
        results.append(both_passes(kernel, mask, (*operands, grad[128:256]), 0.125))
    for plain, strided in zip(*results, strict=True):
        torch.testing.assert_close(plain, strided, atol=2e-2, rtol=2e-2)


def test_flash_drops_by_the_seed_and_leaves_the_programs_state():
    problem = dataclasses.replace(BASE, has_dropout=True)
    kernel, device = kernel_or_skip("flash", problem), torch.device("cuda", 0)
    q, k, v, grad = heads_of(problem, device)
    band = problem.visible_keys(RowRange(0, problem.rows))
    results = []
    for seed in (1, 1, 2):
        torch.cuda.manual_seed(len(results))
        before = torch.cuda.get_rng_state(device)
        out = torch.empty_like(grad)
        kernel.forward((q, k, v, out), SplitMask(band), 0.125, Dropout(0.3, seed))
        results.append(out)
        assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_reasons_name_what_a_kernel_cannot_do():
    kernels = AttentionKernels(torch.device("cuda", 0))
    for name in NAMES:
        assert "bfloat16 and float16" in kernels.unavailable_reason(name, dataclasses.replace(BASE, dtype="float32"))
        assert "mask" in kernels.unavailable_reason(name, dataclasses.replace(BASE, has_mask=True))
        odd = dataclasses.replace(BASE, head_dim=20, value_dim=20)
        assert "multiple of 8" in kernels.unavailable_reason(name, odd)
        too_wide = dataclasses.replace(BASE, head_dim=576, value_dim=512)
        assert "576" in kernels.unavailable_reason(name, too_wide)
    latent = dataclasses.replace(BASE, head_dim=192, value_dim=128)
    assert "heads of one size" in kernels.unavailable_reason("flash", latent)
    assert kernels.choose(latent, "auto").name in ("cudnn", "math")
    assert "dropout" in kernels.unavailable_reason("cudnn", dataclasses.replace(BASE, has_dropout=True))
    assert kernels.choose(dataclasses.replace(BASE, dtype="float32"), "auto").name == "math"
    assert kernels.choose(BASE, "auto").name in NAMES


# -- the operation ----------------------------------------------------------------------------------------------------


def config(backend, path="query_split", m=1, kernel="auto", backward="query_split") -> OverlapConfig:
    splits = {"splits_per_shard": m, "backward": backward} if path == "query_split" else {}
    attention = AttentionConfig(path=path, kernel=kernel, **splits)
    return OverlapConfig(attention=attention, transport=TransportConfig(backend=backend))


CASES = (
    Case(rows=256, heads=4, kv_heads=2, head_dim=64, value_dim=64, N=128),
    Case(rows=250, heads=4, kv_heads=4, head_dim=128, value_dim=128, N=96, batch=1, has_bias=False),
    Case(rows=64, heads=2, kv_heads=1, head_dim=64, value_dim=64, N=64, keywords={"causal": False}),
    Case(rows=96, heads=2, kv_heads=2, head_dim=64, value_dim=64, N=64, keywords={"window": (20, 0)}),
    Case(rows=3, heads=2, kv_heads=2, head_dim=64, value_dim=64, N=64),
)
LONG = Case(rows=4096, batch=1, heads=8, kv_heads=2, head_dim=128, value_dim=128, N=1024)
SMALL = Case(rows=256, batch=1, heads=4, kv_heads=2, head_dim=64, value_dim=64, N=128, dtype=torch.bfloat16)
LATENT = Case(rows=250, heads=2, kv_heads=2, head_dim=192, value_dim=128, N=64)


def _compare(case, group, device, context, limit):
    """Against the reference in fp64 on the GPU; the same operands, rounded to the dtype."""
    operands, grad_y = draw(dataclasses.replace(case, dtype=torch.bfloat16), group.rank(), group.size())
    operands = {name: None if t is None else t.to(device) for name, t in operands.items()}
    grad_y = grad_y.to(device)
    wide = {name: None if t is None else t.double() for name, t in operands.items()}
    found = run(operands, grad_y, ops.query_split_attention, context=context, **case.keywords)
    exact = run(wide, grad_y.double(), ops.reference.query_split_attention, group=group, **case.keywords)
    for name, value in exact.items():
        if value is None:
            assert found[name] is None
            continue
        scale = value.abs().max().clamp(min=1e-3)
        error = ((found[name].double() - value).abs().max() / scale).item()
        assert error <= limit, (case, name, error)


def _operation(group, device, backend, kernel):
    kernels = set()
    cases = CASES if kernel == "flash" else (*CASES, LATENT)  # flash attention takes heads of one size
    split, at_once, plain = "query_split", "row_parallel", "sequential"
    ways = ((split, 1, split), (split, 2, split), (split, 2, at_once), (at_once, 1, at_once), (plain, 1, plain))
    for path, m, after in ways:
        with OverlapContext(group, config(backend, path, m, kernel, after)) as context:
            for _ in range(3):
                for case in cases:
                    # Four roundings to 8 bits in a row; a split that is lost, crossed or added twice errs by order 1.
                    _compare(case, group, device, context, 0.03)
            records = [record for record in context.report() if record.op == "query_split_attention"]
            assert {(record.pass_name, record.path) for record in records} == {("fprop", path), ("backward", after)}
            assert all(record.calls == 3 for record in records)
            kernels |= {record.attention for record in records}
    return kernels


@two_gpus
@BACKENDS
@pytest.mark.parametrize("kernel", ["auto", "flash", "math"])
def test_every_path_equals_the_reference(backend, kernel):
    kernels = run_spawned(2, _operation, backend, kernel, backend="nccl")
    assert kernels[0] == kernels[1]
    if kernel != "auto":
        assert kernels[0] == {kernel}


def _long_rows(group, device, backend):
    """Splits that run side by side on the lanes for long enough to be caught out of order."""
    results = []
    for m, backward in ((1, "query_split"), (2, "query_split"), (4, "row_parallel")):
        with OverlapContext(group, config(backend, m=m, backward=backward)) as context:
            for seed in range(6):
                _compare(dataclasses.replace(LONG, seed=seed), group, device, context, 0.05)
            operands, grad_y = draw(dataclasses.replace(LONG, dtype=torch.bfloat16), group.rank(), group.size())
            operands = {name: t.to(device) for name, t in operands.items()}
            again = [run(operands, grad_y.to(device), ops.query_split_attention, context=context) for _ in range(5)]
            results.append(all(torch.equal(each["y"], again[0]["y"]) for each in again))
    return results


@two_gpus
@BACKENDS
def test_long_sequences_on_two_lanes(backend):
    assert run_spawned(2, _long_rows, backend, backend="nccl") == [[True] * 3] * 2


def _memory_kept(group, device, backward):
    """In bytes: what calls leave allocated beside their context's buffers, and the scratch memory that one needs."""
    operands, grad_y = draw(dataclasses.replace(LONG, dtype=torch.bfloat16), group.rank(), group.size())
    leaves = [tensor.to(device).requires_grad_() for tensor in operands.values()]
    grad_y = grad_y.to(device)
    before = torch.cuda.memory_allocated()
    with OverlapContext(group, config("copy_engine", m=2, kernel="cudnn", backward=backward)) as context:
        for _ in range(10):
            y = ops.query_split_attention(*leaves, context=context)
            torch.autograd.grad(y, leaves, grad_y)
            del y
        torch.cuda.synchronize()
        own = [buffer for buffer in context.slots._buffers.values() if not isinstance(buffer, MappedWindow)]
        kept_bytes = torch.cuda.memory_allocated() - before - sum(buffer.tensor.nbytes for buffer in own)
        replayed = [p for p in context._prepared.values() if any(p.tapes)]
        assert all(p.modes["graph"] for p in replayed), context.report()
        bound = [each for p in replayed for each in p._tapes._known.values() if each.scratch]
        return kept_bytes, max(each.scratch[-1] for each in bound)


def _memory_kept_once_libraries_have_theirs(group, device, backward):
    _memory_kept(group, device, backward)
    gc.collect()
    return _memory_kept(group, device, backward)


@two_gpus
@pytest.mark.parametrize("backward", ["query_split", "row_parallel"])
def test_scratch_memory_is_free_after_a_call(backward):
    kernel_or_skip("cudnn", BASE)
    for kept_bytes, scratch_bytes in run_spawned(2, _memory_kept_once_libraries_have_theirs, backward, backend="nccl"):
        assert scratch_bytes > 4 << 20
        assert abs(kept_bytes) < 1 << 20


def _planned(group, device, backend):
    settings = config(backend, "auto")
    case = dataclasses.replace(LONG, rows=2048)
    before = torch.cuda.get_rng_state()
    with OverlapContext(group, settings) as context:
        for _ in range(2):
            _compare(case, group, device, context, 0.05)
        assert torch.equal(torch.cuda.get_rng_state(), before)
        records = [record for record in context.report() if record.op == "query_split_attention"]
        return [(r.path, r.chunks_per_shard, r.reason, r.measured_us, r.calls) for r in records]


@two_gpus
@BACKENDS
def test_all_ranks_measure_and_choose_alike(backend):
    first, second = run_spawned(2, _planned, backend, backend="nccl")
    assert first == second
    forward, backward = first
    assert forward[2].startswith("measured: ")
    if backward[2] == "as the forward pass":
        assert forward[:2] == backward[:2]
    else:
        assert forward[0] == "query_split"
        assert backward[::2] == ("row_parallel", f"after query_split m={forward[1]}", 2)
    assert forward[4] == backward[4] == 2


@two_gpus
@BACKENDS
@on_processes(2)
def test_a_forward_pass_can_be_captured(group, device, backend):
    operands = {name: None if t is None else t.to(device) for name, t in draw(SMALL, group.rank(), 2)[0].items()}
    with OverlapContext(group, config(backend, m=2)) as context, torch.no_grad():
        captured = CapturedStep(lambda: [ops.query_split_attention(*operands.values(), context=context)])
        (expected,) = captured.run()
        torch.cuda.synchronize()
        for _ in range(3):
            (y,) = captured.results
            y.zero_()
            captured.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, expected)
        del captured


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@two_gpus
@pytest.mark.parametrize("backward", ["query_split", "row_parallel"])
@BACKENDS
@on_processes(2)
def test_both_passes_can_be_captured(group, device, backend, backward):
    operands, grad_y = draw(SMALL, group.rank(), 2)
    leaves = [tensor.to(device).requires_grad_() for tensor in operands.values()]
    grad_y = grad_y.to(device)
    with OverlapContext(group, config(backend, m=2, backward=backward)) as context:

        def step():
            y = ops.query_split_attention(*leaves, context=context)
            return y, *torch.autograd.grad(y, leaves, grad_y)

        captured = CapturedStep(step, capture_error_mode="thread_local")
        for _ in range(3):
            with torch.no_grad():
                for leaf in leaves:
                    leaf.copy_(torch.randn_like(leaf))
            for found in captured.results:
                found.zero_()
            captured.replay()
            eager = captured.run()
            torch.cuda.synchronize()
            names = ("y", "q", "k", "v", "weight", "bias")
            for what, found, expected in zip(names, captured.results, eager, strict=True):
                torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2, msg=what)
            assert torch.equal(captured.results[0], eager[0])
        del captured
