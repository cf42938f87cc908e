"""cuDNN's attention against the formula, on an emulation of its front end: masks, layouts, pieces, addresses.

Everything runs on raw addresses, as on a GPU. Operands are bf16 or fp16, sums are in fp32.
"""

import dataclasses

import pytest
import torch

from commfuse_megatron.kernels import attention_cudnn_backward, attention_pieces
from commfuse_megatron.kernels.attention import MathAttention, SplitMask
from commfuse_megatron.kernels.attention_cudnn import CudnnAttention
from commfuse_megatron.problem import AttentionProblem, RowRange, chunk_ranges
from tests.harness import emulated_gpu
from tests.harness.emulated_cudnn import EmulatedCudnn, Launch, emulate_cudnn

CPU = torch.device("cpu")
SCALE = 0.3
ALWAYS, NEVER = 0, 1e30

BASE = AttentionProblem(
    pass_name="fprop", rows=24, batch=2, heads=4, kv_heads=4, head_dim=16, value_dim=16, N=8, dtype="bfloat16",
    group_size=2, right=0,
)  # fmt: skip
PROBLEMS = {
    "causal": BASE,
    "full": dataclasses.replace(BASE, right=None),
    "grouped": dataclasses.replace(BASE, kv_heads=2),
    "one group": dataclasses.replace(BASE, kv_heads=1, batch=1),
    "wider values": dataclasses.replace(BASE, head_dim=8, value_dim=24),
    "latent": dataclasses.replace(BASE, head_dim=24, value_dim=16, dtype="float16"),
    "odd rows": dataclasses.replace(BASE, rows=23, heads=3, kv_heads=3, batch=3),
    "fewer rows than splits": dataclasses.replace(BASE, rows=5),
}
WAYS = ("eager", "bound")
LAYOUTS = ("contiguous", "fused")


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> EmulatedCudnn:
    return emulate_cudnn(monkeypatch)


@pytest.fixture
def kernel(cudnn: EmulatedCudnn) -> CudnnAttention:
    return CudnnAttention(CPU)


def set_worth(monkeypatch: pytest.MonkeyPatch, worth: float) -> None:
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", worth)


@pytest.fixture(autouse=True)
def _pieces_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    set_worth(monkeypatch, ALWAYS)


def operands_of(problem: AttentionProblem, layout: str = "contiguous", seed: int = 0) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, all rows of them; "fused": q, k, v are views with strides of their own."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)
    found = []
    for number, (heads, features) in enumerate(
        (
            (problem.heads, problem.head_dim),
            (problem.kv_heads, problem.head_dim),
            (problem.kv_heads, problem.value_dim),
            (problem.heads, problem.value_dim),
        )
    ):
        pad = 8 * (number + 1) if layout == "fused" and number < 3 else 0
        whole = torch.randn(problem.rows, problem.batch, heads, pad + features + pad, generator=generator).to(dtype)
        found.append(whole[..., pad : pad + features])
    return found


