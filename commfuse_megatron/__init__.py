"""commfuse_megatron: tensor-parallel communication hidden under partial GEMMs, as a plugin for Megatron-Core.

    from commfuse_megatron import OverlapConfig, OverlapContext, ops

Importing this package touches neither CUDA nor Megatron; `commfuse_megatron.plugin` is what knows Megatron.
"""

from typing import TYPE_CHECKING, Any

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.version import __version__

if TYPE_CHECKING:
    from commfuse_megatron.runtime.context import OverlapContext

__all__ = ["OpRecord", "OverlapConfig", "OverlapContext", "__version__", "ops"]


def __getattr__(name: str) -> Any:
    # Torch is imported when it is first needed: `commfuse --help` and `schedule` do without it.
    if name == "ops":
        import importlib

        return importlib.import_module("commfuse_megatron.ops")
    if name == "OverlapContext":
        from commfuse_megatron.runtime.context import OverlapContext

        return OverlapContext
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
