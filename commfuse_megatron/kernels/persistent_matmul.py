"""`persistent_matmul`: a GEMM that keeps to a given number of SMs. The host side: checks, launch.

Knows tensors and streams; must not know why SMs are left free. To save host time, all that follows from shapes,
strides, dtypes and alignment is worked out once and kept as a `_Plan`; a call looks its plan up, fills descriptors and
launches. Plans hold numbers and compiled code, never a tensor.
"""

import functools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels.launch import Launcher, View, make_launcher
from commfuse_megatron.kernels.matmul_variant import (
    ADDEND_TMA,
    Layout,
    Variant,
    choose_variant,
    compile_variant,
    outer_stride,
    span_bytes,
)
from commfuse_megatron.kernels.support import (
    multiprocessor_count,
    persistent_matmul_unavailable_reason,
    raw_stream,
    supports_tma,
)
from commfuse_megatron.kernels.tiles import Tile

MAX_SIZE = 2**31 - 512  # tile coordinates are 32 bits
MAX_PLANS = 4096  # shapes that vary from call to call must not fill the memory


class TileShare(NamedTuple):
    """One of two launches that compute the tiles of one product together, each taking the next free one.

    For SMs that become free while the product runs: the first launch takes the SMs that are free at once, the second is
    put on another stream behind whatever occupies the rest. Both launches must be made, with equal operands.

    counter_at: address of a counter, two int32 that are zero, and that no other pair uses before both launches are
    done; they are zero again then. first_sms, second_sms: blocks of the two launches. is_second: which one this is.
    """

    counter_at: int
    first_sms: int
    second_sms: int
    is_second: bool