class Split:
    """The operands of one split, and what its kernel leaves, between rows that it must not touch."""

    def __init__(self, problem: AttentionProblem, queries: RowRange, whole: list[torch.Tensor]) -> None:
        band = problem.visible_keys(queries)
        self.mask = SplitMask(band)
        rows, keys = slice(queries.start, queries.stop), slice(band.keys.start, band.keys.stop)
        q, k, v, grad_out = whole
        self.q, self.k, self.v, self.grad_out = q[rows], k[keys], v[keys], grad_out[rows]
        self.out = torch.full_like(self.grad_out, torch.nan)
        self.stored = [_Guarded(tensor) for tensor in (self.q, self.k, self.v)]

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v, self.out

    def run(self, kernel: CudnnAttention) -> list[torch.Tensor]:
        """Out and the gradients, with tensors."""
        state = kernel.forward(self.operands, self.mask, SCALE, None)
        return [self.out, *kernel.backward(self.grad_out, self.operands, state, self.mask, SCALE, None)]

    def run_bound(
        self, kernel: CudnnAttention, stream: int = 5, scratch: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The same on addresses, with scratch memory for the calls of a stream."""
        forward = kernel.bind_forward(self.operands, self.mask, SCALE)
        backward = kernel.bind_backward(self.grad_out, self.operands, self.mask, SCALE)
        assert forward is not None
        assert backward is not None
        self.stats = torch.full((self.q.size(1), self.q.size(2), self.q.size(0), 1), torch.nan)
        if scratch is None:
            scratch = torch.empty(max(forward.scratch_bytes, backward.scratch_bytes), dtype=torch.uint8)
        assert forward.scratch_bytes <= scratch.nbytes >= backward.scratch_bytes
        loaded = [tensor.data_ptr() for tensor in (scratch, *self.operands, self.stats)]
        forward.run(stream, *loaded)
        backward.run(stream, *loaded, self.grad_out.data_ptr(), *(each.tensor.data_ptr() for each in self.stored))
        return [self.out, *(each.tensor for each in self.stored)]

    def check_way(self, way: str, kernel: CudnnAttention) -> None:
        self.check(self.run(kernel) if way == "eager" else self.run_bound(kernel))

    def check(self, found: list[torch.Tensor]) -> None:
        """Against the formula in fp64, on the same operands."""
        q, k, v, grad_out = (tensor.double() for tensor in (self.q, self.k, self.v, self.grad_out))
        out = torch.empty_like(grad_out)
        MathAttention().forward((q, k, v, out), self.mask, SCALE, None)
        exact = MathAttention().backward(grad_out, (q, k, v, out), (), self.mask, SCALE, None)
        # Results are rounded to the dtype, the queries' gradient twice more; one key too many errs by order 0.1.
        limit = 4 * torch.finfo(self.q.dtype).eps
        for what, value, wanted in zip(("out", "dq", "dk", "dv"), found, (out, *exact), strict=True):
            assert value.shape == wanted.shape
            assert value.dtype == self.q.dtype
            error = ((value.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-2)).item()
            assert error <= limit, (what, error, self.mask)
        for each in self.stored:
            each.check()


class _Guarded:
    """A contiguous tensor of NaN, with a row on either side that nobody may write."""

    def __init__(self, like: torch.Tensor) -> None:
        self._whole = torch.full((like.size(0) + 2, *like.shape[1:]), torch.nan, dtype=like.dtype)
        self._whole[0] = self._whole[-1] = 7.0
        self.tensor = self._whole[1:-1]

    def check(self) -> None:
        assert (self._whole[0] == 7.0).all()
        assert (self._whole[-1] == 7.0).all()


def splits_of(problem: AttentionProblem, group_size: int, m: int) -> list[RowRange]:
    chunks = chunk_ranges(problem.rows, group_size, m)
    # One query that sees one key has no addresses to run on, and is not cuDNN's.
    return [chunk for shard in chunks for chunk in shard if chunk.size and (chunk.stop > 1 or problem.right is None)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("worth", [ALWAYS, NEVER], ids=["pieces", "whole"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_every_split_equals_the_formula(kind, way, worth, layout, cudnn, kernel, monkeypatch) -> None:
    set_worth(monkeypatch, worth)
    problem = PROBLEMS[kind]
    whole = operands_of(problem, layout)
    for group_size, m in ((1, 1), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2)):
        for queries in splits_of(problem, group_size, m):
            Split(problem, queries, whole).check_way(way, kernel)
    masks = {launch.mask for launch in cudnn.launches if launch.kind == "backward" and launch.queries > 1}
    of_causal = {"top left", "none"} if worth == ALWAYS else {"top left", "bottom right"}
    assert masks == ({"none"} if problem.right is None else of_causal)


@pytest.mark.parametrize("way", WAYS)
def test_pieces_compute_what_is_seen_and_squares_need_one(way, cudnn, kernel) -> None:
    whole = operands_of(BASE)
    for queries in (RowRange(0, 12), RowRange(12, 24), RowRange(6, 12), RowRange(0, 24)):
        Split(BASE, queries, whole).check_way(way, kernel)
    assert cudnn.launches == [
        Launch("forward", "top left", 12, 12), Launch("backward", "top left", 12, 12),
        Launch("forward", "bottom right", 12, 24), Launch("backward", "none", 12, 12),
        Launch("backward", "top left", 12, 12),
        Launch("forward", "bottom right", 6, 12), Launch("backward", "none", 6, 6),
        Launch("backward", "top left", 6, 6),
        Launch("forward", "top left", 24, 24), Launch("backward", "top left", 24, 24),
    ]  # fmt: skip


def test_queries_that_see_nothing_are_no_trouble(kernel) -> None:
    split = Split(BASE, RowRange(0, 12), operands_of(BASE))
    split.k, split.v = split.k[8:], split.v[8:]  # the last 4 queries see some of these
    out, grad_q, grad_k, grad_v = split.run(kernel)
    last = Split(BASE, RowRange(0, 12), operands_of(BASE))
    last.q, last.grad_out, last.out = last.q[8:], last.grad_out[8:], last.out[8:]
    last.k, last.v = split.k, split.v
    last.stored = [_Guarded(tensor) for tensor in (last.q, last.k, last.v)]
    last.check([out[8:], grad_q[8:], grad_k, grad_v])
    assert (grad_q[:8] == 0).all()


def test_one_query_that_sees_one_key_is_left_to_the_formula(cudnn, kernel) -> None:
    split = Split(BASE, RowRange(0, 1), operands_of(BASE))
    split.run(kernel)
    assert (split.out == split.v).all()
    assert cudnn.launches == []
    assert kernel.bind_forward(split.operands, split.mask, SCALE) is None
    assert kernel.bind_backward(split.grad_out, split.operands, split.mask, SCALE) is None


def test_without_a_kernel_that_adds_a_bound_pass_is_one_call(cudnn, kernel, monkeypatch) -> None:
    monkeypatch.setattr(attention_cudnn_backward, "bind_sum", lambda *tensors, **others: None)
    split = Split(BASE, RowRange(12, 24), operands_of(BASE))
    split.check(split.run_bound(kernel))
    assert cudnn.launches[1:] == [Launch("backward", "bottom right", 12, 24)]


@pytest.mark.parametrize(("queries", "mask"), [(RowRange(0, 24), "top left"), (RowRange(12, 24), "bottom right")])
def test_gradients_among_others_take_the_mask_that_skips(queries, mask, cudnn, kernel, monkeypatch) -> None:
    set_worth(monkeypatch, ALWAYS)
    split = Split(BASE, queries, operands_of(BASE))
    among_others = [torch.empty(*each.shape[:2], 2 * each.size(2), each.size(3), dtype=each.dtype)[:, :, 1::2]
                    for each in split.operands[:3]]  # fmt: skip
    backward = kernel.bind_backward(split.grad_out, split.operands, split.mask, SCALE, among_others)
    forward = kernel.bind_forward(split.operands, split.mask, SCALE)
    assert backward is not None
    assert forward is not None
    stats = torch.empty(split.q.size(1), split.q.size(2), split.q.size(0), 1)
    scratch = torch.empty(max(forward.scratch_bytes, backward.scratch_bytes), dtype=torch.uint8)
    loaded = [tensor.data_ptr() for tensor in (scratch, *split.operands, stats)]
    forward.run(5, *loaded)
    backward.run(5, *loaded, split.grad_out.data_ptr(), *(each.data_ptr() for each in among_others))
    split.check([split.out, *among_others])
    assert cudnn.launches[-1] == Launch("backward", mask, queries.size, split.k.size(0))


def test_all_pieces_are_deterministic_where_pytorch_is(cudnn, kernel, monkeypatch) -> None:
    split = Split(BASE, RowRange(12, 24), operands_of(BASE))
    split.run(kernel)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    split.run(kernel)
    split.run(kernel)
    assert cudnn.is_deterministic == [False, False, True, True]


@pytest.mark.parametrize("refused", ["none", "top left", "bottom right"])
def test_a_probe_builds_what_is_used(refused, cudnn, kernel, monkeypatch) -> None:
    problem = dataclasses.replace(BASE, group_size=4)
    assert kernel.probe(problem) is None
    cudnn.refused.add(Launch("backward", refused, 6, 18 if refused == "none" else 6))
    reason = kernel.probe(problem)
    assert reason is None if refused == "bottom right" else "not supported" in reason
    set_worth(monkeypatch, NEVER)
    cudnn.refused.add(Launch("backward", "bottom right", 6, 24))
    assert "not supported" in kernel.probe(problem)


def test_two_streams_share_graphs_and_calls_of_one_share_scratch(cudnn, kernel, monkeypatch) -> None:
    """Calls wait on their streams, then those of the two streams take turns."""
    waiting: dict[int, list] = {2: [], 3: []}
    monkeypatch.setattr(emulated_gpu, "_submit", lambda stream, action: waiting[stream].append(action))
    calls = []
    scratch = {stream: torch.empty(1 << 16, dtype=torch.uint8) for stream in waiting}
    for seed, stream in enumerate((2, 3, 3, 2)):
        split = Split(BASE, RowRange(12, 24), operands_of(BASE, seed=seed))
        calls.append((split, split.run_bound(kernel, stream, scratch[stream])))
    assert [len(actions) for actions in waiting.values()] == [8, 8]
    for actions in zip(*waiting.values(), strict=True):
        for action in actions:
            action()
    for split, found in calls:
        split.check(found)
