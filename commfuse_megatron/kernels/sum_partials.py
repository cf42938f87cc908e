"""`sum_partials`: the sum that ends a direct reduce-scatter, in a fixed order and with one rounding.

Knows tensors; must not know where the partials came from. As in `persistent_matmul.py`, all that follows from shapes,
strides, dtypes and alignment is worked out once and kept as a plan.
"""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels.launch import Launcher, complete_signature, make_launcher
from commfuse_megatron.kernels.support import has_triton, raw_stream

TRITON_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}
BLOCK = 2048
NUM_WARPS = 4
MAX_COLS = 2**31 - BLOCK  # columns are counted in 32 bits
MAX_PLANS = 4096


def sum_partials(
    own: torch.Tensor, partials: torch.Tensor, *, bias: torch.Tensor | None = None, out: torch.Tensor
) -> torch.Tensor:
    """`own + partials[0] + ... + bias` in `out`: added in that order in fp32 (fp64 for fp64), rounded once.

    The same bits on CPU and GPU, and from run to run. Not differentiable.

    Shapes:
        own       [rows, N]      dtype of the partials, or float32; rows contiguous
        partials  [P, rows, N]   any P from 0; rows contiguous
        bias      [N]            contiguous, any floating dtype
        out       [rows, N]      any floating dtype; rows contiguous; may be `own` itself

    Returns: `out`.

    Raises: ShapeError, UnsupportedError.

    Cost: one pass over the inputs at memory bandwidth.
    """
    own_at, partials_at, out_at = own.data_ptr(), partials.data_ptr(), out.data_ptr()
    bias_at, bias_key = None, None
    if bias is not None:
        bias_at = bias.data_ptr()
        bias_key = (bias.shape, bias.stride(), bias.dtype, bias.get_device(), bias_at & 15)
    key = (
        (own.shape, own.stride(), own.dtype, own.get_device(), own_at & 15),
        (partials.shape, partials.stride(), partials.dtype, partials.get_device(), partials_at & 15),
        bias_key,
        (out.shape, out.stride(), out.dtype, out.get_device(), out_at & 15),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(own, partials, bias, out, own.device)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    plan.check_apart(own_at, partials_at, bias_at, out_at)
    if plan.num_blocks == 0:
        return out
    if plan.kind is None:
        return _sum_in_torch(own, partials, bias, out)
    if plan.device_index == torch.cuda.current_device():
        plan.launch(own_at, partials_at, bias_at, out_at)
    else:
        with torch.cuda.device(plan.device_index):
            plan.launch(own_at, partials_at, bias_at, out_at)
    return out


def bind_sum(
    own: torch.Tensor,
    partials: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    device: torch.device | None = None,
) -> Callable[[int, int, int, int | None, int], None] | None:
    """`sum_partials` for tensors like these: `f(handle of the stream, addresses of own, partials, bias, out)`.

    The addresses must be as aligned as these tensors'. None where no kernel of ours does it.

    device: where it will run, if these are tensors on "meta", which count as aligned to 16 bytes.
    """
    plan = _make_plan(own, partials, bias, out, device or own.device)
    if plan.kind is None:
        return None
    return plan.launch_on


def _sum_in_torch(
    own: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    wide = torch.float64 if own.dtype == torch.float64 else torch.float32
    total = own.to(wide, copy=True)
    for partial in partials:
        total += partial
    if bias is not None:
        total += bias.to(wide)
    return out.copy_(total)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a compiled kernel depends on. `is_aligned`: 16-byte accesses are legal for all tensors and rows."""

    own: torch.dtype
    partials: torch.dtype
    bias: torch.dtype | None
    out: torch.dtype
    num_partials: int
    is_aligned: bool


@dataclass(slots=True)
class _Plan:
    """Everything about a call but its addresses; `kind` is None where torch sums."""

    device_index: int
    kind: _Kind | None
    num_blocks: int
    spans: tuple[int, int, int, int]  # bytes from start to end of own, partials, bias, out
    may_be_out: bool  # own, by shape and dtype
    tail: tuple[Any, ...]
    launcher: Launcher | None = None

    def check_apart(self, own_at: int, partials_at: int, bias_at: int | None, out_at: int) -> None:
        """`out` may be `own`; from any other overlap, what was written would be read."""
        own_span, partials_span, bias_span, out_span = self.spans
        out_end = out_at + out_span
        if bias_at is not None and bias_at < out_end and out_at < bias_at + bias_span:
            raise ShapeError("sum_partials: out overlaps bias in memory. Pass another out.")
        if partials_at < out_end and out_at < partials_at + partials_span:
            raise ShapeError("sum_partials: out overlaps partials in memory. Pass another out.")
        if own_at < out_end and out_at < own_at + own_span and not (own_at == out_at and self.may_be_out):
            raise ShapeError("sum_partials: out overlaps own in memory without being the same. Pass another out.")

    def launch(self, *addresses: int | None) -> None:
        """Launch on the current stream of the current device, which is the tensors' device."""
        self.launch_on(raw_stream(self.device_index), *addresses)

    def launch_on(self, stream: int, *addresses: int | None) -> None:
        """Launch on a stream, by its handle."""
        launcher = self.launcher
        if launcher is None:
            assert self.kind is not None
            with _load_lock:  # ranks may be threads
                compiled = _load_once(self.device_index, self.kind)
            launcher = self.launcher = make_launcher(compiled, self.num_blocks, (None,) * 4, self.tail)
        launcher(stream, *addresses)


_plans: dict[Any, _Plan] = {}
_load_lock = threading.RLock()


@functools.cache
def _load_once(device_index: int, kind: _Kind) -> Any:
    return compile_sum(kind)


def _make_plan(
    own: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, device: torch.device
) -> _Plan:
    _check(own, partials, bias, out)
    rows, cols = own.shape
    has_flat_rows = partials.shape[0] == 0 or rows == 1 or partials.stride(1) == cols
    if bias is None and own.is_contiguous() and out.is_contiguous() and has_flat_rows and rows * cols <= MAX_COLS:
        rows, cols = 1, rows * cols  # one long row: no ragged ends
    num_partials = partials.shape[0]
    strides = (own.stride(0), out.stride(0), partials.stride(0), partials.stride(1)) if rows > 1 else (
        0, 0, partials.stride(0) if num_partials > 1 else 0, 0
    )  # fmt: skip
    tensors = [tensor for tensor in (own, partials, bias, out) if tensor is not None]
    is_aligned = all(tensor.data_ptr() % 16 == 0 for tensor in tensors) and all(n % 16 == 0 for n in (cols, *strides))
    kind = None
    if device.type == "cuda" and has_triton():
        dtypes = (own.dtype, partials.dtype, None if bias is None else bias.dtype, out.dtype)
        kind = _Kind(*dtypes, num_partials=num_partials, is_aligned=is_aligned)
    return _Plan(
        device_index=-1 if device.index is None else device.index,
        kind=kind,
        num_blocks=rows * -(-cols // BLOCK),
        spans=(_span_bytes(own), _span_bytes(partials), 0 if bias is None else _span_bytes(bias), _span_bytes(out)),
        may_be_out=own.dtype == out.dtype and own.stride() == out.stride(),
        tail=() if kind is None else (cols, *strides, *_constants(kind).values()),
    )


def _constants(kind: _Kind) -> dict[str, Any]:
    """The kernel's constexpr arguments, in their order."""
    return {
        "NUM_PARTIALS": kind.num_partials,
        "HAS_BIAS": kind.bias is not None,
        "WIDE": kind.own == torch.float64,
        "BLOCK": BLOCK,
    }


def compile_sum(kind: _Kind, target: Any = None) -> Any:
    """Triton's compiled kernel, for the current device or a given `GPUTarget`."""
    import triton
    from triton.compiler import ASTSource

    from commfuse_megatron.kernels.sum_kernel import sum_partials_kernel

    constants = _constants(kind)
    if kind.bias is None:
        constants["bias"] = None
    pointers = {"own": kind.own, "partials": kind.partials, "bias": kind.bias, "out": kind.out}
    types = {name: f"*{TRITON_NAMES[dtype]}" for name, dtype in pointers.items() if dtype is not None}
    names = sum_partials_kernel.arg_names
    signature = complete_signature(names, types, constants)
    # Addresses are multiples of 16 bytes, columns and strides multiples of 16 elements.
    divisible = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in constants}
    source = ASTSource(
        sum_partials_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        divisible if kind.is_aligned else {},
    )
    return triton.compile(source, target=target, options={"num_warps": NUM_WARPS})


def _check(own: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if own.dim() != 2 or out.shape != own.shape or partials.dim() != 3 or partials.shape[1:] != own.shape:
        raise ShapeError(
            f"sum_partials: own {tuple(own.shape)}, partials {tuple(partials.shape)} and out {tuple(out.shape)} "
            "must be [rows, N], [P, rows, N] and [rows, N]."
        )
    if bias is not None and (bias.shape != own.shape[1:] or not bias.is_contiguous()):
        raise ShapeError(f"sum_partials: bias {tuple(bias.shape)} must be a contiguous [{own.shape[1]}].")
    if own.shape[1] > 1 and not own.stride(1) == out.stride(1) == partials.stride(2) == 1:
        raise ShapeError(
            f"sum_partials: rows must be contiguous; strides are own {own.stride()}, partials {partials.stride()}, "
            f"out {out.stride()}."
        )
    if own.shape[0] > 1 and out.stride(0) < out.shape[1]:
        raise ShapeError(f"sum_partials: rows of out overlap: shape {tuple(out.shape)}, strides {out.stride()}.")
    if own.shape[1] > MAX_COLS:
        raise ShapeError(f"sum_partials: rows of {own.shape[1]} elements go beyond {MAX_COLS}.")
    devices = {tensor.device for tensor in (own, partials, bias, out) if tensor is not None}
    if len(devices) != 1:
        raise ShapeError(f"sum_partials: tensors are on several devices: {sorted(map(str, devices))}.")
    for name, tensor in (("own", own), ("partials", partials), ("bias", bias), ("out", out)):
        if tensor is not None and tensor.dtype not in TRITON_NAMES:
            raise UnsupportedError(f"sum_partials: {name} is {tensor.dtype}; it must be one of {list(TRITON_NAMES)}.")
    kinds = (own.dtype, partials.dtype, out.dtype)
    if own.dtype not in (partials.dtype, torch.float32) or (torch.float64 in kinds and len(set(kinds)) > 1):
        raise UnsupportedError(
            f"sum_partials: own is {own.dtype}, partials are {partials.dtype}, out is {out.dtype}; own has the "
            "partials' dtype or is float32, and float64 goes with float64 only."
        )


def _span_bytes(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
