"""Kernels and copies of a profiler trace, sorted into tracks and calls; and the numbers of a recording."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace import kernels
from commfuse_megatron.tools.trace.kernels import Profile, intervals_of_trace, profile_calls, split_calls
from commfuse_megatron.tools.trace.summary import Summary, drop_nested, summarize, worst_of

PERSISTENT = "persistent_matmul_kernel"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
DTOD, PTOP = "Memcpy DtoD (Device -> Device)", "Memcpy PtoP (Device -> Device)"
COMPUTE_STREAM, COPY_STREAM, NCCL_STREAM = 7, 20, 24

Events = list[dict[str, Any]]
correlations = itertools.count(1)


def work(
    name: str, ts: float, dur: float, *, launched: float | None, stream: int = COMPUTE_STREAM, cat: str = "kernel"
) -> Events:
    """A kernel, or a copy, and its launch on the host, unless that was not seen."""
    number = next(correlations)
    args = {"stream": stream, "correlation": number, "grid": [112, 1, 1]}
    event = {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}
    if launched is None:
        return [event]
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1}
    return [event, {**launch, "args": {"correlation": number}}]


def copy(name: str, ts: float, dur: float, *, launched: float | None, stream: int) -> Events:
    return work(name, ts, dur, launched=launched, stream=stream, cat="gpu_memcpy")


def mark(name: str, ts: float, *, launched: float) -> Events:
    """An annotation on the host, the kernel launched in it, and what the profiler makes of both on the device."""
    annotation = {"ph": "X", "cat": "user_annotation", "name": f"commfuse {name}", "ts": launched - 1, "dur": 3}
    on_device = {**annotation, "cat": "gpu_user_annotation", "ts": ts - 1, "dur": 2}
    return [annotation, on_device, *work(SPIN, ts, 1, launched=launched)]


def begin_and_end(number: int, start: float, end: float, *, launched: tuple[float, float]) -> Events:
    """The marks of a call whose work runs from `start` to `end`."""
    return [
        *mark(f"begin {number}", start - 1, launched=launched[0]),
        *mark(f"end {number}", end, launched=launched[1]),
    ]


def chrome(*events: Events) -> dict[str, Any]:
    noise = [
        {"ph": "M", "name": "process_name", "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 1},
        {"ph": "X", "cat": "user_annotation", "name": "somebody else's", "ts": 0, "dur": 1000},
    ]
    return {"traceEvents": [*noise, *(event for members in events for event in members)]}


def trace_of(*events: Events) -> dict[str, Any]:
    """Two calls that run from 100 to 150 and from 200 to 250; the host was ahead and had launched all by 60."""
    marks = (begin_and_end(1, 100, 150, launched=(20, 30)), begin_and_end(2, 200, 250, launched=(40, 60)))
    return chrome(*marks, *events)


def calls_in(trace: dict[str, Any], num_calls: int = 2) -> list[tuple[int, str, float]]:
    return [(i.call, i.track, i.start_us) for i in intervals_of_trace(trace, num_calls)]


@pytest.mark.parametrize(("name", "track", "short", "op"), [
    (PERSISTENT, "compute", "GEMM, 112 SMs", "GEMM kernels"),
    ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "compute", "GEMM", "GEMM kernels"),
    ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "compute", "GEMM", "GEMM kernels"),
    ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "compute", "attention", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "compute", "attention", "attention"),
    ("cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_bprop", "compute", "attention", "attention"),
    ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", "compute", "attention", "attention"),
    ("void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16>", "compute", "attention", "attention"),
    ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "compute", "attention", "attention"),
    ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "compute", "attention", "attention"),
    ("sum_partials_kernel", "compute", "sum", "other kernels"),
    ("void at::native::vectorized_elementwise_kernel<4, x>", "compute", "vectorized_elementwise_k", "other kernels"),
    (NCCL, "transfer", "NCCL SendRecv", "NCCL kernels"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "transfer", "NCCL ReduceScatter", "NCCL kernels"),
    ("userbuffers_fp16_sum_inplace_gpu_rr_rs", "transfer", "userbuffers_fp16_sum_inp", "NCCL kernels"),
])  # fmt: skip
def test_kernels_are_sorted_by_name(name: str, track: str, short: str, op: str) -> None:
    (interval,) = intervals_of_trace(trace_of(work(name, 110, 5, launched=25)), 2)
    assert (interval.track, interval.name) == (track, short)
    assert interval.op.startswith(op)
    assert (interval.detail, interval.row, interval.call) == (name, "stream 7", 1)


SUM = "sum_partials_kernel"
HTOD = "Memcpy HtoD (Pageable -> Device)"


def between_calls() -> list[Events]:
    """Warm-up before, what `prepare` launches between and after; by the driver or not, and long before it ran."""
    return [
        piece
        for ts in (10, 60, 160, 180, 260, 400)
        for piece in (
            work(PERSISTENT, ts, 9, launched=5),
            work(PERSISTENT, ts, 9, launched=25),  # while call 1 was launched
            work(NCCL, ts, 9, launched=ts - 5, stream=NCCL_STREAM),
            copy(DTOD, ts, 9, launched=None, stream=COPY_STREAM),
        )
    ]


#: By what it shows: what ran, and the call, track and start of each that counts.
PLACED: dict[str, tuple[list[Events], list[tuple[int, str, float]]]] = {
    "copies between devices are transfers": (
        [
            work(PERSISTENT, 101, 5, launched=23), copy(DTOD, 106, 2, launched=22, stream=COMPUTE_STREAM),
            copy(DTOD, 110, 2, launched=23, stream=COPY_STREAM), copy(PTOP, 115, 2, launched=24, stream=COMPUTE_STREAM),
            copy(HTOD, 120, 2, launched=25, stream=COPY_STREAM), work(NCCL, 130, 5, launched=26, stream=NCCL_STREAM),
            copy(DTOD, 140, 2, launched=27, stream=NCCL_STREAM),
        ],
        [(1, "compute", 101), (1, "compute", 106), (1, "transfer", 110), (1, "transfer", 115), (1, "compute", 120),
         (1, "transfer", 130), (1, "transfer", 140)],
    ),
    # Fails where streams alone are looked at: a graph's are the driver's choice.
    "copies by the driver are transfers among kernels, too": (
        [
            work(PERSISTENT, 101, 5, launched=None), copy(DTOD, 107, 9, launched=None, stream=COMPUTE_STREAM),
            copy("Memset (Device)", 120, 1, launched=None, stream=COMPUTE_STREAM),
            copy(DTOD, 130, 9, launched=29, stream=COMPUTE_STREAM),
        ],
        [(1, "compute", 101), (1, "transfer", 107), (1, "compute", 120), (1, "compute", 130)],
    ),
    # Fails where launches are looked at: nobody saw the graph's.
    "work of a graph belongs to the call during which it ran": (
        [
            copy(PTOP, 100, 5, launched=None, stream=COPY_STREAM), work(PERSISTENT, 100, 50, launched=None),
            copy(DTOD, 140, 9, launched=None, stream=COPY_STREAM), work(PERSISTENT, 200, 30, launched=None),
            copy(DTOD, 230, 20, launched=None, stream=COPY_STREAM), work(SUM, 240, 10, launched=None),
        ],
        [(1, "transfer", 100), (1, "compute", 100), (1, "transfer", 140), (2, "compute", 200), (2, "transfer", 230),
         (2, "compute", 240)],
    ),
    "what ran between calls is nobody's": (
        [*between_calls(), work(PERSISTENT, 120, 9, launched=25)], [(1, "compute", 120)],
    ),
    "the middle decides, since clocks are coarse": (
        [
            work(PERSISTENT, 99.5, 20, launched=25), work(PERSISTENT, 140, 10.5, launched=25),
            work(PERSISTENT, 250.5, 20, launched=45), work(PERSISTENT, 190, 9.5, launched=45),
        ],
        [(1, "compute", 99.5), (1, "compute", 140)],
    ),
    "marks are not part of the profile": ([], []),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_work_is_placed_in_tracks_and_calls(name: str) -> None:
    events, expected = PLACED[name]
    assert calls_in(trace_of(*events)) == expected


def test_kernels_may_run_long_after_the_host_has_launched_them() -> None:
    """Fails where the host's clock counts: all calls had been launched when the first one began."""
    marks = [begin_and_end(n, 1000 * n, 1000 * n + 900, launched=(10 * n, 10 * n + 5)) for n in (1, 2, 3)]
    kernels = [work(PERSISTENT, 1000 * n + 100, 700, launched=10 * n + 3) for n in (1, 2, 3)]
    assert calls_in(chrome(*marks, *kernels), 3) == [(n, "compute", 1000 * n + 100) for n in (1, 2, 3)]