def persistent_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor,
    addend: torch.Tensor | None = None,
    num_sms: int | None = None,
    tile: Tile | None = None,
    share: TileShare | None = None,
) -> torch.Tensor:
    """`a @ b (+ addend)` by `num_sms` persistent blocks, so that the other SMs are free for communication.

    Equals `(a.float() @ b.float() + addend.float()).to(out.dtype)` but for the order of summation: one rounding.
    Bit-identical from run to run, shared or not, and for every `num_sms` that leads to the same tile shape. Not
    differentiable.

    Shapes:
        a       [M, K]   bfloat16 or float16; one of its strides is 1
        b       [K, N]   same dtype and device; one of its strides is 1
        addend  [M, N]   dtype of a, or float32; any strides (`bias.expand(M, N)`); `out` itself: accumulates in place;
                         [P, M, N]: all P are added, in order
        out     [M, N]   dtype of a, or float32; any strides without overlap
    M, N, K are any sizes from 0. fprop is (x, w.t()), dgrad (dy, w), wgrad (dy.t(), x).

    Args:
        num_sms: number of blocks; default one for each SM of the device.
        tile: instead of the one that `tiles.choose_tile` would take; for benchmarks.
        share: compute only what the other of two launches does not; gives the number of blocks.

    Returns: `out`.

    Raises, before anything is launched: ShapeError for sizes, strides, overlap or devices that do not fit together;
        UnsupportedError for a dtype, device or installation that the kernel does not serve.

    Cost: operands whose base and row stride are multiples of 16 bytes travel by TMA, others by masked pointer loads,
        several times slower. Speed: docs/results/linears_h200_202611.md.
    """
    a_at, b_at, out_at = a.data_ptr(), b.data_ptr(), out.data_ptr()
    addend_at, addend_key = None, None
    if addend is not None:
        addend_at = addend.data_ptr()
        addend_key = (addend.shape, addend.stride(), addend.dtype, addend.get_device(), not addend_at & 15)
    # Everything that a plan depends on, validity included: plain tuples here, `Layout`s of them in `_make_plan`.
    key = (
        (a.shape, a.stride(), a.dtype, a.get_device(), not a_at & 15),
        (b.shape, b.stride(), b.dtype, b.get_device(), not b_at & 15),
        (out.shape, out.stride(), out.dtype, out.get_device(), not out_at & 15),
        addend_key,
        num_sms,
        tile,
        None if share is None else share[1:],
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(*key)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    _check_apart(plan, a_at, b_at, out_at, addend_at)
    if plan.variant is None:
        return _without_product(out, addend)
    if plan.out.device_index == torch.cuda.current_device():
        plan.launch(a_at, b_at, out_at, addend_at, share)
    else:
        with torch.cuda.device(plan.out.device_index):
            plan.launch(a_at, b_at, out_at, addend_at, share)
    return out


@dataclass(slots=True)
class _Plan:
    """Everything about a call but its addresses. `variant` is None where nothing is multiplied."""

    a: Layout
    b: Layout
    out: Layout
    addend: Layout | None
    variant: Variant | None
    num_blocks: int
    spans: tuple[int, ...]  # bytes from start to end of a, b, out, addend
    views: tuple[View | None, ...]  # of a, b, out, addend and the counter: None where the kernel takes a pointer
    tail: tuple[Any, ...]  # the kernel's arguments after the addresses
    launcher: Launcher | None = None

    def launch(self, a_at: int, b_at: int, out_at: int, addend_at: int | None, share: TileShare | None) -> None:
        """Launch on the current stream of the current device, which is the tensors' device."""
        device_index = self.out.device_index
        variant, launcher = self.variant, self.launcher
        assert variant is not None
        if launcher is None:
            compiled = _load(device_index, variant)
            launcher = self.launcher = make_launcher(compiled, self.num_blocks, self.views, self.tail)
        counter_at = None if share is None else share.counter_at
        launcher(raw_stream(device_index), a_at, b_at, out_at, addend_at, counter_at)


_plans: dict[Any, _Plan] = {}
_load_lock = threading.RLock()


def _load(device_index: int, variant: Variant) -> Any:
    """The variant's compiled kernel; ranks may be threads, so one at a time."""
    with _load_lock:
        return _load_once(device_index, variant)


@functools.cache
def _load_once(device_index: int, variant: Variant) -> Any:
    return compile_variant(variant)  # one object per device: it holds the module loaded there


def _without_product(out: torch.Tensor, addend: torch.Tensor | None) -> torch.Tensor:
    """The result where M, N or K is 0."""
    if addend is None:
        return out.zero_()
    if addend.dim() == 3:
        total = addend[0].float()
        for other in addend[1:]:
            total = total + other
        addend = total
    return out if addend is out else out.copy_(addend)


# ---- checks and choices, once per kind of call ----


def _make_plan(
    a_key: tuple[Any, ...],
    b_key: tuple[Any, ...],
    out_key: tuple[Any, ...],
    addend_key: tuple[Any, ...] | None,
    num_sms: int | None,
    tile: Tile | None,
    share: tuple[int, int, bool] | None,
) -> _Plan:
    a, b, out = _layout("a", a_key), _layout("b", b_key), _layout("out", out_key)
    _check_inputs(a, b, num_sms)
    (M, K), N = a.shape, b.shape[1]
    if _overlaps_itself(out):
        raise ShapeError(f"persistent_matmul: out of shape {M}x{N} with strides {out.strides} overlaps itself.")
    _check_output("out", out, a, b)
    addend = None if addend_key is None else _addend_layout(addend_key)
    if addend is not None:
        _check_output("addend", addend, a, b)

    layouts = (a, b, out, addend)
    spans = tuple(0 if layout is None else span_bytes(layout) for layout in layouts)
    if 0 in (M, N, K):
        return _Plan(*layouts, None, 0, spans, (), ())
    if share is not None:
        if num_sms is not None or min(share[:2]) < 1:
            raise ShapeError(f"persistent_matmul: share gives the blocks, got num_sms {num_sms} and {share[:2]}.")
        num_sms = sum(share[:2])
    num_sms = num_sms or multiprocessor_count(a.device_index)
    allow_tma = supports_tma(a.device_index)
    variant = choose_variant(*layouts, num_sms=num_sms, shares=share is not None, allow_tma=allow_tma, tile=tile)
    if variant is None:
        raise ShapeError(
            f"persistent_matmul: a has strides {a.strides}, b has strides {b.strides}; one stride of each must be 1. "
            "Pass a contiguous copy."
        )
    a_stride = outer_stride(a, variant.a.last_dim_inner)
    b_stride = outer_stride(b, variant.b.last_dim_inner)
    views = (
        _memory_view(a, variant.a.last_dim_inner) if variant.a.tma else None,
        _memory_view(b, variant.b.last_dim_inner) if variant.b.tma else None,
        _memory_view(out, True) if variant.out_tma else None,
        _tall_view(addend) if addend is not None and variant.addend_kind == ADDEND_TMA else None,
        None,
    )
    addend_strides = (0, 0, 0, 0)
    if addend is not None:
        addend_strides = (*addend.strides, addend.copy_stride, addend.copy_stride // max(1, addend.strides[0]))
    num_tiles = variant.tile.count(M, N)
    num_blocks = total_blocks = min(num_sms, num_tiles)
    if share is not None:
        both = tuple(min(blocks, num_tiles) for blocks in share[:2])
        num_blocks, total_blocks = both[share[2]], sum(both)
    tail = (M, N, K, total_blocks, a_stride, b_stride, *out.strides, *addend_strides, *variant.constants().values())
    return _Plan(*layouts, variant, num_blocks, spans, views, tail)


def _layout(name: str, key: tuple[Any, ...]) -> Layout:
    shape, strides, dtype, device_index, is_aligned = key
    if len(shape) != 2:
        raise ShapeError(f"persistent_matmul: {name} has shape {tuple(shape)}; a matrix is needed.")
    return Layout(tuple(shape), strides, dtype, device_index, is_aligned)


def _addend_layout(key: tuple[Any, ...]) -> Layout:
    shape, strides, dtype, device_index, is_aligned = key
    if len(shape) != 3:
        return _layout("addend", key)
    if shape[0] < 1:
        raise ShapeError(f"persistent_matmul: addend has shape {tuple(shape)}; pass None for no addend.")
    copies, copy_stride = shape[0], strides[0]
    return Layout(tuple(shape[1:]), strides[1:], dtype, device_index, is_aligned, copies, copy_stride)


def _tall_view(layout: Layout) -> View:
    """Several matrices, `copy_stride` apart, as one; the rows between two of them are never used."""
    view = _memory_view(layout, True)
    rows = layout.shape[0] + (layout.copies - 1) * layout.copy_stride // view.strides[0]
    return View((rows, layout.shape[1]), view.strides)


def _memory_view(layout: Layout, last_dim_inner: bool) -> View:
    """Shape and strides as a descriptor wants them: the contiguous dim last."""
    shape = layout.shape if last_dim_inner else layout.shape[::-1]
    return View(shape, (outer_stride(layout, last_dim_inner), 1))


def _check_inputs(a: Layout, b: Layout, num_sms: int | None) -> None:
    if a.shape[1] != b.shape[0]:
        raise ShapeError(
            f"persistent_matmul: a is {a.shape[0]}x{a.shape[1]} and b is {b.shape[0]}x{b.shape[1]}; "
            "the inner sizes differ."
        )
    if a.dtype != b.dtype:
        raise UnsupportedError(f"persistent_matmul: a is {a.dtype} and b is {b.dtype}; they must be the same.")
    if a.device_index != b.device_index:
        raise ShapeError(f"persistent_matmul: a is on CUDA device {a.device_index}, b on {b.device_index} (-1: none).")
    device = torch.device("cpu") if a.device_index < 0 else torch.device("cuda", a.device_index)
    reason = persistent_matmul_unavailable_reason(device, a.dtype)
    if reason is not None:
        raise UnsupportedError(f"{reason}.")
    if max(*a.shape, *b.shape) > MAX_SIZE:
        raise ShapeError(f"persistent_matmul: sizes {a.shape} and {b.shape} go beyond {MAX_SIZE}.")
    if num_sms is not None and num_sms < 1:
        raise ShapeError(f"persistent_matmul: num_sms is {num_sms}; at least 1 block is needed.")


def _check_output(name: str, layout: Layout, a: Layout, b: Layout) -> None:
    """`out` or `addend` against the inputs."""
    wanted = (a.shape[0], b.shape[1])
    if layout.shape != wanted:
        raise ShapeError(f"persistent_matmul: {name} has shape {layout.shape}; {wanted} is needed.")
    if layout.device_index != a.device_index:
        raise ShapeError(
            f"persistent_matmul: {name} is on CUDA device {layout.device_index}, a on {a.device_index} (-1: none)."
        )
    if layout.dtype not in (a.dtype, torch.float32):
        raise UnsupportedError(
            f"persistent_matmul: {name} is {layout.dtype}; beside inputs of {a.dtype} it must be {a.dtype} or float32."
        )


def _overlaps_itself(layout: Layout) -> bool:
    """Whether two elements share memory."""
    dims = sorted((stride, size) for stride, size in zip(layout.strides, layout.shape, strict=True) if size > 1)
    end = 1
    for stride, size in dims:
        if stride < end:
            return True
        end = stride * size
    return False


# ---- checks on addresses, at every call ----


def _check_apart(plan: _Plan, a_at: int, b_at: int, out_at: int, addend_at: int | None) -> None:
    """Refuses an `out` that overlaps a, b, or an addend other than `out` itself."""
    a_span, b_span, out_span, addend_span = plan.spans
    out_end = out_at + out_span
    if a_at < out_end and out_at < a_at + a_span:
        _check_pair("a", plan.a, a_at, plan.out, out_at)
    if b_at < out_end and out_at < b_at + b_span:
        _check_pair("b", plan.b, b_at, plan.out, out_at)
    if addend_at is not None and addend_at < out_end and out_at < addend_at + addend_span:
        assert plan.addend is not None
        if addend_at != out_at or plan.addend.copies > 1 or plan.addend[:3] != plan.out[:3]:
            _check_pair("addend", plan.addend, addend_at, plan.out, out_at)


def _check_pair(name: str, layout: Layout, at: int, out: Layout, out_at: int) -> None:
    """For address ranges that meet: fine only for column windows of one row-major buffer that lie side by side."""
    itemsize = out.dtype.itemsize
    pitch = out.strides[0] * itemsize
    offset = at - out_at
    if layout.strides == out.strides and layout.strides[1] == 1 and layout.dtype == out.dtype and pitch > 0:
        column = offset % pitch  # of the other's first element, counted from out's first column
        if column >= out.shape[1] * itemsize and column + layout.shape[1] * itemsize <= pitch:
            return
    raise ShapeError(
        f"persistent_matmul: out overlaps {name} in memory (out: shape {out.shape}, strides {out.strides}; {name}: "
        f"shape {layout.shape}, strides {layout.strides}, {offset} bytes further). Pass another out."
    )
