"""Programs of all ranks of a group, for what a call may ask and for the policies that run passes."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.passes import lower_pass
from commfuse_megatron.problem import UlyssesProblem
from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import BoundSchedule, bind
from commfuse_megatron.schedule.lower_all_reduce import lower_all_reduce
from commfuse_megatron.schedule.lower_attention import (
    lower_at_once_backward,
    lower_query_split,
    lower_query_split_backward,
)
from commfuse_megatron.schedule.lower_linear import (
    Asked,
    lower_embedding,
    lower_gather_alone,
    lower_gather_pass,
    lower_scatter_pass,
    lower_transfers,
)
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Program
from commfuse_megatron.schedule.program_checks import validate_programs

ANY_NUMBER = 1 << 30

TAPE = Policy(has_windows=True, most_adds=1, adds_bias_too=True, is_tape=True)

#: What a call may ask, by the pass that is lowered for it.
Lower = Callable[[BoundSchedule, BoundSchedule, Policy, Asked], Program]


@dataclass(frozen=True)
class Kind:
    """A pass: how it is lowered, from the gather and the scatter of its problem, and what may be asked of it.

    problem: instead, what is lowered, for so many ranks and groups of heads, rows and a batch.
    """

    lower: Lower | None
    asks: tuple[Asked, ...]
    attends: bool = False
    all_reduces: bool = False
    has_lanes_on_tensors: bool = False
    only_tapes: bool = False
    only_direct: bool = False
    may_be_in_pieces: bool = False
    problem: Callable[[int, int, int, int], UlyssesProblem] | None = None


def _ulysses(pass_name: str = "fprop", *, order: str = "contiguous", **others) -> Callable[..., UlyssesProblem]:
    """Each group has heads of its own, or all of them share one."""

    def problem(group_size: int, groups: int, rows: int, batch: int) -> UlyssesProblem:
        heads = {"heads": group_size * groups, "kv_heads": group_size * groups} | others
        return UlyssesProblem(
            pass_name=pass_name, rows=rows, batch=batch, head_dim=2, value_dim=1, dtype="float64",
            group_size=group_size, order=order, **heads,
        )  # fmt: skip

    return problem


def _scatter_pass(gather: BoundSchedule, scatter: BoundSchedule, policy: Policy, asked: Asked) -> Program:
    gathers = asked.is_backward and asked.weight_grad != "none" and not asked.has_x
    return lower_scatter_pass(scatter, gather if gathers else None, policy, asked)


_WEIGHT_GRADS = (("none", False), ("now", False), ("now", True), ("later", False))
_FLAGS = (False, True)

_GATHER_FORWARD = tuple(
    Asked(has_bias=has_bias, keeps_gathered=keeps) for has_bias, keeps in itertools.product(_FLAGS, _FLAGS)
)
_GATHER_BACKWARD = tuple(
    Asked(True, has_product, when, accumulates, is_bulk)
    for has_product, (when, accumulates), is_bulk in itertools.product(_FLAGS, _WEIGHT_GRADS, _FLAGS)
    if has_product or (when != "none" and not is_bulk)
)
_SCATTER_BACKWARD = tuple(
    asked._replace(has_x=has_x, has_addend=has_addend)
    for asked, has_x, has_addend in itertools.product(_GATHER_BACKWARD, _FLAGS, _FLAGS)
    if (asked.weight_grad != "none" or not has_x) and (asked.has_product or not has_addend)
)
_WHOLE_BACKWARD = tuple(asked for asked in _GATHER_BACKWARD if asked.has_product)

KINDS = {
    "all_gather_linear": Kind(lambda g, s, policy, asked: lower_gather_pass(g, policy, asked), _GATHER_FORWARD,
     may_be_in_pieces=True),
    "linear_reduce_scatter": Kind(_scatter_pass, (Asked(), Asked(has_bias=True)), may_be_in_pieces=True),
    "all_gather_linear backward": Kind(_scatter_pass, _SCATTER_BACKWARD, may_be_in_pieces=True),
    "linear_reduce_scatter backward": Kind(lambda g, s, policy, asked: lower_gather_pass(g, policy, asked),
     _GATHER_BACKWARD, may_be_in_pieces=True),
    "linear_all_reduce": Kind(lambda g, s, policy, asked: lower_all_reduce(s, g, policy, asked), (Asked(),
     Asked(has_bias=True)), all_reduces=True, only_direct=True),
    "linear_grad_all_reduce backward": Kind(lambda g, s, policy, asked: lower_all_reduce(s, g, policy, asked),
     tuple(Asked(True, True, when, accumulates) for when, accumulates in _WEIGHT_GRADS), all_reduces=True,
     only_direct=True),
    "embedding": Kind(lambda g, s, policy, asked: lower_embedding(s, policy), (Asked(),)),
    "embedding backward": Kind(lambda g, s, policy, asked: lower_gather_alone(g, policy, "all-gather",
     keeps_gathered=True), (Asked(has_product=False, keeps_gathered=True),)),
    "transfers": Kind(lambda g, s, policy, asked: lower_transfers(g, policy, "all-gather"),
     (Asked(has_product=False),)),
    "query split": Kind(lambda g, s, policy, asked: lower_query_split(s, policy, has_bias=asked.has_bias), (Asked(),
     Asked(has_bias=True)), attends=True, has_lanes_on_tensors=True, only_direct=True),
    "query split backward": Kind(lambda g, s, policy, asked: lower_query_split_backward(g, policy, asked),
     tuple(asked for asked in _WHOLE_BACKWARD if not asked.is_bulk), attends=True, has_lanes_on_tensors=True,
      only_direct=True),
    "at once backward": Kind(lambda g, s, policy, asked: lower_at_once_backward(g, policy, asked), _WHOLE_BACKWARD,
     attends=True, only_tapes=True, only_direct=True),
    "ulysses": Kind(None, (Asked(), Asked(keeps_gathered=True)), only_direct=True, problem=_ulysses(),
     has_lanes_on_tensors=True),
    "ulysses zigzag": Kind(None, (Asked(), Asked(keeps_gathered=True)), only_direct=True,
     problem=_ulysses(order="zigzag", kv_heads=1)),
    "ulysses dropout": Kind(None, (Asked(keeps_gathered=True),), only_direct=True, problem=_ulysses(has_dropout=True)),
    "ulysses backward": Kind(None, (Asked(is_backward=True),), only_direct=True, problem=_ulysses("backward"),
     has_lanes_on_tensors=True),
    "ulysses zigzag backward": Kind(None, (Asked(is_backward=True),), only_direct=True,
     problem=_ulysses("backward", order="zigzag", kv_heads=1)),
    "ulysses in parts": Kind(None, (Asked(pauses=True), Asked(keeps_gathered=True, pauses=True)), only_direct=True,
     problem=_ulysses(), has_lanes_on_tensors=True),
    "ulysses shared in parts": Kind(None, (Asked(keeps_gathered=True, pauses=True),), only_direct=True,
     problem=_ulysses(order="zigzag", kv_heads=1), has_lanes_on_tensors=True),
    "ulysses backward in parts": Kind(None, (Asked(is_backward=True, pauses=True),), only_direct=True,
     problem=_ulysses("backward"), has_lanes_on_tensors=True),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A pass of a problem, and who runs it."""

    kind: str
    policy: Policy
    asked: Asked
    algorithm: Algorithm = Algorithm.DIRECT
    group_size: int = 4
    chunks_per_shard: int = 1
    rows: int = 8
    batch: int = 1

    def programs(self) -> list[Program]:
        """Of all ranks."""
        sizes = (self.chunks_per_shard, self.rows, self.batch)
        kind = KINDS[self.kind]
        if kind.problem is not None:
            problem = kind.problem(self.group_size, *sizes)
            plan = PassPlan("overlapped", "", self.algorithm, self.chunks_per_shard, keep_gathered_input=False)
            return [lower_pass(problem, plan, self.policy, self.asked, rank) for rank in range(self.group_size)]
        assert kind.lower is not None
        found = []
        for rank in range(self.group_size):
            gather, scatter = (
                bind(collective, self.algorithm, self.group_size, rank, *sizes)
                for collective in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER)
            )
            found.append(kind.lower(gather, scatter, self.policy, self.asked))
        return found

    def validate(self, programs: list[Program]) -> None:
        """Raise ScheduleError unless they are right for this case."""
        kind = KINDS[self.kind]
        validate_programs(programs, self.policy, self.asked, attends=kind.attends, all_reduces=kind.all_reduces)


