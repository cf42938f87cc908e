"""Times of groups and links that nobody has at hand, as the planner predicts them from measured rows.

What is modelled: `plan.cost_model`. What is not: links that several ranks share, slowdowns that a transfer and a GEMM
inflict on each other beyond the SMs that NCCL holds, slow ranks.
"""

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.plan.candidates import list_candidates
from commfuse_megatron.plan.cost_model import PassCosts, choose_details, is_link_slow, predict_us, simulate_plan
from commfuse_megatron.plan.machine import MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.bench.rows import Row
from commfuse_megatron.tools.common.cases import Case, linear_case
from commfuse_megatron.tools.simulate.fit import DTYPE, SEQUENTIAL, Machines, way_of

#: What decides a predicted time, and what that means.
LIMITS = {
    "GEMMs": "those of the slices, which take longer than one un-split GEMM; the transfers are hidden under them",
    "transfers": "what the GEMMs do not hide of them",
    "launches": "the host, which cannot launch so many slices any faster",
    "nothing hidden": "the sequential program is the fastest: collective, then GEMM",
}


class Prediction(NamedTuple):
    """One forward pass of one case over `group_size` ranks, one way. limit: the key in `LIMITS` of what decides."""

    case: str
    op: str
    M: int
    N: int
    K: int
    group_size: int
    link: str
    variant: str
    transport: str
    ms: float
    compute_ms: float
    comm_ms: float
    sequential_ms: float
    limit: str

    def as_json(self) -> dict[str, object]:
        """For the file; `predicted` tells it from a measured row."""
        return {"predicted": True, **self._asdict()}


class Deviation(NamedTuple):
    """A measured row beside its prediction; `error` is predicted / measured - 1."""

    case: str
    M: int
    group_size: int
    emulated: bool
    variant: str
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Relative, positive where the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1


class Comparison(NamedTuple):
    """One measured row of a group of `group_size` ranks; None where it was not emulated or cannot be predicted."""

    case: str
    M: int
    group_size: int
    variant: str
    measured_ms: float
    emulated_ms: float | None
    predicted_ms: float | None

    @property
    def emulation_error(self) -> float | None:
        """emulated / measured - 1."""
        return None if self.emulated_ms is None else self.emulated_ms / self.measured_ms - 1

    @property
    def prediction_error(self) -> float | None:
        """predicted / measured - 1."""
        return None if self.predicted_ms is None else self.predicted_ms / self.measured_ms - 1


def predict(case: Case, machines: Machines) -> list[Prediction]:
    """The sequential program and all that the planner would consider over every transport, the fastest first."""
    problem = case.problem("fprop", DTYPE)
    sequential_us = predict_us(problem, SEQUENTIAL, machines.any)
    found = [("sequential", "nccl", sequential_us, "nothing hidden")]
    for transport, machine in machines.by_transport.items():
        for plan in candidates_on(problem, machine):
            if plan.path == "sliced":
                simulation, host_us = simulate_plan(problem, plan, machine)
                is_hidden = simulation.exposed_comm_us <= 0.01 * simulation.total_us
                us, limit = simulation.total_us, "GEMMs" if is_hidden else "transfers"
                if host_us > us:
                    us, limit = host_us, "launches"
                found.append((_sliced(plan.algorithm, plan.chunks_per_shard, transport), transport, us, limit))
    # As rows define it: the best there is, the collective included.
    all_bytes = (problem.group_size - 1) * problem.shard_bytes
    comm_us = min(
        machines.any.collective.time_us(all_bytes),
        *((problem.group_size - 1) * m.link.time_us(problem.shard_bytes) for m in machines.by_transport.values()),
    )
    return [
        Prediction(
            **case.sizes,
            link=machines.link,
            variant=variant,
            transport=transport,
            ms=us / 1e3,
            compute_ms=PassCosts(problem, machines.any).product_us(problem.M) / 1e3,
            comm_ms=comm_us / 1e3,
            sequential_ms=sequential_us / 1e3,
            limit=limit,
        )
        for variant, transport, us, limit in sorted(found, key=lambda entry: entry[2])
    ]


