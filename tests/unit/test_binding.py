"""Row ranges and bound schedules: what a schedule becomes when chunks have sizes."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.problem import GemmProblem, RowRange, chunk_ranges, shard_range, split_range
from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import bind


@given(rows=st.integers(0, 200), parts=st.integers(1, 17))
def test_ranges_split_as_torch_does(rows, parts):
    ours = [(r.start, r.stop) for r in split_range(RowRange(0, rows), parts)]
    theirs = [len(piece) for piece in torch.tensor_split(torch.arange(rows), parts)]
    assert [stop - start for start, stop in ours] == theirs
    assert ours[0][0] == 0
    assert ours[-1][1] == rows
    assert [shard_range(rows, parts, rank).size for rank in range(parts)] == theirs


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(list(Collective)), st.sampled_from(list(Algorithm)), st.integers(1, 6), st.integers(1, 4),
    st.integers(0, 40), st.integers(1, 3),
)  # fmt: skip
def test_rows_of_bound_schedules(collective, algorithm, group_size, chunks_per_shard, rows, batch):
    """That the chunks that are sent and computed with them fit together, `test_programs` proves."""
    chunks = [chunk.size * batch for shard in chunk_ranges(rows, group_size, chunks_per_shard) for chunk in shard]
    for rank in range(group_size):
        bound = bind(collective, algorithm, group_size, rank, chunks_per_shard, rows, batch)
        own = shard_range(rows, group_size, rank)
        assert list(bound.chunk_rows) == chunks
        assert (bound.own_start, bound.own_rows) == (own.start * batch, own.size * batch)
        arrived = sum(chunks[step.receive.chunk] for step in bound.steps if step.receive is not None)
        assert bound.arrived_rows == arrived <= bound.most_arrived_rows
        sent = [step.send.chunk for step in bound.steps if step.send is not None]
        computed = [step.compute for step in bound.steps if step.compute is not None]
        assert sorted(computed) == [chunk for chunk, size in enumerate(chunks) if size]
        assert all(chunks[chunk] > 0 for chunk in sent)


def test_problem_counts_work_and_bytes():
    problem = GemmProblem("all_gather_linear", "fprop", rows=10, batch=2, N=3, K=5, dtype="bfloat16", group_size=4)
    assert problem.M == 20
    assert problem.flops == 2 * 20 * 3 * 5
    assert problem.shard_bytes == 3 * 2 * 5 * 2
    backward = GemmProblem("linear_reduce_scatter", "backward", 10, 2, 3, 5, "float32", 4, "input+weight")
    assert backward.flops == 2 * problem.flops
    assert backward.shard_bytes == 3 * 2 * 3 * 4
    assert "needs input+weight" in str(backward)
