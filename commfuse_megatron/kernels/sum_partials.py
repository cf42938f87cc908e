"""`sum_partials`: the sum that ends a direct reduce-scatter, in a fixed order and with one rounding.

Knows tensors; must not know where the partials came from.
"""

import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels.support import has_triton

__all__ = ["sum_partials"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BLOCK = 2048
NUM_WARPS = 4
MAX_COLS = 2**31 - BLOCK  # columns are counted in 32 bits


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
    _check(own, partials, bias, out)
    if own.numel() == 0:
        return out
    if own.is_cuda and has_triton():
        return _sum_on_gpu(own, partials, bias, out)
    return _sum_in_torch(own, partials, bias, out)


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


def _sum_on_gpu(
    own: torch.Tensor, partials: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    from commfuse_megatron.kernels.sum_kernel import sum_partials_kernel

    rows, cols = own.shape
    is_flat = bias is None and own.is_contiguous() and out.is_contiguous() and _has_flat_rows(partials)
    if is_flat and rows * cols <= MAX_COLS:
        rows, cols = 1, rows * cols  # one long row: no ragged ends
    grid = (rows * -(-cols // BLOCK),)
    with torch.cuda.device(own.device):
        sum_partials_kernel[grid](
            own, partials, bias, out, cols, own.stride(0), out.stride(0), partials.stride(0), partials.stride(1),
            NUM_PARTIALS=partials.shape[0], HAS_BIAS=bias is not None, WIDE=own.dtype == torch.float64, BLOCK=BLOCK,
            num_warps=NUM_WARPS,
        )  # fmt: skip
    return out


def _has_flat_rows(partials: torch.Tensor) -> bool:
    return partials.shape[0] == 0 or partials.shape[1] == 1 or partials.stride(1) == partials.shape[2]


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
    devices = {tensor.device for tensor in (own, partials, bias, out) if tensor is not None}
    if len(devices) != 1:
        raise ShapeError(f"sum_partials: tensors are on several devices: {sorted(map(str, devices))}.")
    for name, tensor in (("own", own), ("partials", partials), ("bias", bias), ("out", out)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise UnsupportedError(f"sum_partials: {name} is {tensor.dtype}; it must be one of {DTYPES}.")
    kinds = (own.dtype, partials.dtype, out.dtype)
    if own.dtype not in (partials.dtype, torch.float32) or (torch.float64 in kinds and len(set(kinds)) > 1):
        raise UnsupportedError(
            f"sum_partials: own is {own.dtype}, partials are {partials.dtype}, out is {out.dtype}; own has the "
            "partials' dtype or is float32, and float64 goes with float64 only."
        )
    _check_out_apart(own, partials, out)


def _check_out_apart(own: torch.Tensor, partials: torch.Tensor, out: torch.Tensor) -> None:
    """`out` may be `own`; any other overlap would be read after it was written."""
    same = own.data_ptr() == out.data_ptr() and own.dtype == out.dtype and own.stride() == out.stride()
    for name, tensor in (("own", own), ("partials", partials)):
        if tensor.numel() == 0 or (same and name == "own"):
            continue
        start, end = _byte_range(tensor)
        out_start, out_end = _byte_range(out)
        if start < out_end and out_start < end:
            raise ShapeError(f"sum_partials: out overlaps {name} in memory. Pass another out.")


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
