"""How long an operation of ours goes on after its last GEMM, read from recorded intervals.

A context that records runs the path that a row names a few more times. These calls are not the timed ones: recording
costs host time, and over the copy engine a recorded operation walks its schedule step by step where a timed one replays
a tape. Where launches take longer than GEMMs, the tail is theirs.
"""

import statistics

from commfuse_megatron import OverlapContext
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tools.bench.operands import Work, our_result
from commfuse_megatron.tools.bench.ours import PathOptions
from commfuse_megatron.tools.bench.variant import Ready, differentiable
from commfuse_megatron.tools.common.turns import largest_of_ranks
from commfuse_megatron.tools.trace.summary import tail_us

_CALLS = 6


class TailMeter:
    """One recording context per path that was met."""

    def __init__(self) -> None:
        self._contexts: dict[PathOptions, OverlapContext] = {}

    def measure_ms(self, work: Work, ready: Ready) -> float | None:
        """Median over calls, maximum over ranks; None where nothing is scheduled. Collective."""
        if ready.path not in ("sliced", "grouped", "bulk"):
            return None
        options = PathOptions(
            path=ready.path,
            backend=ready.transport,
            algorithm=ready.algorithm or "direct",
            chunks_per_shard=ready.chunks_per_shard or 1,
        )
        if options not in self._contexts:
            self._contexts[options] = OverlapContext(work.group, options.config(record=True))
        context = self._contexts[options]
        recorded = differentiable(work, lambda: our_result(work.case, work.operands, context))
        recorder = context.recorder
        assert recorder is not None
        recorded.call()
        recorder.intervals()
        recorder.clear()
        for _ in range(_CALLS):
            recorded.call()
        by_call: dict[int, list[Interval]] = {}
        for interval in recorder.intervals():
            by_call.setdefault(interval.call, []).append(interval)
        recorder.clear()
        tails = [tail for tail in map(tail_us, by_call.values()) if tail is not None]
        own_us = statistics.median(tails) if tails else -1.0
        (slowest_us,) = largest_of_ranks([own_us], work.pool.device, work.group)
        return slowest_us / 1e3 if slowest_us >= 0 else None

    def close(self) -> None:
        """Close all contexts."""
        for context in self._contexts.values():
            context.close()
        self._contexts.clear()
