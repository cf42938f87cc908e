"""Times of groups and links that nobody has at hand, from schedules that are dry-run with measured costs.

What is modelled: every slice's GEMM and every message, in the order of the schedule (`schedule.simulate`); SMs that
NCCL holds while it sends; the sum that ends a direct reduce-scatter; the host time of all launches. What is not:
links that several ranks share, other slowdowns that a transfer and a GEMM inflict on each other, slow ranks.
"""

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from commfuse_megatron.benchmark.cases import LinearCase, linear_case
from commfuse_megatron.benchmark.curves import Curves, traffic_of_sum
from commfuse_megatron.benchmark.rows import Row
from commfuse_megatron.problem import DTYPE_BYTES
from commfuse_megatron.schedule import Algorithm, Schedule, build_all_gather, build_reduce_scatter, simulate
from commfuse_megatron.transport.select import DIRECT, THROUGH_HOST_MEMORY

__all__ = [
    "DTYPE",
    "LIMITS",
    "WAYS",
    "Deviation",
    "Prediction",
    "cases_of",
    "deviations",
    "key_of_way",
    "median_error",
    "name_of_way",
    "predict",
    "predict_way",
    "predicted_ms",
    "rows_of_ways",
]

#: (algorithm, chunks per shard) of the sliced paths that are predicted.
WAYS = ((Algorithm.DIRECT, 1), (Algorithm.DIRECT, 2), (Algorithm.DIRECT, 4), (Algorithm.RING, 2))

#: What decides a predicted time, and what that means.
LIMITS = {
    "GEMMs": "those of the slices, which take longer than one un-split GEMM; the transfers are hidden under them",
    "transfers": "what the GEMMs do not hide of them",
    "launches": "the host, which cannot launch so many slices any faster",
    "nothing hidden": "the sequential program is the fastest: collective, then GEMM",
}

#: Of all that is predicted.
DTYPE = "bfloat16"
# Which GEMM our slices run beside a transport.
_GEMM_OF_TRANSPORT = {"nccl": "persistent", "copy_engine": "torch"}


