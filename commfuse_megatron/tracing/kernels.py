"""What a GPU ran, as the profiler saw it: kernels and copies by stream, as intervals of the two tracks.

A transfer is a kernel of NCCL or of userbuffers, a copy between devices, or a copy within one on a stream that runs no
kernels (how the copy engine writes into a peer's mapped memory); everything else computes. A transfer kernel that waits
for its peer counts as running: that is what the device's timeline shows.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from commfuse_megatron.runtime.meter import COMPUTE, TRANSFER
from commfuse_megatron.runtime.recorder import Interval

__all__ = ["Profile", "gather_profile", "intervals_of_trace", "profile_calls"]

GEMM, ATTENTION, OTHER = "GEMM kernels", "attention kernels", "other kernels"

_CALL = "commfuse call "
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
    """One rank's calls. Interval times count from `base_ns` on the host's clock, which ranks of one host share."""

    base_ns: int
    intervals: tuple[Interval, ...]

    def since(self, base_ns: int) -> list[Interval]:
        """The intervals with times counted from another base."""
        shift_us = (self.base_ns - base_ns) / 1e3
        return [
            dataclasses.replace(i, start_us=i.start_us + shift_us, end_us=i.end_us + shift_us) for i in self.intervals
        ]


def gather_profile(own: Profile, group: dist.ProcessGroup | None = None) -> dict[int, list[Interval]]:
    """Every rank's intervals on one clock, by rank within the group; collective."""
    everyones: list[Profile] = [own] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    base_ns = min(one.base_ns for one in everyones)
    return {rank: one.since(base_ns) for rank, one in enumerate(everyones)}


def profile_calls(
    calls: Sequence[Callable[[], object]], *, prepare: Callable[[int], object], are_apart: bool = False
) -> Profile:
    """Run the calls one after the other under the profiler; the intervals of call n (from 1) carry that number.

    Args:
        prepare: run before each call with its number, e.g. to meet the other ranks before the first one: profilers do
            not start at the same moment. What it launches is not part of the profile.
        are_apart: end every call by waiting for the device, so that its work is known by when it ran. `prepare` must
            wait for what it launches, too.
    """
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for number, call in enumerate(calls, 1):
            prepare(number)
            with record_function(f"{_CALL}{number}"):
                call()
                if are_apart:
                    torch.cuda.synchronize()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    return Profile(int(trace.get("baseTimeNanoseconds", 0)), tuple(intervals_of_trace(trace, are_apart=are_apart)))


def intervals_of_trace(trace: dict[str, Any], *, are_apart: bool = False) -> list[Interval]:
    """The device's work inside annotated calls, from a profiler trace in the Chrome format; oldest first.

    Work belongs to the call during which it was launched. The launches of copies by the driver's own functions are not
    in the trace: they belong to the first call whose other work ends after the copy began, since a call starts nothing
    before the one before it is done, and always ends by computing with, or after, what it copied.

    are_apart: the device was idle before and at the end of every call: work belongs to the call during which it ran,
    whoever launched it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    calls = sorted(
        (event["ts"], event["ts"] + event["dur"], int(event["name"].removeprefix(_CALL)))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(_CALL)
    )
    launched_us = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    work = sorted((event for event in events if event.get("cat") in _DEVICE_WORK), key=lambda event: event["ts"])
    kernel_streams = {_stream(event) for event in work if event["cat"] == "kernel" and not _is_communication(event)}
    if are_apart:
        launches: list[float | None] = [event["ts"] + event["dur"] / 2 for event in work]
    else:
        launches = [launched_us.get(event.get("args", {}).get("correlation")) for event in work]
    slots = [None if at_us is None else _slot_at(calls, at_us) for at_us in launches]
    slot_end_us: dict[int, float] = {}
    for event, slot in zip(work, slots, strict=True):
        if slot is not None:
            slot_end_us[slot] = max(slot_end_us.get(slot, 0.0), event["ts"] + event["dur"])
    found = []
    for event, slot in zip(work, slots, strict=True):
        if slot is None:
            slot = min((s for s, end_us in slot_end_us.items() if end_us > event["ts"]), default=0)
        if slot % 2:
            found.append(_interval(event, calls[slot // 2][2], kernel_streams))
    return found


def _slot_at(calls: list[tuple[float, float, int]], at_us: float) -> int:
    """When something was launched: 2n + 1 during call n (from 0) in the order of time, 2n between n - 1 and n."""
    index = bisect_right(calls, (at_us, float("inf"), 0)) - 1
    return 2 * index + (1 if index >= 0 and at_us <= calls[index][1] else 2)


def _stream(event: dict[str, Any]) -> int:
    return int(event.get("args", {}).get("stream", event.get("tid", 0)))


def _is_communication(event: dict[str, Any]) -> bool:
    name = event["name"].lower()
    return "nccl" in name or "userbuffers" in name


def _interval(event: dict[str, Any], call: int, kernel_streams: set[int]) -> Interval:
    track, name, op = _classify(event, is_copy_stream=_stream(event) not in kernel_streams)
    start_us = float(event["ts"])
    lane = f"stream {_stream(event)}"
    return Interval(name, track, start_us, start_us + float(event["dur"]), None, op, call, lane, event["name"])


def _classify(event: dict[str, Any], *, is_copy_stream: bool) -> tuple[str, str, str]:
    """(track, short name, op) of one piece of work."""
    name = event["name"]
    if event["cat"] != "kernel":
        is_transfer = _BETWEEN_DEVICES.search(name) or (is_copy_stream and _WITHIN_DEVICE.search(name))
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