def test_a_trace_without_all_marks_is_refused() -> None:
    """Fails where an empty profile, or one with two calls in one, is returned."""
    whole = trace_of(work(PERSISTENT, 110, 5, launched=25))
    with pytest.raises(UnsupportedError, match=r'seen 4 of the 6 marks around 3 calls \(not "commfuse begin 3"\)'):
        intervals_of_trace(whole, 3)
    kernels_lost = [e for e in whole["traceEvents"] if e.get("cat") != "kernel" or e["ts"] != 150]
    launch_lost = [e for e in whole["traceEvents"] if e.get("cat") != "cuda_runtime" or e["ts"] != 30]
    annotation_lost = [e for e in whole["traceEvents"] if e["name"] != "commfuse end 1"]
    for events in (kernels_lost, launch_lost, annotation_lost):
        assert len(events) < len(whole["traceEvents"])
        with pytest.raises(UnsupportedError, match=r'seen 3 of the 4 marks .* "commfuse end 1"'):
            intervals_of_trace({"traceEvents": events}, 2)


class Device:
    """Stands for a GPU, its host and its profiler: a clock, and what ran. Everything ends before what comes next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.events: Events = []
        self.done: list[str] = []
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.run(SPIN, is_seen=True))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.done.append("synchronize"))
        monkeypatch.setattr(kernels, "profile", self.profile)
        monkeypatch.setattr(kernels, "record_function", self.annotate)

    def run(self, name: str, *, is_seen: bool) -> None:
        self.done.append(name)
        self.now += 10
        self.events += work(name, self.now, 5, launched=self.now - 1 if is_seen else None)

    @contextmanager
    def annotate(self, name: str) -> Iterator[None]:
        start = self.now
        yield
        self.now += 10
        self.events.append(
            {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": self.now - start, "args": {}}
        )

    @contextmanager
    def profile(self, **_: Any) -> Iterator["Device"]:
        yield self

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_text(json.dumps({"baseTimeNanoseconds": 77, **chrome(self.events)}), encoding="utf-8")


def calls_on(device: Device) -> list[Callable[[], object]]:
    return [lambda: device.run(PERSISTENT, is_seen=False), lambda: device.run(NCCL, is_seen=False)]


@pytest.mark.parametrize("are_apart", [False, True])
def test_calls_are_profiled_between_marks(are_apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    own = profile_calls(
        calls_on(device),
        prepare=lambda number: device.run(f"prepare {number}", is_seen=number == 1),
        are_apart=are_apart,
    )
    assert (own.base_ns, own.complaint) == (77, "")
    assert [(i.call, i.name) for i in own.intervals] == [(1, "GEMM, 112 SMs"), (2, "NCCL SendRecv")]
    waits = ["synchronize"] * are_apart
    assert device.done == [
        "prepare 1", SPIN, PERSISTENT, SPIN, *waits, "prepare 2", SPIN, NCCL, SPIN, *waits, "synchronize"
    ]  # fmt: skip
    assert [[i.name for i in call[0]] for call in split_calls({0: own.intervals}, 3)] == [
        ["GEMM, 112 SMs"],
        ["NCCL SendRecv"],
        [],
    ]


def test_a_profiler_that_lost_marks_is_complained_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not raised yet: the other ranks wait to gather profiles."""
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    own = profile_calls(calls_on(device), prepare=lambda number: None)
    assert own.intervals == ()
    assert "seen 0 of the 4 marks around 2 calls" in own.complaint


