"""The files that `commfuse trace` and `commfuse demo` write of a recording, and where they say they are."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.markup import escape

from commfuse_megatron.tools.common.output import results
from commfuse_megatron.tools.common.pictures import missing_matplotlib
from commfuse_megatron.tools.trace.perfetto import write_perfetto


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
