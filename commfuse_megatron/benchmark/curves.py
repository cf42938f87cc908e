"""What a GEMM, a message, a sum and a call cost on one machine, as curves through measured rows.

Every curve is a short sum of terms with factors that are not negative, fitted to relative errors, so that small sizes
count as much as large ones. The contract that bites: nothing is assumed; a curve without rows to fit does not exist.
"""

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from commfuse_megatron.benchmark.rows import Row
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import DTYPE_BYTES

__all__ = ["Curves", "GemmCurve", "HostCurve", "MessageCurve", "fit_curves", "fit_terms", "traffic_of_sum"]

# What one block of cuBLAS and of our kernel computes at large sizes; only the shape of the curve depends on it.
_TILE_M, _TILE_N = 128, 256
_SMS_OF_HOPPER = 132
_LEAST_OF_A_WAVE = 0.25


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """launch_us + waves of tiles x (per_wave_us + K x per_k_us). error: median relative error of the fit.

    gemm: "torch" or "persistent", whose last waves differ.
    """

    gemm: str
    launch_us: float
    per_wave_us: float
    per_k_us: float
    sms: int
    num_points: int
    error: float

    def us(self, M: float, N: float, K: float) -> float:
        """Time of one GEMM."""
        waves = _waves(self.gemm, M, N, self.sms)
        return self.launch_us + waves * (self.per_wave_us + K * self.per_k_us)


@dataclass(frozen=True, slots=True)
class MessageCurve:
    """latency_us + bytes / bandwidth, of one message to one rank beside one from another."""

    latency_us: float
    bandwidth_gb_s: float
    num_points: int
    error: float

    def us(self, size_bytes: float) -> float:
        """Time of one message."""
        return self.latency_us + size_bytes / self.bandwidth_gb_s / 1e3


@dataclass(frozen=True, slots=True)
class HostCurve:
    """call_us + slices x slice_us of host time: no operation is faster than its launches."""

    call_us: float
    slice_us: float
    num_points: int
    error: float

    def us(self, slices: int) -> float:
        """Host time of one call."""
        return self.call_us + slices * self.slice_us


@dataclass(frozen=True, slots=True)
class Curves:
    """One machine and one link. By the GEMM's name ("torch", "persistent") and by the transport's.

    collective: of the group's own collectives, per step of a ring. sum_us_per_byte: of the sum that ends a direct
    reduce-scatter; None: not measured, counted as free. left_out: transport -> why its rows give no curve.
    """

    device: str
    link: str
    gemms: dict[str, GemmCurve]
    messages: dict[str, MessageCurve]
    collective: MessageCurve
    hosts: dict[str, HostCurve]
    sum_us_per_byte: float | None
    left_out: dict[str, str] = field(default_factory=dict)


def fit_curves(rows: Sequence[Row], *, device: str, link: str, sms: int = _SMS_OF_HOPPER) -> Curves:
    """Curves through the forward rows of linears on one device and link.

    A transport whose rows give no curve is left out. Raises ConfigError, saying how to measure what is missing, where
    there is no GEMM, no collective or no transport.
    """
    here = (device, link, "fprop")
    chosen = [row for row in rows if (row.device, row.link, row.pass_name) == here and row.is_linear]
    gemms = {}
    for name in ("torch", "persistent"):
        points = list(_gemm_points(chosen, name))
        if points:
            gemms[name] = _fit_gemm(name, points, sms)
    if not gemms:
        raise _missing("no `compute_only` rows of linears", device, link)
    messages, left_out = {}, {}
    for backend in sorted({row.transport for row in chosen if _is_transfer(row)}):
        try:
            messages[backend] = _fit_messages([r for r in chosen if _is_transfer(r) and r.transport == backend])
        except ConfigError as error:
            left_out[backend] = str(error)
    collectives = [row for row in chosen if row.variant == "comm_only collective" and not row.emulated]
    if not collectives:
        raise _missing("no `comm_only collective` rows", device, link)
    if not messages:
        raise _missing("; ".join(left_out.values()) or "no `comm_only` rows of a transport", device, link)
    try:
        collective = _fit_messages(collectives)
    except ConfigError as error:
        raise _missing(str(error), device, link) from None
    hosts = {backend: curve for backend in messages if (curve := _fit_host(chosen, backend)) is not None}
    return Curves(device, link, gemms, messages, collective, hosts, _sum_us_per_byte(chosen), left_out)


def fit_terms(terms: Sequence[Sequence[float]], times_us: Sequence[float]) -> list[float]:
    """Factors, none negative, of a sum of terms that comes closest to the times, in relative error.

    Tries every subset of terms: there are at most three.
    """
    matrix = np.array(terms, dtype=float) / np.array(times_us, dtype=float)[:, None]
    ones = np.ones(len(times_us))
    best, best_error = [0.0] * matrix.shape[1], math.inf
    for size in range(1, matrix.shape[1] + 1):
        for subset in itertools.combinations(range(matrix.shape[1]), size):
            columns = matrix[:, subset]
            factors, *_ = np.linalg.lstsq(columns, ones, rcond=None)
            error = float(np.sum((columns @ factors - ones) ** 2))
            if (factors >= 0).all() and error < best_error * (1 - 1e-9):
                best = [0.0] * matrix.shape[1]
                for index, factor in zip(subset, factors.tolist(), strict=True):
                    best[index] = factor
                best_error = error
    return best


