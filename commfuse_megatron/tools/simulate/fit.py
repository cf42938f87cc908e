"""The planner's model of a machine, filled from measured rows: the rate of GEMMs, messages, collectives, memory.

As little is fitted as there can be: one rate for all GEMMs, a latency and a bandwidth for what moves, a factor for host
times. What the rows do not hold is assumed, as by the planner (`plan.machine`), and `assumed` says what that is.
"""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.cost_model import predict_parts_us
from commfuse_megatron.plan.machine import Channel, GemmRate, MachineModel, Traits, assumed_machine
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import DTYPE_BYTES, GemmProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.bench.rows import Row, load_report
from commfuse_megatron.tools.common.cases import Case
from commfuse_megatron.transport.select import DIRECT, THROUGH_HOST_MEMORY

#: Of all that is fitted and predicted.
DTYPE = "bfloat16"

#: The sequential program.
SEQUENTIAL = PassPlan("sequential", "", Algorithm.DIRECT, 1, keep_gathered_input=False)

_SMS_OF_HOPPER = 132
# NCCL's transfers take up to 20 of them.
_FEWEST_SMS = 40

type _Points = Sequence[tuple[float, float]]  # (bytes, us)


@dataclass(frozen=True, slots=True)
class Fit:
    """How well a part of the model goes through its rows: the median size of its relative errors."""

    num_rows: int
    error: float


@dataclass(frozen=True, slots=True)
class Machines:
    """One machine and one link, by the transport's name.

    fits: by what was fitted. assumed: what the rows do not tell. left_out: transport -> why its rows give no model.
    """

    device: str
    link: str
    by_transport: dict[str, MachineModel]
    fits: dict[str, Fit]
    assumed: list[str]
    left_out: dict[str, str] = field(default_factory=dict)

    @property
    def any(self) -> MachineModel:
        """One of them, for what they share: GEMMs and collectives."""
        return next(iter(self.by_transport.values()))


def fit_machines(rows: Sequence[Row], *, device: str, link: str, sms: int = _SMS_OF_HOPPER) -> Machines:
    """The models that go through the forward rows of linears on one device and link.

    A transport whose rows give no bandwidth is left out. Raises ConfigError, saying how to measure what is missing,
    where there is no GEMM, no collective or no transport.
    """
    here = (device, link, "fprop")
    chosen = [
        row for row in rows if (row.device, row.link, row.pass_name) == here and row.is_linear and not row.all_reduces
    ]
    fits: dict[str, Fit] = {}
    memory_gb_s = _memory_gb_s(chosen)
    rate = _fit_gemms(chosen, sms, memory_gb_s, fits)
    if rate is None:
        raise _missing("no `compute_only` rows of linears", device, link)
    collectives = [row for row in chosen if row.variant == "comm_only collective" and not row.emulated]
    if not collectives:
        raise _missing("no `comm_only collective` rows", device, link)
    transfers = [row for row in chosen if row.path == "transfers" and row.variant != "comm_only collective"]
    models, left_out = {}, {}
    for backend in sorted({row.transport for row in transfers}):
        try:
            models[backend] = _fit_messages([row for row in transfers if row.transport == backend], fits)
        except ConfigError as error:
            left_out[backend] = str(error)
    if not models:
        raise _missing("; ".join(left_out.values()) or "no `comm_only` rows of a transport", device, link)
    try:
        collective = _fit_messages(collectives, fits, is_whole=True)
    except ConfigError as error:
        raise _missing(str(error), device, link) from None
    told = [] if memory_gb_s is not None else [f"memory at {rate.memory_gb_s:.0f} GB/s (tails of final sums)"]
    machines = {}
    for backend, channel in models.items():
        traits = _traits(backend, link, sms)
        assumed = assumed_machine(traits, DTYPE, is_link_slow=link == "host")
        machine = dataclasses.replace(assumed, gemm=rate, link=channel, collective=collective, source="measured")
        machines[backend] = _with_host(machine, chosen, fits, told)
    return Machines(device, link, machines, fits, told, left_out)


