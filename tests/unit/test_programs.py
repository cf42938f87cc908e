"""Programs of all passes: right on all ranks, whoever runs them; the same for the same problem; printed as a table."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Program
from commfuse_megatron.schedule.program_text import render_program
from tests.harness.programs import KINDS, Case, cases

NCCL, APART = Policy(has_windows=False), Policy(has_windows=False, keeps_own_apart=True)
TAPE = Policy(has_windows=True, most_adds=1, adds_bias_too=True, is_tape=True)
LANES = replace(TAPE, lanes=2)
SMALL = {"group_size": 2, "rows": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_are_right_on_all_ranks(kind):
    @settings(deadline=None, max_examples=60)
    @given(cases(kind))
    def check(case: Case) -> None:
        case.validate(case.programs())

    check()


@pytest.mark.parametrize("kind", KINDS)
def test_large_groups_with_uneven_rows(kind):
    asked = next(asked for asked in reversed(KINDS[kind].asks) if not asked.is_bulk)
    case = Case(kind, LANES, asked, Algorithm.DIRECT, group_size=16, chunks_per_shard=4, rows=71)
    case.validate(case.programs())


def test_a_ring_of_one_rank_adds_the_bias_once():
    """Fails without the fix: the product had it already when it was added to the sums."""
    case = Case("linear_reduce_scatter", NCCL, Asked(has_bias=True), Algorithm.RING, group_size=1)
    (program,) = case.programs()
    assert sum(getattr(op, "has_bias", False) for op in program.ops) == 1


@pytest.mark.parametrize("kind", ["linear_reduce_scatter backward", "all_gather_linear backward"])
def test_a_ring_over_windows_multiplies_before_it_waits(kind):
    """Fails without the fix: all batches were issued ahead, and each of a ring's waits for what it passes on."""
    case = Case(kind, Policy(has_windows=True), Asked(True, weight_grad="now"), Algorithm.RING)
    for program in case.programs():
        names = [type(op).__name__ for op in program.ops]
        assert names.index("Gemm") < names.index("Wait")


@settings(deadline=None)
@given(st.sampled_from(list(KINDS)).flatmap(lambda kind: cases(kind, most_ranks=4)))
def test_equal_problems_give_equal_programs(case):
    first, second = case.programs(), case.programs()
    assert first == second
    assert [hash(program) for program in first] == [hash(program) for program in second]