@dataclass(frozen=True, slots=True)
class Prediction:
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
        return {"predicted": True, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Deviation:
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

    def as_json(self) -> dict[str, object]:
        """For the file."""
        return {**asdict(self), "error": self.error}


def predict(case: LinearCase, curves: Curves) -> list[Prediction]:
    """The sequential program and all `WAYS` over every transport, the fastest first."""
    compute_us = min(gemm.us(case.M, case.N, case.K) for gemm in curves.gemms.values())
    sequential_us = _sequential_us(case, curves)
    found = [("sequential", "nccl", sequential_us, "nothing hidden")]
    for transport in curves.messages:
        for algorithm, chunks in WAYS:
            us, limit = predict_way(case, curves, transport, algorithm, chunks)
            found.append((_sliced(algorithm, chunks, transport), transport, us, limit))
    # As rows define it: the best there is, the collective included.
    transfers = (*curves.messages.values(), curves.collective)
    comm_us = min((case.group_size - 1) * curve.us(_shard_bytes(case)) for curve in transfers)
    return [
        Prediction(
            case=case.name,
            op=case.op,
            M=case.M,
            N=case.N,
            K=case.K,
            group_size=case.group_size,
            link=curves.link,
            variant=variant,
            transport=transport,
            ms=us / 1e3,
            compute_ms=compute_us / 1e3,
            comm_ms=comm_us / 1e3,
            sequential_ms=sequential_us / 1e3,
            limit=limit,
        )
        for variant, transport, us, limit in sorted(found, key=lambda entry: entry[2])
    ]


def predict_way(
    case: LinearCase, curves: Curves, transport: str, algorithm: Algorithm, chunks_per_shard: int
) -> tuple[float, str]:
    """(microseconds, what decides them) of one sliced way."""
    slices = case.group_size * chunks_per_shard
    gemm = curves.gemms.get(_GEMM_OF_TRANSPORT.get(transport, "torch")) or next(iter(curves.gemms.values()))
    message_us = curves.messages[transport].us(_shard_bytes(case) / chunks_per_shard)
    gemm_us = gemm.us(case.M / slices, case.N, case.K)
    slice_us = gemm_us
    if transport == "nccl":  # its kernel holds SMs for as long as it runs
        settings = THROUGH_HOST_MEMORY if curves.link == "host" else DIRECT
        taken = settings.channels * settings.lanes / gemm.sms
        slice_us += taken * min(message_us, gemm_us / (1 - taken))
    schedule = _schedule(case.gathers, algorithm, case.group_size, chunks_per_shard)
    simulation = simulate(
        schedule,
        compute_us_per_chunk=slice_us,
        transfer_us_per_chunk=message_us,
        adds_in_epilogue=algorithm is Algorithm.RING and not case.gathers and chunks_per_shard > 1,
    )
    us = simulation.total_us + _sum_us(case, curves, transport, algorithm, chunks_per_shard)
    host = curves.hosts.get(transport)
    if host is not None and host.us(slices) > us:
        return host.us(slices), "launches"
    is_hidden = simulation.exposed_comm_us <= 0.01 * simulation.total_us
    return us, "GEMMs" if is_hidden else "transfers"


def deviations(rows: Iterable[Row], curves: Curves) -> list[Deviation]:
    """Every measured forward row of a sliced way and of the sequential program, beside its prediction."""
    return [
        Deviation(row.case, row.M, row.group_size, row.emulated, name_of_way(row), row.median_ms, ms)
        for row in rows_of_ways(rows, curves)
        if (ms := predicted_ms(row, curves)) is not None
    ]


def rows_of_ways(rows: Iterable[Row], curves: Curves) -> list[Row]:
    """The forward rows of linears, of the curves' device and link, without those of a user's configuration.

    What the planner took counts as that way where it was not measured by itself too.
    """
    here = (curves.device, curves.link, "fprop")
    chosen = [row for row in rows if (row.device, row.link, row.pass_name) == here and row.is_linear]
    forced = {(key_of_way(row), row.emulated) for row in chosen if row.variant == name_of_way(row)}
    return [
        row
        for row in chosen
        if row.variant == name_of_way(row)
        or (row.variant == "planned" and (key_of_way(row), row.emulated) not in forced)
    ]


def predicted_ms(row: Row, curves: Curves) -> float | None:
    """What the curves say of a row of `rows_of_ways`; None of what they do not tell."""
    case = LinearCase(row.case, row.op, row.M, row.N, row.K, row.group_size)
    if row.variant == "sequential" and not row.emulated:
        return _sequential_us(case, curves) / 1e3
    if row.path == "sliced" and row.transport in curves.messages and row.chunks_per_shard:
        us, _ = predict_way(case, curves, row.transport, Algorithm(row.algorithm), row.chunks_per_shard)
        return us / 1e3
    return None


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


def median_error(found: Sequence[Deviation]) -> float:
    """Of the sizes of the errors."""
    return statistics.median(abs(deviation.error) for deviation in found)


def cases_of(names: Iterable[str], tokens: Iterable[int], ranks: Iterable[int]) -> list[LinearCase]:
    """All that the sizes allow."""
    return [linear_case(name, M, group_size) for group_size in ranks for M in tokens for name in names]


@functools.lru_cache(maxsize=64)
def _schedule(gathers: bool, algorithm: Algorithm, group_size: int, chunks_per_shard: int) -> Schedule:
    build = build_all_gather if gathers else build_reduce_scatter
    return build(group_size, algorithm, chunks_per_shard)


def _shard_bytes(case: LinearCase) -> float:
    rows, features = case.shard_shape
    return rows * features * DTYPE_BYTES[DTYPE]


def _sequential_us(case: LinearCase, curves: Curves) -> float:
    gemm = curves.gemms.get("torch") or next(iter(curves.gemms.values()))
    return gemm.us(case.M, case.N, case.K) + (case.group_size - 1) * curves.collective.us(_shard_bytes(case))


def _sum_us(case: LinearCase, curves: Curves, transport: str, algorithm: Algorithm, chunks_per_shard: int) -> float:
    """The sum at the end of a direct reduce-scatter; over the copy engine, more chunks fold it into the own GEMMs."""
    is_folded = transport == "copy_engine" and chunks_per_shard > 1
    if case.gathers or algorithm is Algorithm.RING or is_folded or curves.sum_us_per_byte is None:
        return 0.0
    rows, features = case.shard_shape
    return curves.sum_us_per_byte * traffic_of_sum(features * DTYPE_BYTES[DTYPE], rows, case.group_size)