def _missing(what: str, device: str, link: str) -> ConfigError:
    """The error that says what the rows lack, and how to measure rows that do not."""
    slow = "NCCL_P2P_DISABLE=1 " if link == "host" else ""
    return ConfigError(
        f"{what} ({device}, link {link}, forward pass). This measures all that is needed, whatever its --variants:\n"
        f"  {slow}torchrun --nproc-per-node 2 -m commfuse_megatron bench --device cuda --passes fprop"
        " --tokens 1024 2048 8192 --json FILE"
    )


def traffic_of_sum(row_bytes: float, rows: float, group_size: int) -> float:
    """Bytes that a direct reduce-scatter's final sum moves: arrived partials and the own one in, the result out."""
    return (group_size + 1) * rows * row_bytes


def _waves(gemm: str, M: float, N: float, sms: int) -> float:
    """In waves of large tiles.

    What cuBLAS takes for 0.3 to 2.2 of them is that part of a wave's time (slices of two and four ranks on H200),
    presumably by smaller tiles and by cutting K; for 0.18 it was 0.28. Our kernel has tiles of half the size, and its
    last wave is a whole one (the same shapes).
    """
    if gemm == "persistent":
        return math.ceil(math.ceil(M / _TILE_M) * math.ceil(2 * N / _TILE_N) / sms) / 2
    return max(_LEAST_OF_A_WAVE, math.ceil(M / _TILE_M) * math.ceil(N / _TILE_N) / sms)


def _gemm_points(rows: Iterable[Row], gemm: str) -> Iterable[tuple[float, float, float, float]]:
    """(M, N, K, us) of un-split GEMMs, and of the slices of split ones."""
    compute = "compute_only" if gemm == "torch" else f"compute_only {gemm}"
    for row in rows:
        if row.variant == compute:
            yield row.M, row.N, row.K, row.median_ms * 1e3
        elif row.path == "slices" and row.variant.endswith(f" {gemm}"):
            assert row.chunks_per_shard is not None
            slices = row.group_size * row.chunks_per_shard
            yield row.M / slices, row.N, row.K, row.median_ms * 1e3 / slices


def _fit_gemm(gemm: str, points: Sequence[tuple[float, float, float, float]], sms: int) -> GemmCurve:
    terms = [(1.0, waves := _waves(gemm, M, N, sms), waves * K) for M, N, K, _ in points]
    times_us = [us for *_, us in points]
    launch_us, per_wave_us, per_k_us = fit_terms(terms, times_us)
    curve = GemmCurve(gemm, launch_us, per_wave_us, per_k_us, sms, len(points), 0.0)
    errors = [abs(curve.us(M, N, K) / us - 1) for M, N, K, us in points]
    return GemmCurve(gemm, launch_us, per_wave_us, per_k_us, sms, len(points), statistics.median(errors))


def _is_transfer(row: Row) -> bool:
    return row.path == "transfers" and row.variant != "comm_only collective"


def _shard_bytes(row: Row) -> float:
    features = row.K if row.op == "all_gather_linear" else row.N
    return row.M / row.group_size * features * DTYPE_BYTES[row.dtype]


def _fit_messages(rows: Sequence[Row]) -> MessageCurve:
    points = [(_shard_bytes(row), row.median_ms * 1e3 / (row.group_size - 1)) for row in rows]
    latency_us, per_byte_us = fit_terms([(1.0, size) for size, _ in points], [us for _, us in points])
    if per_byte_us <= 0 or len({size for size, _ in points}) < 2:
        raise ConfigError(
            f"{len(rows)} `{rows[0].variant}` rows do not show a bandwidth: messages of other sizes are needed"
        )
    errors = [abs((latency_us + size * per_byte_us) / us - 1) for size, us in points]
    return MessageCurve(latency_us, 1e-3 / per_byte_us, len(points), statistics.median(errors))


def _fit_host(rows: Sequence[Row], backend: str) -> HostCurve | None:
    points = [
        (row.group_size * row.chunks_per_shard, row.host_us)
        for row in rows
        if row.path == "sliced" and row.transport == backend and row.host_us and row.chunks_per_shard
    ]
    if len({slices for slices, _ in points}) < 2:
        return None
    call_us, slice_us = fit_terms([(1.0, float(slices)) for slices, _ in points], [us for _, us in points])
    errors = [abs((call_us + slices * slice_us) / us - 1) for slices, us in points]
    return HostCurve(call_us, slice_us, len(points), statistics.median(errors))


def _sum_us_per_byte(rows: Sequence[Row]) -> float | None:
    """From the tails of direct reduce-scatters that end in a sum and whose transfers were over by then."""
    ratios = []
    for row in rows:
        ends_in_sum = row.op == "linear_reduce_scatter" and (row.algorithm, row.chunks_per_shard) == ("direct", 1)
        if ends_in_sum and row.tail_ms is not None and row.comm_only_ms < row.compute_only_ms / 2 and not row.emulated:
            traffic = traffic_of_sum(row.N * DTYPE_BYTES[row.dtype], row.M / row.group_size, row.group_size)
            ratios.append(row.tail_ms * 1e3 / traffic)
    return statistics.median(ratios) if ratios else None
