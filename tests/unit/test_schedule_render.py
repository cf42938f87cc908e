"""The grid as users see it: exact for four ranks, whole or cut for any other group."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.schedule import Schedule, describe, render
from tests.harness.documents import code_of
from tests.harness.schedules import build, schedules

DESIGN = Path(__file__).resolve().parents[2] / "docs" / "design.md"

RING_REDUCE_SCATTER = """\
ring reduce-scatter: 4 ranks, 1 chunk per shard

step | rank 0              | rank 1              | rank 2              | rank 3
-----+---------------------+---------------------+---------------------+--------------------
   0 | [3]                 | [0]                 | [1]                 | [2]
   1 | [+2]   3->r1  2<-r3 | [+3]   0->r2  3<-r0 | [+0]   1->r3  0<-r1 | [+1]   2->r0  1<-r2
   2 | [+1]   2->r1  1<-r3 | [+2]   3->r2  2<-r0 | [+3]   0->r3  3<-r1 | [+0]   1->r0  0<-r2
   3 | [+0*]  1->r1  0<-r3 | [+1*]  2->r2  1<-r0 | [+2*]  3->r3  2<-r1 | [+3*]  0->r0  3<-r2

  [2]    compute this rank's partial of shard 2
  [+2]   the same, added to the running sum that arrived
  [2*]   the rank's own shard, last
  2->r3  send the running sum of shard 2 to rank 3
  2<-r1  receive the running sum of shard 2 from rank 1
Transfers of a step are issued together, before its computation, and run beside it."""

DIRECT_ALL_GATHER_MARKED = """\
direct all-gather: 4 ranks, 1 chunk per shard

step | rank 0             | rank 1             | rank 2             | rank 3
-----+--------------------+--------------------+--------------------+-------------------
   0 | [0*]  0->r1  3<-r3 | [1*]  1->r2  0<-r0 | [2*]  2->r3  1<-r1 | [3*]  3->r0  2<-r2
   1 | [3]   0->r2  2<-r2 | [0]   1->r3  3<-r3 | [1]   2->r0  0<-r0 | [2]   3->r1  1<-r1
   2 | [2]   0->r3  1<-r1 | [3]   1->r0  2<-r2 |>[0]   2->r1  3<-r3<| [1]   3->r2  0<-r0
   3 | [1]                | [2]                | [3]                | [0]

  [2]    multiply shard 2
  [2*]   the rank's own shard, first
  2->r3  send shard 2 to rank 3
  2<-r1  receive shard 2 from rank 1
  >  <   the step in question
Transfers of a step are issued together, before its computation, and run beside it."""

LARGE_CUT = """\
ring all-gather: 64 ranks, 2 chunks per shard

step | ... | rank 20                      | rank 21                      | ...
-----+-----+------------------------------+------------------------------+----
 ... | ... | ...                          | ...                          | ...
  29 | ... | [6.1]   6.1->r21   5.1<-r19  | [7.1]   7.1->r22   6.1<-r20  | ...
  30 | ... | [5.0]   5.0->r21   4.0<-r19  |>[6.0]   6.0->r22   5.0<-r20 <| ...
  31 | ... | [5.1]   5.1->r21   4.1<-r19  | [6.1]   6.1->r22   5.1<-r20  | ...
 ... | ... | ...                          | ...                          | ...
"""


def test_grids_of_four() -> None:
    assert render(build("reduce_scatter", "ring", 4)) == RING_REDUCE_SCATTER
    assert render(build("all_gather", "direct", 4), mark=(2, 2)) == DIRECT_ALL_GATHER_MARKED
    title, grid, legend = render(build("reduce_scatter", "direct", 4)).split("\n\n")
    assert f"{title}\n{grid}\n" == code_of(DESIGN, "## A step")
    assert "receive the partial of shard 2 from rank 1" in legend
    assert legend.endswith("After the last step every rank adds the partials that arrived to those of its own shard.")


def test_large_groups_are_cut_around_the_mark() -> None:
    text = render(build("all_gather", "ring", 64, 2), mark=(21, 30), max_width=90, max_steps=3)
    assert text.partition("\n\n  [2.1]")[0] + "\n" == LARGE_CUT


def test_large_groups_show_both_ends_without_a_mark() -> None:
    lines = render(build("all_gather", "ring", 64), max_steps=4).splitlines()
    assert [text.strip() for text in lines[2].split("|")] == ["step", "rank 0", "rank 1", "rank 2", "...", "rank 63"]
    assert [line.split("|")[0].strip() for line in lines[4:9]] == ["0", "1", "2", "...", "63"]


@given(
    schedule=schedules(max_group_size=64, max_chunks=2),
    max_width=st.integers(60, 200) | st.just(120),
    max_steps=st.integers(1, 200),
    data=st.data(),
)
@settings(deadline=None, max_examples=50)
def test_any_grid_fits_and_shows_its_mark(schedule, max_width, max_steps, data):
    num_steps = schedule.group_size * schedule.chunks_per_shard
    mark = data.draw(st.none() | st.tuples(st.integers(0, schedule.group_size - 1), st.integers(0, num_steps - 1)))
    text = render(schedule, mark=mark, max_width=max_width, max_steps=max_steps)
    assert text.isascii()
    title, grid = text.split("\n\n")[:2]
    lines = grid.splitlines()
    assert title == describe(schedule)
    assert max(map(len, lines)) <= max_width
    assert sum("|>" in line for line in lines) == (mark is not None)
    if mark is not None:
        (marked,) = [line for line in lines if "|>" in line]
        assert marked.startswith(f"{mark[1]:>4} ")
        column = marked[: marked.index("|>")].count("|")
        assert lines[0].split("|")[1 + column].strip() == f"rank {mark[0]}"
    assert len(lines) <= 2 + max_steps + 2
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_marked_last_column_fits_exactly() -> None:
    schedule = build("reduce_scatter", "direct", 5)
    width = max(map(len, render(schedule, mark=(4, 1), max_width=1000).splitlines()))
    assert "rank 0" in render(schedule, mark=(4, 1), max_width=width)
    assert max(map(len, render(schedule, mark=(4, 1), max_width=width - 1).splitlines()[:8])) < width


def test_one_rank() -> None:
    text = render(build("reduce_scatter", "ring", 1, 2))
    assert text.splitlines()[4:6] == ["   0 | [0.0*]", "   1 | [0.1*]"]
    assert "<-" not in text
    assert "adds" not in text


@pytest.mark.parametrize(("schedule", "text"), [
    (build("all_gather", "ring", 1), "ring all-gather: 1 rank, 1 chunk per shard"),
    (build("all_gather", "direct", 2), "direct all-gather: 2 ranks, 1 chunk per shard"),
    (build("reduce_scatter", "ring", 8, 2), "ring reduce-scatter: 8 ranks, 2 chunks per shard"),
], ids=["one", "gather", "scatter"])  # fmt: skip
def test_one_line(schedule: Schedule, text: str) -> None:
    assert describe(schedule) == text