# Of programs whose tables have words of their own: that all are right is tested above.
TABLES: dict[str, tuple[Case, str]] = {
    "all_gather_linear": (
        Case("all_gather_linear", NCCL, Asked(has_bias=True), **SMALL),
        """\
 op | lane | what              | rows read     | rows written  | batch
----+------+-------------------+---------------+---------------+---------------------------
 0  | main | issue             | shard[0:1]    | gathered[0:2] | gather 0: 1->r0 at 2 0<-r0
 1  | main | multiply 1 + bias | shard[0:1]    | out[2:3]      |
 2  | main | wait              |               |               | gather 0
 3  | main | multiply 0 + bias | gathered[0:2] | out[0:2]      |
 4  | main | finish            |               |               |""",
    ),
    "linear_reduce_scatter": (
        Case("linear_reduce_scatter", NCCL, Asked(has_bias=True), Algorithm.RING, **SMALL),
        """\
 op | lane | what       | rows read             | rows written | batch
----+------+------------+-----------------------+--------------+----------------------------
 0  | main | multiply 0 | a[0:2]                | sent[0:2]    |
 1  | main | issue      | sent[0:2]             | arrived[0:1] | scatter 1: 0->r0 at 0 1<-r0
 2  | main | multiply 1 | a[2:3]                | own[0:1]     |
 3  | main | wait       |                       |              | scatter 1
 4  | main | sum        | own[0:1] arrived[0:1] | out[0:1]     |
 5  | main | sum + bias | out[0:1]              | out[0:1]     |
 6  | main | finish     |                       |              |""",
    ),
    "all_gather_linear backward": (
        Case(
            "all_gather_linear backward", TAPE, Asked(True, weight_grad="now", accumulates=True, is_bulk=True), **SMALL
        ),
        """\
 op | lane | what                        | rows read            | rows written  | batch
----+------+-----------------------------+----------------------+---------------+----------------------------
 0  | main | issue                       | shard[0:1]           | gathered[0:2] | gather 0: 1->r0 at 2 0<-r0
 1  | main | copy beside what follows    | shard[0:1]           | gathered[2:3] | copies 0
 2  | main | multiply backward           | a[0:2]               | sent[0:2]     |
 3  | main | issue                       | sent[0:2]            | arrived[0:1]  | scatter 1: 0->r0 at 0 1<-r0
 4  | main | wait                        |                      |               | gather 0, copies 0
 5  | main | weight gradient, added      | a[0:3] gathered[0:3] |               |
 6  | main | wait                        |                      |               | scatter 1
 7  | main | multiply 1 backward + added | a[2:3] arrived[0:1]  | out[0:1]      |
 8  | main | finish                      |                      |               |""",
    ),
    "embedding": (
        Case("embedding", APART, Asked(), **SMALL),
        """\
 op | lane | what      | rows read             | rows written | batch
----+------+-----------+-----------------------+--------------+----------------------------
 0  | main | look up 0 |                       | sent[0:2]    |
 1  | main | issue     | sent[0:2]             | arrived[0:1] | scatter 1: 0->r0 at 0 1<-r0
 2  | main | look up 1 |                       | own[0:1]     |
 3  | main | wait      |                       |              | scatter 1
 4  | main | sum       | own[0:1] arrived[0:1] | out[0:1]     |
 5  | main | finish    |                       |              |""",
    ),
    "query split": (
        Case("query split", LANES, Asked(has_bias=True), **SMALL),
        """\
 op | lane | what                      | rows read           | rows written | batch
----+------+---------------------------+---------------------+--------------+----------------------------
 0  | main | fork 2                    |                     |              |
 1  | 0    | on 0                      |                     |              |
 2  | 0    | attend 0                  |                     | a[0:2]       |
 3  | 1    | on 1                      |                     |              |
 4  | 1    | attend 1                  |                     | a[2:3]       |
 5  | 0    | on 0                      |                     |              |
 6  | 0    | multiply 0                | a[0:2]              | sent[0:2]    |
 7  | 0    | issue                     | sent[0:2]           | arrived[0:1] | scatter 1: 0->r0 at 0 1<-r0
 8  | 1    | on 1                      |                     |              |
 9  | 1    | wait                      |                     |              | scatter 1
 10 | 1    | multiply 1 + added + bias | a[2:3] arrived[0:1] | out[0:1]     |
 11 | main | join 2                    |                     |              |
 12 | main | finish                    |                     |              |""",
    ),
    "query split backward": (
        Case("query split backward", LANES, Asked(True, weight_grad="now"), **SMALL),
        """\
 op | lane | what                     | rows read            | rows written  | batch
----+------+--------------------------+----------------------+---------------+---------------------------
 0  | main | fork 2                   |                      |               |
 1  | main | issue                    | shard[0:1]           | gathered[0:2] | gather 0: 1->r0 at 2 0<-r0
 2  | 0    | on 0                     |                      |               |
 3  | 0    | multiply 1 backward      | shard[0:1]           | out[2:3]      |
 4  | 0    | attend backward 1        | out[2:3]             |               |
 5  | 0    | copy beside what follows | shard[0:1]           | gathered[2:3] | copies 0
 6  | 1    | on 1                     |                      |               |
 7  | 1    | wait                     |                      |               | gather 0
 8  | 1    | multiply 0 backward      | gathered[0:2]        | out[0:2]      |
 9  | 1    | attend backward 0        | out[0:2]             |               |
 10 | main | on main                  |                      |               |
 11 | main | wait                     |                      |               | gather 0, copies 0
 12 | main | weight gradient          | gathered[0:3] x[0:3] |               |
 13 | 1    | on 1                     |                      |               |
 14 | main | join 2                   |                      |               |
 15 | main | sum slabs                |                      |               |
 16 | main | finish                   |                      |               |""",
    ),
    "ulysses": (
        Case("ulysses", NCCL, Asked(), chunks_per_shard=2, **SMALL),
        """\
 op | lane | what           | rows read           | rows written    | batch
----+------+----------------+---------------------+-----------------+----------------------------
 0  | main | pack 0         |                     | packed[0:5]     |
 1  | main | issue          | packed[0:5]         | gathered[0:10]  | gather 0: 2->r0 at 10 0<-r0
 2  | main | pack 1         |                     | packed[10:15]   |
 3  | main | issue          | packed[10:15]       | gathered[15:25] | gather 1: 3->r0 at 25 1<-r0
 4  | main | place 0        |                     | gathered[10:15] |
 5  | main | wait           |                     |                 | gather 0
 6  | main | attend group 0 | gathered[0:15]      | a[0:3]          |
 7  | main | issue          | a[0:2]              | arrived[0:1]    | scatter 0: 0->r0 at 0 2<-r0
 8  | main | place 1        |                     | gathered[25:30] |
 9  | main | wait           |                     |                 | gather 1
 10 | main | attend 1       | gathered[15:30]     | a[3:5]          |
 11 | main | issue          | a[3:5]              | arrived[1:2]    | scatter 1: 1->r0 at 2 3<-r0
 12 | main | attend 3       | gathered[15:30]     | a[5:6]          |
 13 | main | wait           |                     |                 | scatter 0
 14 | main | unpack 0       | arrived[0:1] a[2:3] |                 |
 15 | main | wait           |                     |                 | scatter 1
 16 | main | unpack 1       | arrived[1:2] a[5:6] |                 |
 17 | main | finish         |                     |                 |""",
    ),
    "ulysses zigzag": (
        Case("ulysses zigzag", NCCL, Asked(keeps_gathered=True), group_size=2, rows=4),
        """\
 op | lane | what     | rows read                  | rows written                   | batch
----+------+----------+----------------------------+--------------------------------+----------------------------
 0  | main | pack 0   |                            | packed[0:10]                   |
 1  | main | issue    | packed[0:5]                | gathered[0:5]                  | gather 0: 2->r0 at 5 0<-r0
 2  | main | issue    | packed[5:10]               | gathered[15:20]                | gather 1: 3->r0 at 10 1<-r0
 3  | main | place 0  |                            | gathered[5:10] gathered[10:15] |
 4  | main | wait     |                            |                                | gather 0, gather 1
 5  | main | attend 0 | gathered[0:20]             | a[0:1]                         |
 6  | main | issue    | a[0:1]                     | arrived[0:1]                   | scatter 0: 0->r0 at 0 2<-r0
 7  | main | attend 1 | gathered[0:20]             | a[3:4]                         |
 8  | main | issue    | a[3:4]                     | arrived[1:2]                   | scatter 1: 1->r0 at 1 3<-r0
 9  | main | attend 2 | gathered[0:20]             | a[1:2]                         |
 10 | main | attend 3 | gathered[0:20]             | a[2:3]                         |
 11 | main | wait     |                            |                                | scatter 0, scatter 1
 12 | main | unpack 0 | arrived[0:2] a[1:2] a[2:3] |                                |
 13 | main | finish   |                            |                                |""",
    ),
    "ulysses dropout": (
        Case("ulysses dropout", TAPE, Asked(keeps_gathered=True), **SMALL),
        """\
 op | lane | what                     | rows read           | rows written    | batch
----+------+--------------------------+---------------------+-----------------+----------------------------
 0  | main | pack 0                   |                     | packed[0:5]     |
 1  | main | issue                    | packed[0:5]         | gathered[0:10]  | gather 0: 1->r0 at 10 0<-r0
 2  | main | place 0                  |                     | gathered[10:15] |
 3  | main | wait                     |                     |                 | gather 0
 4  | main | copy beside what follows | gathered[0:15]      | kept[0:15]      | copies 0
 5  | main | attend group 0           | gathered[0:15]      | a[0:3]          |
 6  | main | issue                    | a[0:2]              | arrived[0:1]    | scatter 0: 0->r0 at 0 1<-r0
 7  | main | wait                     |                     |                 | scatter 0
 8  | main | unpack 0                 | arrived[0:1] a[2:3] |                 |
 9  | main | finish                   |                     |                 |""",
    ),
    "ulysses backward": (
        Case("ulysses backward", NCCL, Asked(is_backward=True), chunks_per_shard=2, **SMALL),
        """\
 op | lane | what           | rows read              | rows written  | batch
----+------+----------------+------------------------+---------------+-----------------------------
 0  | main | pack 0         |                        | packed[0:1]   |
 1  | main | issue          | packed[0:1]            | gathered[0:2] | gather 0: 2->r0 at 2 0<-r0
 2  | main | pack 1         |                        | packed[2:3]   |
 3  | main | issue          | packed[2:3]            | gathered[3:5] | gather 1: 3->r0 at 5 1<-r0
 4  | main | place 0        |                        | gathered[2:3] |
 5  | main | wait           |                        |               | gather 0
 6  | main | attend group 0 | gathered[0:3]          | a[0:15]       |
 7  | main | issue          | a[0:10]                | arrived[0:5]  | scatter 0: 0->r0 at 0 2<-r0
 8  | main | place 1        |                        | gathered[5:6] |
 9  | main | wait           |                        |               | gather 1
 10 | main | attend group 1 | gathered[3:6]          | a[15:30]      |
 11 | main | issue          | a[15:25]               | arrived[5:10] | scatter 1: 1->r0 at 10 3<-r0
 12 | main | wait           |                        |               | scatter 0
 13 | main | unpack 0       | arrived[0:5] a[10:15]  |               |
 14 | main | wait           |                        |               | scatter 1
 15 | main | unpack 1       | arrived[5:10] a[25:30] |               |
 16 | main | finish         |                        |               |""",
    ),
    "ulysses zigzag backward": (
        Case("ulysses zigzag backward", NCCL, Asked(is_backward=True), group_size=2, rows=4),
        """\
 op | lane | what           | rows read                      | rows written                | batch
----+------+----------------+--------------------------------+-----------------------------+----------------------------
 0  | main | pack 0         |                                | packed[0:2]                 |
 1  | main | issue          | packed[0:1]                    | gathered[0:1]               | gather 0: 2->r0 at 1 0<-r0
 2  | main | issue          | packed[1:2]                    | gathered[3:4]               | gather 1: 3->r0 at 2 1<-r0
 3  | main | place 0        |                                | gathered[1:2] gathered[2:3] |
 4  | main | wait           |                                |                             | gather 0, gather 1
 5  | main | attend group 0 | gathered[0:4]                  | a[0:20]                     |
 6  | main | issue          | a[0:5]                         | arrived[0:5]                | scatter 0: 0->r0 at 0 2<-r0
 7  | main | issue          | a[15:20]                       | arrived[5:10]               | scatter 1: 1->r0 at 5 3<-r0
 8  | main | wait           |                                |                             | scatter 0, scatter 1
 9  | main | unpack 0       | arrived[0:10] a[5:10] a[10:15] |                             |
 10 | main | finish         |                                |                             |""",
    ),
    "ulysses in parts": (
        Case("ulysses in parts", NCCL, Asked(pauses=True), chunks_per_shard=2, **SMALL),
        """\
 op | lane | what           | rows read           | rows written    | batch
----+------+----------------+---------------------+-----------------+----------------------------
 0  | main | pack 0         |                     | packed[0:5]     |
 1  | main | issue          | packed[0:5]         | gathered[0:10]  | gather 0: 2->r0 at 10 0<-r0
 2  | main | pause          |                     |                 |
 3  | main | pack 1         |                     | packed[10:15]   |
 4  | main | issue          | packed[10:15]       | gathered[15:25] | gather 1: 3->r0 at 25 1<-r0
 5  | main | place 0        |                     | gathered[10:15] |
 6  | main | wait           |                     |                 | gather 0
 7  | main | attend group 0 | gathered[0:15]      | a[0:3]          |
 8  | main | issue          | a[0:2]              | arrived[0:1]    | scatter 0: 0->r0 at 0 2<-r0
 9  | main | place 1        |                     | gathered[25:30] |
 10 | main | wait           |                     |                 | gather 1
 11 | main | attend 1       | gathered[15:30]     | a[3:5]          |
 12 | main | issue          | a[3:5]              | arrived[1:2]    | scatter 1: 1->r0 at 2 3<-r0
 13 | main | attend 3       | gathered[15:30]     | a[5:6]          |
 14 | main | wait           |                     |                 | scatter 0
 15 | main | unpack 0       | arrived[0:1] a[2:3] |                 |
 16 | main | wait           |                     |                 | scatter 1
 17 | main | unpack 1       | arrived[1:2] a[5:6] |                 |
 18 | main | finish         |                     |                 |""",
    ),
    "ulysses shared in parts": (
        Case("ulysses shared in parts", NCCL, Asked(keeps_gathered=True, pauses=True), group_size=2, rows=4),
        """\
 op | lane | what     | rows read                  | rows written                   | batch
----+------+----------+----------------------------+--------------------------------+----------------------------
 0  | main | pack 0   |                            | packed[0:10]                   |
 1  | main | issue    | packed[0:5]                | gathered[0:5]                  | gather 0: 2->r0 at 5 0<-r0
 2  | main | issue    | packed[5:10]               | gathered[15:20]                | gather 1: 3->r0 at 10 1<-r0
 3  | main | place 0  |                            | gathered[5:10] gathered[10:15] |
 4  | main | wait     |                            |                                | gather 0, gather 1
 5  | main | attend 0 | gathered[0:20]             | a[0:1]                         |
 6  | main | issue    | a[0:1]                     | arrived[0:1]                   | scatter 0: 0->r0 at 0 2<-r0
 7  | main | attend 1 | gathered[0:20]             | a[3:4]                         |
 8  | main | issue    | a[3:4]                     | arrived[1:2]                   | scatter 1: 1->r0 at 1 3<-r0
 9  | main | attend 2 | gathered[0:20]             | a[1:2]                         |
 10 | main | attend 3 | gathered[0:20]             | a[2:3]                         |
 11 | main | wait     |                            |                                | scatter 0, scatter 1
 12 | main | unpack 0 | arrived[0:2] a[1:2] a[2:3] |                                |
 13 | main | finish   |                            |                                |""",
    ),
    "ulysses backward in parts": (
        Case("ulysses backward in parts", NCCL, Asked(is_backward=True, pauses=True), chunks_per_shard=2, **SMALL),
        """\
 op | lane | what           | rows read              | rows written  | batch
----+------+----------------+------------------------+---------------+-----------------------------
 0  | main | pack 0         |                        | packed[0:1]   |
 1  | main | issue          | packed[0:1]            | gathered[0:2] | gather 0: 2->r0 at 2 0<-r0
 2  | main | pause          |                        |               |
 3  | main | pack 1         |                        | packed[2:3]   |
 4  | main | issue          | packed[2:3]            | gathered[3:5] | gather 1: 3->r0 at 5 1<-r0
 5  | main | pause          |                        |               |
 6  | main | place 0        |                        | gathered[2:3] |
 7  | main | wait           |                        |               | gather 0
 8  | main | attend group 0 | gathered[0:3]          | a[0:15]       |
 9  | main | issue          | a[0:10]                | arrived[0:5]  | scatter 0: 0->r0 at 0 2<-r0
 10 | main | place 1        |                        | gathered[5:6] |
 11 | main | wait           |                        |               | gather 1
 12 | main | attend group 1 | gathered[3:6]          | a[15:30]      |
 13 | main | issue          | a[15:25]               | arrived[5:10] | scatter 1: 1->r0 at 10 3<-r0
 14 | main | pause          |                        |               |
 15 | main | wait           |                        |               | scatter 0
 16 | main | unpack 0       | arrived[0:5] a[10:15]  |               |
 17 | main | pause          |                        |               |
 18 | main | wait           |                        |               | scatter 1
 19 | main | unpack 1       | arrived[5:10] a[25:30] |               |
 20 | main | finish         |                        |               |""",
    ),
}