def test_profiles_of_two_ranks_share_a_clock() -> None:
    interval = Interval("GEMM", "compute", 10, 20, None, "GEMM kernels", 1)
    early, late = Profile(1_000_000_000, (interval,)), Profile(1_000_050_000, (interval,))
    base_ns = min(early.base_ns, late.base_ns)
    assert [early.since(base_ns)[0].start_us, late.since(base_ns)[0].start_us] == [10, 60]


# --- numbers ----------------------------------------------------------------------------------------------------------


def interval(name: str, track: str, start_us: float, end_us: float, call: int = 1) -> Interval:
    return Interval(name, track, start_us, end_us, None, "op", call)


def test_a_summary_is_the_mean_of_calls_metered_by_themselves() -> None:
    calls = [
        interval("multiply 1", "compute", 0, 10), interval("to rank 1 from rank 1", "transfer", 10, 18),
        interval("multiply 0", "compute", 10, 16), interval("sum", "compute", 18, 21),
        interval("GEMM, 112 SMs", "compute", 30, 40, call=2), interval("NCCL SendRecv", "transfer", 35, 40, call=2),
    ]  # fmt: skip
    assert summarize(calls) == Summary(
        calls=2,
        span_us=15.5,
        compute_us=14.5,
        gemm_us=13,
        transfer_us=6.5,
        exposed_us=1,
        tail_us=2.5,
        hidden_fraction=1 - 1 / 6.5,
    )
    whole = summarize(calls, as_one_call=True)
    assert (whole.calls, whole.span_us, whole.transfer_us, whole.tail_us) == (1, 40, 13, 0)
    assert summarize([]).calls == 0
    assert summarize([interval("x", "transfer", 0, 4)]).hidden_fraction == 0
    worst = worst_of([summarize(calls), whole])
    assert (worst.span_us, worst.tail_us, worst.calls) == (40, 2.5, 2)


