"""Kernels and copies of a profiler trace, sorted into tracks and calls; and the numbers of a recording."""

from typing import Any

import pytest

from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tracing.kernels import Profile, intervals_of_trace
from commfuse_megatron.tracing.summary import Summary, drop_nested, summarize, worst_of

PERSISTENT = "persistent_matmul_kernel"
NCCL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
COMPUTE_STREAM, COPY_STREAM, NCCL_STREAM = 7, 20, 24


def annotation(number: int, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": f"commfuse call {number}", "ts": ts, "dur": dur, "args": {}}


def work(
    name: str, ts: float, dur: float, *, launched: float | None, stream: int = COMPUTE_STREAM, **more: Any
) -> list[dict[str, Any]]:
    """A kernel (or, with cat=, a copy) and its launch on the host."""
    number = int(1000 * ts)
    event = {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, **{k: more.pop(k) for k in list(more)}}
    event["args"] = {"stream": stream, "correlation": number, "grid": [112, 1, 1]}
    if launched is None:
        return [event]
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": launched, "dur": 1}
    return [event, {**launch, "args": {"correlation": number}}]


def copy(name: str, ts: float, dur: float, *, launched: float | None, stream: int) -> list[dict[str, Any]]:
    return work(name, ts, dur, launched=launched, stream=stream, cat="gpu_memcpy")


def trace_of(*events: list[dict[str, Any]]) -> dict[str, Any]:
    calls = [annotation(1, 100, 50), annotation(2, 200, 50)]
    noise = [
        {"ph": "M", "name": "process_name", "args": {}},
        {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 0, "dur": 1},
    ]
    return {"traceEvents": [*calls, *noise, *(event for pair in events for event in pair)]}


@pytest.mark.parametrize(
    ("name", "track", "short", "op"),
    [
        (PERSISTENT, "compute", "GEMM, 112 SMs", "GEMM kernels"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "compute", "GEMM", "GEMM kernels"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "compute", "GEMM", "GEMM kernels"),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>",
            "compute",
            "attention",
            "attention",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "compute", "attention", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_bprop", "compute", "attention", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16>", "compute", "attention", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true, __nv_bfloat16>", "compute", "attention", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "compute", "attention", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "compute", "attention", "attention"),
        ("sum_partials_kernel", "compute", "sum", "other kernels"),
        (
            "void at::native::vectorized_elementwise_kernel<4, x>",
            "compute",
            "vectorized_elementwise_k",
            "other kernels",
        ),
        (NCCL, "transfer", "NCCL SendRecv", "NCCL kernels"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(x)", "transfer", "NCCL ReduceScatter", "NCCL kernels"),
        ("userbuffers_fp16_sum_inplace_gpu_rr_rs", "transfer", "userbuffers_fp16_sum_inp", "NCCL kernels"),
    ],
)
def test_kernels_are_sorted_by_name(name: str, track: str, short: str, op: str) -> None:
    (interval,) = intervals_of_trace(trace_of(work(name, 110, 5, launched=101)))
    assert (interval.track, interval.name) == (track, short)
    assert interval.op.startswith(op)
    assert (interval.detail, interval.lane, interval.call) == (name, "stream 7", 1)


def test_copies_are_transfers_between_devices_and_on_streams_without_kernels() -> None:
    intervals = intervals_of_trace(
        trace_of(
            work(PERSISTENT, 110, 5, launched=101),
            copy("Memcpy DtoD (Device -> Device)", 116, 2, launched=102, stream=COMPUTE_STREAM),
            copy("Memcpy DtoD (Device -> Device)", 120, 2, launched=103, stream=COPY_STREAM),
            copy("Memcpy PtoP (Device -> Device)", 125, 2, launched=104, stream=COMPUTE_STREAM),
            copy("Memcpy HtoD (Pageable -> Device)", 130, 2, launched=105, stream=COPY_STREAM),
            work(NCCL, 140, 5, launched=106, stream=NCCL_STREAM),
            copy("Memcpy DtoD (Device -> Device)", 150, 2, launched=107, stream=NCCL_STREAM),
        )
    )
    tracks = [interval.track for interval in intervals]
    assert tracks == ["compute", "compute", "transfer", "transfer", "compute", "transfer", "transfer"]


def test_work_belongs_to_the_call_that_launched_it() -> None:
    intervals = intervals_of_trace(
        trace_of(
            work(PERSISTENT, 50, 5, launched=40),  # warm-up
            work(PERSISTENT, 260, 5, launched=120),  # launched in call 1, run during call 2
            work(PERSISTENT, 270, 5, launched=210),
            work(PERSISTENT, 300, 5, launched=290),  # after the calls
        )
    )
    assert [(i.call, i.start_us) for i in intervals] == [(1, 260), (2, 270)]


def test_copies_without_a_launch_belong_to_the_call_that_ends_after_their_start() -> None:
    def unseen(ts: float) -> list[dict[str, Any]]:
        return copy("Memcpy DtoD (Device -> Device)", ts, 5, launched=None, stream=COPY_STREAM)

    intervals = intervals_of_trace(
        trace_of(
            unseen(49),  # warm-up
            work(PERSISTENT, 50, 10, launched=40),
            unseen(120),  # an all-gather sends before it multiplies
            work(PERSISTENT, 121, 20, launched=120),
            unseen(141),
            work(PERSISTENT, 142, 20, launched=201),
            unseen(150),
            unseen(310),
            work(PERSISTENT, 312, 20, launched=290),  # after the calls
        )
    )
    copies = [(i.call, i.start_us) for i in intervals if i.track == "transfer"]
    assert copies == [(1, 120), (2, 141), (2, 150)]


def test_work_of_calls_apart_belongs_to_the_call_during_which_it_ran() -> None:
    """Fails where launches alone are looked at: nobody saw those of a CUDA graph, nor of copies by the driver."""
    events = (
        work(PERSISTENT, 98, 1, launched=40),  # before the first call
        copy("Memcpy DtoD (Device -> Device)", 105, 5, launched=None, stream=COPY_STREAM),
        work(PERSISTENT, 105, 20, launched=None),
        work(PERSISTENT, 130, 10, launched=101),
        work(NCCL, 160, 30, launched=155, stream=NCCL_STREAM),  # the ranks meet
        copy("Memcpy DtoD (Device -> Device)", 205, 5, launched=None, stream=COPY_STREAM),
        work(PERSISTENT, 210, 39, launched=None),
        work(NCCL, 260, 10, launched=255, stream=NCCL_STREAM),
    )
    found = [(i.call, i.track, i.start_us) for i in intervals_of_trace(trace_of(*events), are_apart=True)]
    assert found == [
        (1, "transfer", 105), (1, "compute", 105), (1, "compute", 130), (2, "transfer", 205), (2, "compute", 210),
    ]  # fmt: skip
    assert (2, 205) not in [(i.call, i.start_us) for i in intervals_of_trace(trace_of(*events))]


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
        interval("multiply 1", "compute", 0, 10),
        interval("to rank 1 from rank 1", "transfer", 10, 18),
        interval("multiply 0", "compute", 10, 16),
        interval("sum", "compute", 18, 21),
        interval("GEMM, 112 SMs", "compute", 30, 40, call=2),
        interval("NCCL SendRecv", "transfer", 35, 40, call=2),
    ]
    assert summarize(calls) == Summary(
        calls=2, span_us=15.5, compute_us=14.5, gemm_us=13, transfer_us=6.5, exposed_us=1, tail_us=2.5
    )
    whole = summarize(calls, as_one_call=True)
    assert (whole.calls, whole.span_us, whole.transfer_us, whole.tail_us) == (1, 40, 13, 0)
    assert summarize([]).calls == 0
    assert summarize([interval("x", "transfer", 0, 4)]).hidden_fraction == 0
    worst = worst_of([summarize(calls), whole])
    assert (worst.span_us, worst.tail_us, worst.calls) == (40, 2.5, 2)


@pytest.mark.parametrize(("last", "tail_us"), [("attend backward 1", 2), ("attention", 2), ("wgrad", 2), ("sum", 12)])
def test_a_tail_begins_where_products_and_attention_end(last: str, tail_us: float) -> None:
    call = [
        interval("multiply 1", "compute", 0, 10),
        interval(last, "compute", 10, 20),
        interval("gather", "transfer", 0, 22),
    ]
    assert summarize(call).tail_us == tail_us


def test_what_was_recorded_a_second_time_closer_to_the_work_is_dropped() -> None:
    outer = [interval("multiply 0", "compute", 0, 10), interval("all-gather", "transfer", 10, 20)]
    inner = interval("GEMM 1x2x3", "compute", 1, 9)
    elsewhere = [interval("GEMM 1x2x3", "compute", 11, 19), interval("GEMM 1x2x3", "compute", 9, 11)]
    assert drop_nested([inner, *elsewhere], outer) == elsewhere
