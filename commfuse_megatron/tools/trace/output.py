"""What every kind of trace says of its machine and writes beside its table, and `commfuse demo` of its run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from commfuse_megatron.tools.common.output import results, say_count
from commfuse_megatron.tools.common.pictures import missing_matplotlib
from commfuse_megatron.tools.common.ranks import Rank
from commfuse_megatron.tools.trace.perfetto import write_perfetto

if TYPE_CHECKING:
    from commfuse_megatron.runtime.recorder import Interval


MOST_RANKS_DRAWN = 4


def write_files(place: str | Path, recording: Mapping[Any, Any], draw: Callable[[Path], Path]) -> None:
    """Write `place`.json for Perfetto and, where matplotlib is installed, `place`.png, by `draw`; say where they are.

    recording: of one run, rank -> intervals, or of several, name -> such a recording.
    """
    console = results()
    trace = write_perfetto(f"{place}.json", recording)
    console.print(f"trace     {escape(str(trace))} (open it in ui.perfetto.dev)", soft_wrap=True)
    reason = missing_matplotlib()
    if reason is None:
        console.print(f"picture   {escape(str(draw(Path(f'{place}.png'))))}", soft_wrap=True)
    else:
        console.print(f"no picture: {escape(reason)}", soft_wrap=True)


def shown_ranks(recording: Mapping[int, Sequence[Interval]]) -> dict[int, Sequence[Interval]]:
    """The first ranks, as many as a picture has room for; the trace holds all."""
    return {rank: recording[rank] for rank in sorted(recording)[:MOST_RANKS_DRAWN]}


def hardware(rank: Rank) -> dict[str, Any]:
    """What a result was measured on, for JSON."""
    import torch

    return {
        "group_size": rank.world_size,
        "device": rank.device_name,
        "torch": torch.__version__,
        "cuda_device_max_connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "month": time.strftime("%Y-%m"),
    }


def machine_line(rank: Rank, transport: str, dtype: str) -> str:
    """The same for people: ranks, device, transport, dtype."""
    if rank.device_type == "cpu":
        return f"{say_count(rank.world_size, 'rank')} on the CPU, {transport}, {dtype}"
    return f"{rank.world_size} x {rank.device_name}, {transport}, {dtype}"


def caption(rank: Rank, transport: str, dtype: str) -> str:
    """The last line of a picture."""
    return f"{machine_line(rank, transport, dtype)}, {time.strftime('%B %Y')}"
