"""Pictures drawn to files, never to a window. Needs matplotlib, an extra that is imported when one is asked for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commfuse_megatron.errors import UnsupportedError


def missing_matplotlib() -> str | None:
    """Why no picture can be drawn here, None if one can."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "drawing a picture needs matplotlib: pip install 'commfuse-megatron[plot]'"
    return None


@contextmanager
def drawn(path: str | Path, num_panels: int, size_in: tuple[float, float]) -> Iterator[tuple[Any, Any]]:
    """(figure, axes of panels below each other), written to `path` at the end; makes its folder.

    Raises UnsupportedError without matplotlib, naming the extra.
    """
    reason = missing_matplotlib()
    if reason is not None:
        raise UnsupportedError(reason)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_in, dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure, figure.subplots(num_panels, 1, squeeze=False)[:, 0]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