def candidates_on(problem: GemmProblem, machine: MachineModel) -> tuple[PassPlan, ...]:
    """All plans that the planner would consider there, unless configured."""
    slow, with_rings = is_link_slow(problem, machine), not machine.traits.replays
    plans = list_candidates(problem, OverlapConfig(), is_link_slow=slow, with_rings=with_rings).plans
    return tuple(choose_details(problem, plan, machine) for plan in plans)


def deviations(rows: Iterable[Row], machines: Machines) -> list[Deviation]:
    """Every measured forward row of a sliced way and of the sequential program, beside its prediction."""
    return [
        Deviation(row.case, row.M, row.group_size, row.emulated, name_of_way(row), row.median_ms, ms)
        for row in rows_of_ways(rows, machines)
        if (ms := predicted_ms(row, machines)) is not None
    ]


def rows_of_ways(rows: Iterable[Row], machines: Machines) -> list[Row]:
    """The forward rows of linears, of the machines' device and link, without those of a user's configuration.

    What the planner took counts as that way where it was not measured by itself too.
    """
    here = (machines.device, machines.link, "fprop")
    chosen = [
        row for row in rows if (row.device, row.link, row.pass_name) == here and row.is_linear and not row.all_reduces
    ]
    forced = {(key_of_way(row), row.emulated) for row in chosen if row.variant == name_of_way(row)}
    return [
        row
        for row in chosen
        if row.variant == name_of_way(row)
        or (row.variant == "planned" and (key_of_way(row), row.emulated) not in forced)
    ]


def predicted_ms(row: Row, machines: Machines) -> float | None:
    """What the model says of a row of `rows_of_ways`; None of what it does not tell."""
    way = way_of(row)
    if way is None or (row.emulated and way[1] is SEQUENTIAL):
        return None
    machine = machines.any if way[1] is SEQUENTIAL else machines.by_transport.get(row.transport)
    return None if machine is None else predict_us(*way, machine) / 1e3


def key_of_way(row: Row) -> tuple[object, ...]:
    """What was run, and at which size, without who chose it and whether the group was emulated."""
    return row.case, row.M, row.N, row.K, row.group_size, name_of_way(row)


def name_of_way(row: Row) -> str:
    """The variant that forces what `row` ran, where it was sliced; else its own."""
    return _sliced(row.algorithm, row.chunks_per_shard, row.transport) if row.path == "sliced" else row.variant


def _sliced(algorithm: str, chunks_per_shard: int | None, transport: str) -> str:
    """As the benchmark names its variants."""
    ring = " ring" if algorithm == Algorithm.RING else ""
    return f"sliced{ring} m={chunks_per_shard} {transport}"


def compare(
    measured: Iterable[Row], rows: Iterable[Row], machines: Machines, left_out: Collection[str] = ()
) -> list[Comparison]:
    """Every measured forward row that was emulated among `rows` or can be predicted from `machines`, by its way.

    Only rows of the machines' device and link count: between machines nothing is compared. left_out: cases that are not
    wanted.
    """
    real = [row for row in measured if not row.emulated and row.case not in left_out]
    emulated = {key_of_way(row): row.median_ms for row in rows_of_ways(rows, machines) if row.emulated}
    comparisons = [
        Comparison(
            row.case,
            row.M,
            row.group_size,
            name_of_way(row),
            row.median_ms,
            emulated.get(key_of_way(row)),
            predicted_ms(row, machines),
        )
        for row in rows_of_ways(real, machines)
    ]
    return [entry for entry in comparisons if entry.emulated_ms is not None or entry.predicted_ms is not None]


def median_size(errors: Iterable[float]) -> str:
    """Of the sizes of the errors."""
    return f"{100 * statistics.median(map(abs, errors)):.1f} %"


def say_errors(what: str, errors: Sequence[float]) -> str:
    """How wrong something is."""
    largest = 100 * max(map(abs, errors))
    return f"median size of the error of {what}: {median_size(errors)}; the largest: {largest:.1f} %"


def cases_of(names: Iterable[str], tokens: Iterable[int], ranks: Iterable[int]) -> list[Case]:
    """All that the sizes allow."""
    return [linear_case(name, M, group_size) for group_size in ranks for M in tokens for name in names]
