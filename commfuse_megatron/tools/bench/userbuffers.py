"""Transformer Engine's userbuffers: `te.Linear` with the overlaps that Megatron's `--tp-comm-overlap` turns on.

Column: ring-exchange all-gather in fprop, bulk all-gather and reduce-scatter in backward. Row: pipelined reduce-scatter
in fprop, ring-exchange all-gather in backward. Its buffers have one shape, [M, hidden], so they are made anew when that
changes. A layer's backward pass frees what it needs, so one forward pass per timed backward runs before the clock does.
"""

import importlib.util
import os
import sys
import warnings
from contextlib import redirect_stdout
from typing import Any, override

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, Results, Variant, require_own_link


class Userbuffers(Variant):
    """`transformer_engine.pytorch.Linear` over userbuffers."""

    name = "userbuffers"
    is_foreign = True

    def __init__(self) -> None:
        self._shape: tuple[int, int] | None = None

    @override
    def build(self, work: Work) -> Ready:
        reason = missing_userbuffers(work.pool.device)
        if reason is not None:
            raise UnsupportedError(reason)
        require_own_link(work.pool.device, "userbuffers")
        shape = (work.case.M, work.case.shard_shape[1])
        if shape != self._shape:
            self.close()
            open_userbuffers(shape, work.case.group_size, work.pool.dtype)
            self._shape = shape
        o = work.operands
        layer = _make_layer(work)
        if work.pass_name == "fprop":

            def call() -> torch.Tensor:
                with torch.no_grad():
                    return layer(o.x)

            return Ready(call=call, results=lambda: {"y": call()}, path="userbuffers", transport="userbuffers")
        ahead: list[torch.Tensor] = []

        def run_ahead(calls: int) -> None:
            ahead[:] = [layer(o.x) for _ in range(calls)]

        def backward() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(ahead.pop(), [o.x, layer.weight], o.grad_y)

        def results() -> Results:
            run_ahead(1)
            # What it returns may lie in its communication buffer.
            return {name: grad.clone() for name, grad in zip(("x.grad", "weight.grad"), backward(), strict=True)}

        return Ready(
            call=backward, results=results, before_burst=run_ahead, path="userbuffers", transport="userbuffers"
        )

    @override
    def close(self) -> None:
        if self._shape is not None:
            close_userbuffers()
            self._shape = None


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


def _make_layer(work: Work) -> Any:
    from transformer_engine import pytorch as te

    case, is_column = work.case, work.case.gathers
    layer = te.Linear(
        in_features=case.K if is_column else case.K * case.group_size,
        out_features=case.N * case.group_size if is_column else case.N,
        sequence_parallel=True,
        tp_group=work.group,
        tp_size=case.group_size,
        bias=False,
        params_dtype=work.pool.dtype,
        parallel_mode="column" if is_column else "row",
        device="meta",
        ub_overlap_ag=True,
        ub_overlap_rs=not is_column,
        ub_bulk_dgrad=is_column,
        ub_bulk_wgrad=is_column,
        ub_name=case.name.split(".")[1],
    )
    # The same weight as everyone else's, not a copy; on "meta" nothing was allocated for its own.
    layer.weight = torch.nn.Parameter(work.operands.weight.detach())
    return layer
