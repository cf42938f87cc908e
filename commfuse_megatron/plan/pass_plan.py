"""`PassPlan`: what was chosen for one pass of one linear, or for an attention with its projection, and why."""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.schedule import Algorithm


@dataclass(frozen=True, slots=True)
class PassPlan:
    """What was chosen for one pass of one linear.

    path: "sliced", "grouped", "bulk", "async" or "sequential" (see `PassConfig`); "query_split", "row_parallel" or
    "sequential" (see `AttentionConfig`); "overlapped" or "sequential" (see `UlyssesConfig`), or "stock": the caller's
    own, see `UlyssesProblem.beside`; or "local" (nothing to send: one rank, or such a pass). reason: one sentence, for
    the report. chunks_per_shard: of "overlapped", groups of heads. keep_gathered_input: see `WgradConfig`.
    predicted_us, measured_us: what the cost model said and what the trial found, where they were asked.
    backward_path: of an attention, the path of its backward pass, where that is another one. sums_on_the_way: what
    arrives is added up while the rest travels, see `Lowering.sum_own`. pieces: of "grouped", of how many other owners a
    GEMM takes the rows, in the order of a gather's arrivals (backwards in a reduce-scatter); empty: one, two, four ....
    """

    path: str
    reason: str = ""
    algorithm: Algorithm = Algorithm.DIRECT
    chunks_per_shard: int = 1
    keep_gathered_input: bool = False
    predicted_us: float | None = None
    measured_us: float | None = None
    backward_path: str | None = None
    sums_on_the_way: bool = False
    pieces: tuple[int, ...] = ()

    @property
    def is_scheduled(self) -> bool:
        """Whether a schedule is run (also the one without transfers), not the group's own collectives."""
        return self.path in ("sliced", "grouped", "bulk", "query_split", "overlapped", "local")

    @property
    def overlaps(self) -> bool:
        """Whether transfers run beside what is computed. A "row_parallel" attention leaves that to its projection."""
        return self.path in ("sliced", "grouped", "bulk", "async", "query_split", "overlapped")

    @property
    def name(self) -> str:
        """Short and unique among the candidates of one problem, such as "sliced m=2" or "sliced ring m=4"."""
        if self.path not in ("sliced", "query_split", "overlapped"):
            return self.path
        ring = " ring" if self.algorithm is Algorithm.RING else ""
        backward = "" if self.backward_path is None else f", {self.backward_path} backward"
        return f"{self.path}{ring} m={self.chunks_per_shard}{backward}"

    @property
    def details(self) -> str:
        """What the cost model settles of a candidate, such as "pieces of 1, 2 and 4, sums on the way"; often empty."""
        *first, last = map(str, self.pieces or ("",))
        pieces = f"pieces of {', '.join(first)} and {last}" if first else f"a piece of {last}" if last else ""
        return ", ".join(filter(None, (pieces, "sums on the way" if self.sums_on_the_way else "")))

    @property
    def candidate(self) -> "PassPlan":
        """The plan without what is settled, known and said of it."""
        blank = {"reason": "", "predicted_us": None, "measured_us": None, "sums_on_the_way": False, "pieces": ()}
        return dataclasses.replace(self, **blank)  # type: ignore[arg-type]

    @property
    def for_backward(self) -> "PassPlan":
        """The plan of the backward pass of an attention whose forward pass has this one."""
        if self.backward_path is None:
            return self
        return dataclasses.replace(self, path=self.backward_path, chunks_per_shard=1, backward_path=None)


class PassParts(NamedTuple):
    """What a pass of a linear, or of the embedding, consists of."""

    gathers: bool
    multiplies: bool
    scatters: bool
    has_weight_gradient: bool


def parts_of(problem: GemmProblem, plan: PassPlan) -> PassParts:
    """The parts of a pass under a plan; what an all-reduce scatters it gathers."""
    is_backward, gathers_forward = problem.pass_name == "backward", problem.op == "all_gather_linear"
    has_weight = is_backward and "weight" in problem.needs
    multiplies = not is_backward or "input" in problem.needs
    if problem.all_reduces:
        return PassParts(True, multiplies, True, has_weight)
    if gathers_forward != is_backward:
        return PassParts(True, multiplies, False, has_weight)
    return PassParts(has_weight and not plan.keep_gathered_input, multiplies, multiplies, has_weight)
