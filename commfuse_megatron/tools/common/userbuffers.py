"""Transformer Engine's userbuffers: the memory of the overlaps that Megatron's `--tp-comm-overlap` turns on."""

import importlib.util
import os
import sys
import warnings
from contextlib import redirect_stdout
from typing import Any

import torch


def missing_userbuffers(device: torch.device) -> str | None:
    """Why userbuffers cannot run on `device`, None if they should."""
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine is not installed: pip install 'commfuse-megatron[te]'"
    if device.type != "cuda":
        return "userbuffers need CUDA devices"
    if os.environ.get("UB_SKIPMC") != "1":
        return "set UB_SKIPMC=1: userbuffers would use NVLink multicast, which not every machine survives"
    return None


def open_userbuffers(shape: tuple[int, int], group_size: int, dtype: torch.dtype) -> None:
    """Make the buffers, for activations [M, hidden] of the whole sequence. Collective; `close_userbuffers` ends it."""
    base = _base()
    with redirect_stdout(sys.stderr), warnings.catch_warnings():  # it prints; stdout is for results
        warnings.simplefilter("ignore")
        base.initialize_ub(
            shape=list(shape),
            tp_size=group_size,
            quantization_modes=[base.UserBufferQuantizationMode.NONE],
            dtype=dtype,
            bootstrap_backend="gloo",
        )


def close_userbuffers() -> None:
    """Free the buffers. Collective."""
    _base().destroy_ub()


def _base() -> Any:
    from transformer_engine.pytorch.module import base

    return base
