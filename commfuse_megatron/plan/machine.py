"""What a machine can do, in the few numbers that the cost model needs: measured on it, or assumed.

Assumed numbers are those of 2 x H200 or H100, November 2026, where no other source is named. Times are in
microseconds, sizes in bytes.
"""

from dataclasses import dataclass, fields

from commfuse_megatron.kernels.tiles import TILES, choose_tile

# From the end of one kernel of a stream to the start of the next: 2.2 to 2.4 in what fits 72 to 80 GEMMs of all sizes
# (2 x H200, November 2026).
_LAUNCH_US = 2.3
# Starting and ending a tile takes as long as so much of K: 0.4 to 1.0 us of 0.011 per K (the same fits).
_K_OF_A_TILES_ENDS = 64
# What cuBLAS takes for 0.3 to 2.2 waves of the largest tiles is that part of a wave's time (slices of two and four
# ranks on H200), presumably by smaller tiles and by cutting K; for 0.18 it was 0.28.
_LEAST_OF_A_WAVE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """Something that moves bytes: a fixed time for each message, then a bandwidth."""

    latency_us: float
    bandwidth_gb_s: float

    def time_us(self, size_bytes: float) -> float:
        """Time of one message."""
        return self.latency_us + size_bytes / (self.bandwidth_gb_s * 1e3) if size_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate:
    """GEMMs by cuBLAS: waves of tiles at `tflops`, the last one in part; or by our persistent kernel, on all SMs or
    some, whose last wave is a whole one. No faster than their operands can be read."""

    tflops: float
    memory_gb_s: float
    num_sms: int = 132
    launch_us: float = _LAUNCH_US

    def time_us(self, M: int, N: int, K: int, itemsize: int, idle_sms: int | None = None) -> float:
        """Time of [M, K] @ [K, N]; 0 if it is empty. idle_sms: by our kernel, on all SMs but so many."""
        if not M * N * K:
            return 0.0
        if idle_sms is None:
            areas = (tile.count(M, N) / self.num_sms * tile.block_m * tile.block_n / tile.speed for tile in TILES)
            area = max(min(areas), _LEAST_OF_A_WAVE * TILES[0].block_m * TILES[0].block_n)
        else:
            sms = max(1, self.num_sms - idle_sms)
            tile = choose_tile(M, N, sms)
            area = -(-tile.count(M, N) // sms) * tile.block_m * tile.block_n / tile.speed
        waves_us = 2.0 * area * (K + _K_OF_A_TILES_ENDS) * self.num_sms / (self.tflops * 1e6)
        return self.launch_us + max(waves_us, self.pass_us((M * K + N * K + M * N) * itemsize))

    def pass_us(self, size_bytes: float) -> float:
        """Time in which memory delivers or takes `size_bytes`."""
        return size_bytes / (self.memory_gb_s * 1e3)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Host time of the parts of a call.

    By hand between the fastest and the median of what `commfuse bench` found on 2 and 4 H200, November 2026: over NCCL
    with two ranks m=1 280 to 380 us, m=2 350 to 500, m=4 680 to 890; sequential 165 to 265; a ring of four ranks over
    the copy engine, m=2, 776 to 800. autograd_us: what PyTorch's engine adds to a backward pass, whoever computes.
    """

    call_us: float = 60.0
    gemm_us: float = 25.0
    transfer_us: float = 80.0
    collective_us: float = 80.0
    small_kernel_us: float = 10.0
    autograd_us: float = 150.0

    def scaled(self, factor: float) -> "HostTimes":
        """All of them `factor` times as long."""
        return HostTimes(**{field.name: factor * getattr(self, field.name) for field in fields(self)})


#: Of calls that are replayed as lists of driver and library calls: with two ranks m=1 133 to 176 us, m=2 180 to 242,
#: m=4 320; with four ranks, m=1, 238 to 289. Found as above.
REPLAYED = HostTimes(call_us=90.0, gemm_us=14.0, transfer_us=20.0, small_kernel_us=8.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What is known of a context without measuring.

    transfer_sms: SMs that a transfer in flight takes from GEMMs; 0 with the copy engine. regains_sms: a large slice
    takes them back once the transfer is done. overlaps: False where GEMMs leave nothing to the transfers, so that they
    run one after the other. adds_in_epilogue: step by step, own GEMMs add what arrived. replays: direct schedules are
    replayed, with little host time.
    """

    transport: str
    num_sms: int = 132
    transfer_sms: int = 0
    regains_sms: bool = False
    overlaps: bool = True
    adds_in_epilogue: bool = False
    replays: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineModel:
    """All that predictions are made from.

    link: messages of the context's transport, to one peer while another sends here. collective: the group's own
    all-gather or reduce-scatter, by the bytes that a rank receives. source: "measured" or "assumed".
    """

    gemm: GemmRate
    link: Channel
    collective: Channel
    traits: Traits
    source: str
    host: HostTimes = HostTimes()
    replay: HostTimes = REPLAYED


#: The GPU whose numbers are assumed.
ASSUMED_DEVICE = "NVIDIA H200"

# cuBLAS and the persistent GEMM, bf16: 690 to 790 TFLOP/s on large shapes (H100, H200). fp32 without TF32, fp64: not
# measured, data sheet.
_ASSUMED_TFLOPS = {"bfloat16": 700.0, "float16": 700.0, "float32": 45.0, "float64": 45.0}
# sum_partials: 2.9 to 3.0 TB/s on an H100.
_ASSUMED_MEMORY_GB_S = 2900.0

# The copy engine, with the flags of a message: 72 messages of 4 to 128 MiB to 2.7 % in the median.
_NVLINK_COPY = Channel(latency_us=30.0, bandwidth_gb_s=415.0)
# NCCL's point-to-point over NVLink, 20 channels: 8 MiB in 60 us, 64 MiB in 249.
_NVLINK_NCCL = Channel(latency_us=33.0, bandwidth_gb_s=310.0)
# NCCL's all-gathers and reduce-scatters: 72 of two ranks to 2.4 % in the median, 42 of four to 1.5 %.
_NVLINK_COLLECTIVE = Channel(latency_us=20.0, bandwidth_gb_s=232.0)
_NVLINK_COLLECTIVE_OF_FOUR = Channel(latency_us=23.0, bandwidth_gb_s=300.0)
# Through host memory, 4 channels: 8 MiB in 378 us, 64 MiB in 2882.
_SLOW_NCCL = Channel(latency_us=20.0, bandwidth_gb_s=23.4)
# Through host memory: 64 MiB in 2.69 ms.
_SLOW_COLLECTIVE = Channel(latency_us=25.0, bandwidth_gb_s=25.0)


def assumed_machine(
    traits: Traits, dtype: str, *, is_link_slow: bool | None = None, group_size: int = 2
) -> MachineModel:
    """The machine that measurements of ours suggest.

    is_link_slow: NVLink or host memory; None: host memory under NCCL, which is chosen where GPUs do not reach each
    other, NVLink under the copy engine. group_size: of the collectives; larger groups than four take those of four.
    """
    uses_nccl = traits.transport == "nccl"
    is_slow = uses_nccl if is_link_slow is None else is_link_slow
    if is_slow:
        link, collective = _SLOW_NCCL, _SLOW_COLLECTIVE
    else:
        link = _NVLINK_NCCL if uses_nccl else _NVLINK_COPY
        collective = _NVLINK_COLLECTIVE if group_size < 4 else _NVLINK_COLLECTIVE_OF_FOUR
    rate = GemmRate(tflops=_ASSUMED_TFLOPS[dtype], memory_gb_s=_ASSUMED_MEMORY_GB_S, num_sms=traits.num_sms)
    return MachineModel(gemm=rate, link=link, collective=collective, traits=traits, source="assumed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What a calibration found: sizes, which all ranks chose alike, and times.

    gemm_us: of [gemm_size]^3. copy_us: of one copy of copy_bytes. link_us, collective_us: of one message of each of
    the two message_bytes; a collective's counts what a rank receives.
    """

    gemm_size: int
    gemm_us: float
    copy_bytes: int
    copy_us: float
    message_bytes: tuple[int, int]
    link_us: tuple[float, float]
    collective_bytes: tuple[int, int]
    collective_us: tuple[float, float]

    def machine(self, traits: Traits, itemsize: int) -> MachineModel:
        """The model that predicts these times."""
        memory_gb_s = 2 * self.copy_bytes / (max(self.copy_us, 1e-3) * 1e3)
        unit = GemmRate(tflops=1.0, memory_gb_s=float("inf"), num_sms=traits.num_sms, launch_us=0.0)
        at_one_tflops = unit.time_us(self.gemm_size, self.gemm_size, self.gemm_size, itemsize)
        rate = GemmRate(
            tflops=at_one_tflops / max(self.gemm_us - _LAUNCH_US, 0.5 * self.gemm_us, 1e-3),
            memory_gb_s=memory_gb_s,
            num_sms=traits.num_sms,
        )
        return MachineModel(
            gemm=rate,
            link=fit_channel(self.message_bytes, self.link_us),
            collective=fit_channel(self.collective_bytes, self.collective_us),
            traits=traits,
            source="measured",
        )


def fit_channel(sizes: tuple[int, int], times_us: tuple[float, float]) -> Channel:
    """Latency and bandwidth that give both times; where noise gives none, no latency and the larger one's bandwidth."""
    (small, large), (small_us, large_us) = sizes, times_us
    large_us = max(large_us, 1e-3)
    if large <= small or large_us <= small_us:
        return Channel(latency_us=0.0, bandwidth_gb_s=large / (large_us * 1e3))
    us_per_byte = (large_us - small_us) / (large - small)
    latency_us = small_us - small * us_per_byte
    if latency_us < 0:
        return Channel(latency_us=0.0, bandwidth_gb_s=large / (large_us * 1e3))
    return Channel(latency_us=latency_us, bandwidth_gb_s=1e-3 / us_per_byte)
