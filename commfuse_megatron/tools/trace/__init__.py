"""Recorded steps, made visible: a trace for Perfetto, a picture, and a meter of exposed communication."""

from commfuse_megatron.tools.trace.session import export, record

__all__ = ["export", "record"]