def read_machines(path: Path, link: str | None) -> tuple[Machines, list[Row]]:
    """The models for `link`, and the measured rows that they can be checked with."""
    header, rows = load_report(path)
    rows = [row for row in rows if row.is_comparable]
    if not rows:
        raise ConfigError(f"{path} has no rows from GPUs: times from a CPU predict nothing")
    require_dtype(rows, path)
    bandwidth_gb_s = bandwidth_of(link)
    measured_links = sorted({row.link for row in rows}, reverse=True)
    base = measured_links[0] if link is None or bandwidth_gb_s is not None else link
    if base not in measured_links:
        raise ConfigError(f"--link {link}: {path} has rows of {', '.join(measured_links)} only; measure that link too")
    device = next(row.device for row in rows if row.link == base)
    sms = header.get("multiprocessors", 132)
    if not isinstance(sms, int) or sms < _FEWEST_SMS:
        raise ConfigError(f"{path} is of a GPU with {sms} SMs: what is predicted from takes {_FEWEST_SMS} and more")
    machines = fit_machines(rows, device=device, link=base, sms=sms)
    if bandwidth_gb_s is None:
        return machines, rows
    nccl = machines.by_transport.get("nccl")
    if nccl is None:
        why = machines.left_out.get("nccl", "it has no rows of it")
        raise ConfigError(f"--link {link}: nccl serves such links, and {path} gives no model for it: {why}")
    # GEMMs and latencies as measured; only the link is another. No measured row can check that.
    slow = dataclasses.replace(
        nccl,
        link=dataclasses.replace(nccl.link, bandwidth_gb_s=bandwidth_gb_s),
        collective=dataclasses.replace(nccl.collective, bandwidth_gb_s=bandwidth_gb_s),
    )
    return dataclasses.replace(machines, link=f"{bandwidth_gb_s:g} GB/s", by_transport={"nccl": slow}), rows


def require_dtype(rows: Iterable[Row], path: Path | str) -> None:
    """Raise ConfigError for rows of another dtype than what is predicted."""
    others = sorted({row.dtype for row in rows} - {DTYPE})
    if others:
        raise ConfigError(f"{path} has rows of {', '.join(others)}: what is predicted is {DTYPE}")


def bandwidth_of(link: str | None) -> float | None:
    """In GB/s, where `--link` is one. Raises ConfigError for what is neither that nor a link's name."""
    if link in (None, "nvlink", "host"):
        return None
    with suppress(ValueError):
        bandwidth_gb_s = float(link or "")
        if 0 < bandwidth_gb_s < float("inf"):
            return bandwidth_gb_s
    raise ConfigError(f"--link {link}: write nvlink, host or a positive number of GB/s")


def way_of(row: Row) -> tuple[GemmProblem, PassPlan] | None:
    """The problem and the plan of a row of ours that is sequential or sliced; else None."""
    plan = SEQUENTIAL
    if row.path == "sliced" and row.chunks_per_shard:
        plan = PassPlan("sliced", "", Algorithm(row.algorithm), row.chunks_per_shard, keep_gathered_input=False)
    elif row.variant != "sequential":
        return None
    case = Case(row.case, row.op, row.M, row.N, row.K, row.group_size)
    return case.problem(row.pass_name, DTYPE), plan


def fit_channel_to(points: _Points) -> Channel | None:
    """Latency and bandwidth, neither negative, that come closest to (bytes, us), in relative error; None without a
    bandwidth."""
    sizes, times_us = np.array(points, dtype=float).T
    if len(set(sizes)) < 2:
        return None
    terms = np.stack([np.ones_like(sizes), sizes], axis=1) / times_us[:, None]
    (latency_us, us_per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(times_us), rcond=None)
    if latency_us < 0:
        latency_us, us_per_byte = 0.0, float(np.sum(terms[:, 1]) / np.sum(terms[:, 1] ** 2))
    if us_per_byte <= 0:
        return None
    return Channel(latency_us=float(latency_us), bandwidth_gb_s=1e-3 / float(us_per_byte))


def _missing(what: str, device: str, link: str) -> ConfigError:
    """The error that says what the rows lack, and how to measure rows that do not."""
    slow = "NCCL_P2P_DISABLE=1 " if link == "host" else ""
    return ConfigError(
        f"{what} ({device}, link {link}, forward pass). This measures all that is needed, whatever its --variants:\n"
        f"  {slow}torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --passes fprop"
        " --tokens 1024 2048 8192 --json FILE"
    )