@pytest.mark.parametrize(("case", "table"), TABLES.values(), ids=TABLES)
def test_the_table_of_a_program(case, table):
    assert render_program(case.programs()[1]).split("\n\n")[1] == table


CUT = """\
the program of rank 0: 5 ops
direct all-gather: 2 ranks, 1 chunk per shard

 op  | lane | what              | rows read     | rows written | batch
-----+------+-------------------+---------------+--------------+---------
 ... |      |                   |               |              |
 1   | main | multiply 0 + bias | shard[0:2]    | out[0:2]     |
>2   | main | wait              |               |              | gather 0
 3   | main | multiply 1 + bias | gathered[2:3] | out[2:3]     |
 ... |      |                   |               |              |"""


def test_a_long_program_is_cut_around_the_mark():
    case, _ = TABLES["all_gather_linear"]
    assert render_program(case.programs()[0], mark=2, max_ops=3) == CUT


def test_a_sum_of_many_ranks_is_cut():
    case = Case("linear_reduce_scatter", NCCL, Asked(), group_size=9, rows=9)
    assert "out[0:1] arrived[0:1] arrived[1:2] ... arrived[7:8]" in render_program(case.programs()[0])


def test_a_program_without_transfers():
    asked = Asked(True, has_product=False, weight_grad="now", has_x=True)
    first, *_ = Case("all_gather_linear backward", NCCL, asked, **SMALL).programs()
    assert render_program(first).splitlines()[0] == "a program that sends nothing: 1 op"
    assert render_program(Program((), None, None)).startswith("a program that sends nothing: 0 ops\n")
