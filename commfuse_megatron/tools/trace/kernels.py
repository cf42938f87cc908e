"""What a GPU ran, as the profiler saw it: kernels and copies by stream, as intervals of the two tracks.

A transfer is a kernel of NCCL or of userbuffers, a copy between devices, or one within a device (which is how a copy
into a peer's mapped memory may look) on a stream that runs no kernels or by the driver's own functions, as the copy
engine's are; everything else computes. A transfer kernel that waits for its peer counts as running: that is what the
device's timeline shows.

Beware: work belongs to a call by when it ran, between two marks on the current stream,

    current stream   [begin 1][ all that the call puts there ... waits for its other streams ][end 1][begin 2]...
    other streams             [ ordered after what the current stream held ]

so a call must order all its work after what that stream held before, and end with that stream waiting for all of it.
By its launch work cannot be told: the driver's functions, which launch CUDA graphs and copies, are not in the trace.
"""

import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.trace.session import shifted

#: Longer than a host under the profiler needs to submit a call.
HEAD_START_US = 4000.0

GEMM, ATTENTION, OTHER = "GEMM kernels", "attention kernels", "other kernels"

_BEGIN, _END = "commfuse begin ", "commfuse end "
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")

_NCCL = re.compile(r"nccl\w*?(?:DevKernel|Kernel)_?(\w+)", re.IGNORECASE)
# The last two surround the backward kernel of cuDNN and of flash attention.
_ATTENTION = re.compile(r"flash|fmha|sdpa|attention|softmax|dot_do_o|convert_dq", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cutlass|xmma|matmul|splitk|cublas", re.IGNORECASE)
_BETWEEN_DEVICES = re.compile(r"PtoP|Peer", re.IGNORECASE)
_WITHIN_DEVICE = re.compile(r"DtoD|Device -> Device", re.IGNORECASE)


@dataclass(frozen=True)
class Profile:
    """One rank's calls. Interval times count from `base_ns` on the host's clock, which ranks of one host share.

    complaint: why there are no intervals, if that is known.
    """

    base_ns: int
    intervals: tuple[Interval, ...]
    complaint: str = ""

    def since(self, base_ns: int) -> list[Interval]:
        """The intervals with times counted from another base."""
        return [shifted(interval, (self.base_ns - base_ns) / 1e3) for interval in self.intervals]


def gather_profile(own: Profile, group: dist.ProcessGroup | None = None) -> dict[int, list[Interval]]:
    """Every rank's intervals on one clock, by rank within the group; collective.

    Raises UnsupportedError on all ranks where one has a complaint.
    """
    everyones: list[Profile] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    complaints = [f"rank {rank}: {one.complaint}" for rank, one in enumerate(everyones) if one.complaint]
    if complaints:
        raise UnsupportedError("; ".join(complaints))
    base_ns = min(one.base_ns for one in everyones)
    return {rank: one.since(base_ns) for rank, one in enumerate(everyones)}


def split_calls(ranks: Mapping[int, Sequence[Interval]], num_calls: int) -> list[dict[int, list[Interval]]]:
    """The recordings of calls 1 to `num_calls`, one each."""
    calls: list[dict[int, list[Interval]]] = [{rank: [] for rank in ranks} for _ in range(num_calls)]
    for rank, intervals in ranks.items():
        for interval in intervals:
            calls[interval.call - 1][rank].append(interval)
    return calls


def profile_calls(
    calls: Sequence[Callable[[], object]], *, prepare: Callable[[int], object], are_apart: bool = False
) -> Profile:
    """Run the calls one after the other under the profiler; the intervals of call n (from 1) carry that number.

    Args:
        prepare: run before each call with its number, e.g. to meet the other ranks before the first one: profilers do
            not start at the same moment. What it launches is not part of the profile.
        are_apart: end every call by waiting for the device, so that the next one begins on an idle one.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for number, call in enumerate(calls, 1):
            prepare(number)
            _mark(f"{_BEGIN}{number}")
            call()
            _mark(f"{_END}{number}")
            if are_apart:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    try:
        return Profile(base_ns, tuple(intervals_of_trace(trace, len(calls))))
    except UnsupportedError as error:  # of this rank alone: `gather_profile` raises it on all
        return Profile(base_ns, (), str(error))


def _mark(name: str) -> None:
    """The least kernel that there is, on the current stream; by CUDA's runtime, so that its launch is in the trace."""
    with record_function(name):
        torch.cuda._sleep(1)


def intervals_of_trace(trace: dict[str, Any], num_calls: int) -> list[Interval]:
    """The device's work inside calls 1 to `num_calls`, from a profiler trace in the Chrome format; oldest first.

    A call's work is what ran, by its middle, between the end of its first mark and the start of its second.

    Raises UnsupportedError where a mark is missing.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launched_us = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work = sorted((event for event in events if event.get("cat") in _DEVICE_WORK), key=lambda event: event["ts"])
    kernel_streams = {_stream(event) for event in work if event["cat"] == "kernel" and not _is_communication(event)}
    marks = _find_marks(events, work, launched_us)
    names = [f"{edge}{number}" for number in range(1, num_calls + 1) for edge in (_BEGIN, _END)]
    missing = [name for name in names if name not in marks]
    if missing:
        raise UnsupportedError(
            f"the profiler has seen {len(names) - len(missing)} of the {len(names)} marks around {num_calls} calls (not"
            f' "{missing[0]}"), so it has lost some of what ran; profile fewer or shorter calls'
        )
    starts_us = [marks[name][1] for name in names[::2]]
    ends_us = [marks[name][0] for name in names[1::2]]
    found = []
    for event in work:
        middle_us = event["ts"] + event["dur"] / 2
        call = bisect_right(starts_us, middle_us)
        if call and middle_us < ends_us[call - 1]:
            is_ours = _correlation(event) not in launched_us
            may_be_push = is_ours or _stream(event) not in kernel_streams
            track, name, op = _classify(event, may_be_push=may_be_push)
            times_us = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            found.append(Interval(name, track, *times_us, None, op, call, f"stream {_stream(event)}", event["name"]))
    return found


def _find_marks(
    events: list[dict[str, Any]], work: list[dict[str, Any]], launched_us: dict[int, float]
) -> dict[str, tuple[float, float]]:
    """Name -> (start, end) on the device of the kernel that was launched inside that annotation."""
    annotations = sorted(
        (float(event["ts"]), float(event["ts"]) + event["dur"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith((_BEGIN, _END))
    )
    found: dict[str, tuple[float, float]] = {}
    for event in work:
        at_us = launched_us.get(_correlation(event)) if event["cat"] == "kernel" else None
        index = -1 if at_us is None else bisect_right(annotations, at_us, key=lambda annotation: annotation[0]) - 1
        if at_us is not None and index >= 0 and at_us <= annotations[index][1]:
            found[annotations[index][2]] = float(event["ts"]), float(event["ts"]) + event["dur"]
    return found


def _correlation(event: dict[str, Any]) -> int:
    """What an event has in common with its launch; -1 where it says nothing."""
    return int(event.get("args", {}).get("correlation", -1))


def _stream(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("stream", event.get("tid", 0)))


def _is_communication(event: dict[str, Any]) -> bool:
    name = event["name"].lower()
    return "nccl" in name or "userbuffers" in name


def _classify(event: dict[str, Any], *, may_be_push: bool) -> tuple[str, str, str]:
    """(track, short name, op) of one piece of work. may_be_push: if it is a copy, it may be of the copy engine's."""
    name = event["name"]
    if event["cat"] != "kernel":
        is_transfer = _BETWEEN_DEVICES.search(name) or (may_be_push and _WITHIN_DEVICE.search(name))
        if is_transfer:
            return TRANSFER, "copy to a peer", "copies to peers"
        return COMPUTE, name.partition(" (")[0], OTHER
    if _is_communication(event):
        found = _NCCL.search(name)
        return TRANSFER, f"NCCL {found[1].split('_')[0]}" if found else name[:24], "NCCL kernels"
    if _ATTENTION.search(name):
        return COMPUTE, "attention", ATTENTION
    if "persistent_matmul" in name:
        # One block per SM: the grid says how many SMs the GEMM was given.
        blocks = (event.get("args", {}).get("grid") or ["?"])[0]
        return COMPUTE, f"GEMM, {blocks} SMs", GEMM
    if _GEMM.search(name):
        return COMPUTE, "GEMM", GEMM
    return COMPUTE, "sum" if "sum_partials" in name else name.partition("<")[0].split("::")[-1][:24], OTHER