def _traits(backend: str, link: str, sms: int) -> Traits:
    if backend == "copy_engine":
        return Traits(transport=backend, num_sms=sms, adds_in_epilogue=True, replays=True)
    settings = THROUGH_HOST_MEMORY if link == "host" else DIRECT
    transfer_sms = settings.channels * settings.communicators
    return Traits(transport=backend, num_sms=sms, transfer_sms=transfer_sms, regains_sms=settings.regains_sms)


def _fit_gemms(rows: Iterable[Row], sms: int, memory_gb_s: float | None, fits: dict[str, Fit]) -> GemmRate | None:
    """The rate that is right for the median of un-split GEMMs of cuBLAS, and of its slices."""
    points = []  # (M, N, K, us) of one GEMM
    for row in rows:
        if row.variant == "compute_only":
            points.append((row.M, row.N, row.K, row.median_ms * 1e3))
        elif row.path == "slices" and row.variant.endswith(" torch"):
            assert row.chunks_per_shard is not None
            slices = row.group_size * row.chunks_per_shard
            points.append((row.M // slices, row.N, row.K, row.median_ms * 1e3 / slices))
    if not points:
        return None
    rate = assumed_machine(Traits(transport="", num_sms=sms), DTYPE).gemm
    if memory_gb_s is not None:
        rate = dataclasses.replace(rate, memory_gb_s=memory_gb_s)
    for _ in range(5):  # launches do not scale with it
        ratio = statistics.median(rate.time_us(M, N, K, 2) / us for M, N, K, us in points)
        rate = dataclasses.replace(rate, tflops=rate.tflops * ratio)
    fits["GEMMs"] = _judge((rate.time_us(M, N, K, 2), us) for M, N, K, us in points)
    return rate


def _fit_messages(rows: Sequence[Row], fits: dict[str, Fit], *, is_whole: bool = False) -> Channel:
    """Of one message to each other rank; is_whole: of all that a rank receives, as one."""
    points = []
    for row in rows:
        others = row.group_size - 1
        features = row.K if row.op == "all_gather_linear" else row.N
        size_bytes, us = row.M / row.group_size * features * DTYPE_BYTES[row.dtype], row.median_ms * 1e3
        points.append((others * size_bytes, us) if is_whole else (size_bytes, us / others))
    channel = fit_channel_to(points)
    if channel is None:
        raise ConfigError(
            f"{len(rows)} `{rows[0].variant}` rows do not show a bandwidth: messages of other sizes are needed"
        )
    fits["the group's collectives" if is_whole else f"messages, {rows[0].transport}"] = _judge(
        (channel.time_us(size_bytes), us) for size_bytes, us in points
    )
    return channel


def _with_host(machine: MachineModel, rows: Iterable[Row], fits: dict[str, Fit], told: list[str]) -> MachineModel:
    """With host times of its direct sliced calls that are right for the median of them."""
    name, transport = "replay" if machine.traits.replays else "host", machine.traits.transport
    points = []
    for row in rows:
        way = way_of(row)
        if (
            way is not None
            and row.host_us
            and (row.path, row.transport, row.algorithm) == ("sliced", transport, "direct")
        ):
            points.append((predict_parts_us(*way, machine)[1], row.host_us))
    if not points:
        told.append(f"host time of calls, {transport}")
        return machine
    factor = statistics.median(measured / predicted for predicted, measured in points)
    fits[f"host, {transport}"] = _judge((factor * predicted, measured) for predicted, measured in points)
    return dataclasses.replace(machine, **{name: getattr(machine, name).scaled(factor)})


def _judge(pairs: Iterable[tuple[float, float]]) -> Fit:
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs]
    return Fit(len(errors), statistics.median(errors))


def _memory_gb_s(rows: Sequence[Row]) -> float | None:
    """From the tails of direct reduce-scatters that end in a sum and whose transfers were over by then."""
    rates = []
    for row in rows:
        ends_in_sum = row.op == "linear_reduce_scatter" and (row.algorithm, row.chunks_per_shard) == ("direct", 1)
        if ends_in_sum and row.tail_ms and row.comm_only_ms < row.compute_only_ms / 2 and not row.emulated:
            # The own partial and those that arrived, and the result.
            passes_bytes = (row.group_size + 1) * row.M / row.group_size * row.N * DTYPE_BYTES[row.dtype]
            rates.append(passes_bytes / (row.tail_ms * 1e6))
    return statistics.median(rates) if rates else None
