"""Records what runs inside a with-block on all ranks of a group, on one clock.

    config = OverlapConfig(record=True)
    with trace.record(context) as recording:
        loss = step(batch)
    if rank == 0:
        trace.export(recording.by_rank, "trace_output")          # trace.json for ui.perfetto.dev, timeline.png

Entering and leaving are collective over the group. Beware: every rank has its own clock, so the ranks meet at the start
and all times count from that meeting; what happened before it is forgotten.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.runtime.recorder import Interval, Recorder
from commfuse_megatron.tools.common.pictures import missing_matplotlib
from commfuse_megatron.tools.common.turns import meet
from commfuse_megatron.tools.trace.figure import draw_timeline
from commfuse_megatron.tools.trace.perfetto import write_perfetto


class Session:
    """One recording by some recorders of this rank. `recorders` is asked twice, since contexts appear on first use."""

    def __init__(self, recorders: Callable[[], Sequence[Recorder]]) -> None:
        self._recorders = recorders
        self._clock_us: dict[int, float] = {}

    def start(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Forget what was recorded, meet the other ranks, and note the time of the meeting on every clock."""
        meet(group, device)
        recorders = self._recorders()
        mark = recorders[0].now() if recorders else None  # the same for all: what they record is compared
        for recorder in recorders:
            recorder.clear()
            recorder.add_compute("clock", mark, None)
            self._clock_us[id(recorder)] = recorder.intervals()[0].start_us
            recorder.clear()

    def finish(self) -> list[list[Interval]]:
        """Per recorder, what was recorded since, counted from the meeting."""
        clocks_us = [(recorder, self._clock_us.get(id(recorder), 0.0)) for recorder in self._recorders()]
        return [[shifted(i, -clock_us) for i in recorder.intervals()] for recorder, clock_us in clocks_us]


def shifted(interval: Interval, by_us: float) -> Interval:
    """The same, so much later."""
    return dataclasses.replace(interval, start_us=interval.start_us + by_us, end_us=interval.end_us + by_us)


def gather_recording(own: Sequence[Interval], group: dist.ProcessGroup | None = None) -> dict[int, list[Interval]]:
    """Every rank's intervals, by rank within the group; collective."""
    everyones: list[list[Interval]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyones, list(own), group=group)
    return dict(enumerate(everyones))


def require_work(what: str, recordings: Iterable[Mapping[int, Sequence[Interval]]]) -> None:
    """Raise UnsupportedError where some rank was not seen to run anything in one of the recordings.

    Recordings are equal on all ranks, and so is the error: nobody goes on to draw what is not there.
    """
    silent = {rank for recording in recordings for rank, intervals in recording.items() if not intervals}
    if silent:
        raise UnsupportedError(f"nothing was seen to run in {what} on the ranks {sorted(silent)}")


def require_path(what: str, config: OverlapConfig, record: OpRecord) -> None:
    """Raise UnsupportedError where a linear took another path than `config` forces; the same on all ranks."""
    asked = (config.linear.fprop if record.pass_name == "fprop" else config.linear.dgrad).path
    if record.path not in (asked, "local") and asked != "auto":
        raise UnsupportedError(f"{what} {asked} was asked for and {record.path} taken: {record.reason}")


@dataclasses.dataclass
class Recorded:
    """What `record` found, once its with-block has ended: every rank's intervals, equal on all ranks."""

    by_rank: dict[int, list[Interval]] = dataclasses.field(default_factory=dict)


@contextmanager
def record(
    contexts: OverlapContext | Callable[[], Sequence[OverlapContext]],
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
) -> Iterator[Recorded]:
    """Collect what the overlapped operations do inside the with-block, on all ranks. Collective at both ends.

    Args:
        contexts: one context made with `OverlapConfig(record=True)`, or a function that returns some, such as
            `plugin.contexts.open_contexts`, for contexts that layers may make inside the block.
        group: the ranks that record together; default: the group of the context, else the default group.
        device: whose work to wait for at the start; default: the context's, else the current GPU or the CPU.

    Raises ConfigError if a context does not record. After an exception in the block nothing is gathered.
    """
    if isinstance(contexts, OverlapContext):
        one = contexts
        group, device = group or one.group, device or one.device
        if one.recorder is None:
            raise ConfigError("this context does not record; make it with OverlapConfig(record=True)")
    if device is None:
        members = dist.group.WORLD if group is None else group
        on_gpus = torch.cuda.is_available() and members is not None and torch.device("cuda") in members._device_types
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpus else torch.device("cpu")

    def recorders() -> list[Recorder]:
        open_ones = [contexts] if isinstance(contexts, OverlapContext) else contexts()
        return [context.recorder for context in open_ones if context.recorder is not None]

    session, recorded = Session(recorders), Recorded()
    session.start(group, device)
    yield recorded
    own = [interval for intervals in session.finish() for interval in intervals]
    recorded.by_rank = gather_recording(own, group)


def export(
    by_rank: Mapping[int, Sequence[Interval]],
    folder: str | Path,
    *,
    name: str = "",
    title: str = "",
    caption: str = "",
) -> list[Path]:
    """Write `[name_]trace.json` and, where matplotlib is installed, `[name_]timeline.png`; the files written."""
    folder, prefix = Path(folder), f"{name}_" if name else ""
    files = [write_perfetto(folder / f"{prefix}trace.json", by_rank)]
    if missing_matplotlib() is None:
        files.append(draw_timeline(folder / f"{prefix}timeline.png", by_rank, title=title, caption=caption))
    return files