@st.composite
def policies(draw: st.DrawFn, *, is_tape: bool, has_lanes: bool) -> Policy:
    """Those that passes are run by: on tapes, or on tensors over gloo, NCCL or the copy engine."""
    lanes, on_the_way = draw(st.integers(0, 4)) if has_lanes else 0, draw(st.booleans())
    if is_tape:
        return replace(TAPE, lanes=lanes, sums_on_the_way=on_the_way)
    return Policy(
        has_windows=draw(st.booleans()),
        most_adds=draw(st.sampled_from([0, 1, 2, ANY_NUMBER])),
        keeps_own_apart=draw(st.booleans()),
        sums_on_the_way=on_the_way,
        lanes=lanes,
    )


@st.composite
def sizes_of_pieces(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Any that are `count` together."""
    sizes = list[int]()
    while sum(sizes) < count:
        sizes.append(draw(st.integers(1, count - sum(sizes))))
    return tuple(sizes)


@st.composite
def cases(draw: st.DrawFn, kind: str, most_ranks: int = 16) -> Case:
    """Any problem of a kind of pass, and who may run it. Tapes serve direct schedules of at least one row."""
    what = KINDS[kind]
    asked = draw(st.sampled_from(what.asks))
    algorithm = Algorithm.DIRECT
    if not (what.only_direct or asked.is_bulk):
        algorithm = draw(st.sampled_from(list(Algorithm)))
    is_tape = what.only_tapes or (algorithm is Algorithm.DIRECT and draw(st.booleans()))
    has_lanes = (is_tape and not asked.is_bulk) or (what.has_lanes_on_tensors and not is_tape)
    group_size = draw(st.integers(1, most_ranks))
    pieces = ()
    if what.may_be_in_pieces and algorithm is Algorithm.DIRECT and not asked.is_bulk and draw(st.booleans()):
        pieces = draw(sizes_of_pieces(group_size - 1))
    return Case(
        kind,
        replace(draw(policies(is_tape=is_tape, has_lanes=has_lanes)), pieces=pieces),
        asked,
        algorithm,
        group_size,
        1 if asked.is_bulk or pieces else draw(st.integers(1, 4)),
        draw(st.one_of(st.integers(int(is_tape), 2 * group_size), st.sampled_from([4 * group_size]))),
        draw(st.integers(1, 2)),
    )


def change(programs: list[Program], rank: int, ops: list) -> list[Program]:
    """The same with other ops on one rank."""
    return [*programs[:rank], replace(programs[rank], ops=tuple(ops)), *programs[rank + 1 :]]