def test_the_worst_of_ranks_hides_what_the_worst_one_does() -> None:
    """Not what the largest transfer of one and the largest exposed time of another would make."""
    hides_none = summarize([interval("x", "transfer", 0, 1)])
    hides_all = summarize([interval("multiply", "compute", 0, 100), interval("x", "transfer", 0, 100)])
    worst = worst_of([hides_all, hides_none])
    assert (worst.transfer_us, worst.exposed_us, worst.hidden_fraction) == (100, 1, 0)


@pytest.mark.parametrize(("last", "tail_us"), [("attend backward 1", 2), ("attention", 2), ("wgrad", 2), ("sum", 12)])
def test_a_tail_begins_where_products_and_attention_end(last: str, tail_us: float) -> None:
    call = [
        interval("multiply 1", "compute", 0, 10),
        interval(last, "compute", 10, 20),
        interval("gather", "transfer", 0, 22),
    ]
    assert summarize(call).tail_us == tail_us


def test_what_was_recorded_again_closer_to_the_work_is_dropped() -> None:
    outer = [interval("multiply 0", "compute", 0, 10), interval("all-gather", "transfer", 10, 20)]
    inner = interval("GEMM 1x2x3", "compute", 1, 9)
    elsewhere = [interval("GEMM 1x2x3", "compute", 11, 19), interval("GEMM 1x2x3", "compute", 9, 11)]
    assert drop_nested([inner, *elsewhere], outer) == elsewhere
