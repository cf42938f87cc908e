"""Recorded steps, made visible: a trace for Perfetto, a picture, and a meter of exposed communication."""

from typing import Any

__all__ = ["export", "record"]


def __getattr__(name: str) -> Any:
    # The command line is in this room, too, and reads its options without torch.
    if name in __all__:
        from commfuse_megatron.tools.trace import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
