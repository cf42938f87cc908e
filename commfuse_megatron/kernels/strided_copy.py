"""`bind_copy`: a copy between two views of equal shape, on addresses, for tapes.

Knows shapes, strides and dtypes; must not know what is copied. Dimensions that lie one behind the other in both views
become one, so that pieces of many heads are copied in long rows.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from commfuse_megatron.kernels.launch import Launcher, complete_signature, make_launcher
from commfuse_megatron.kernels.sum_partials import TRITON_NAMES
from commfuse_megatron.kernels.support import has_triton

BLOCK = 2048
NUM_WARPS = 4
_DIMENSIONS = 5
_MOST_ELEMENTS = 2**31 - BLOCK  # of one block of rows, counted in 32 bits


class CopyKind(NamedTuple):
    """What a compiled kernel depends on. is_aligned: rows begin on 16 bytes in both views."""

    dtype: torch.dtype
    runs: int
    width: int
    is_aligned: bool


class _Merged(NamedTuple):
    """Sizes and strides of a copy of up to five dimensions, with leading ones of size 1 to make it five."""

    sizes: tuple[int, ...]
    target: tuple[int, ...]
    source: tuple[int, ...]


def merge_dimensions(target: torch.Tensor, source: torch.Tensor) -> _Merged | None:
    """The same copy in as few dimensions as there can be; None where five are not enough, or the last is strided."""
    dims: list[list[int]] = []  # size, stride in the target, in the source
    for size, to_stride, from_stride in zip(target.shape, target.stride(), source.stride(), strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * to_stride and dims[-1][2] == size * from_stride:
            dims[-1] = [dims[-1][0] * size, to_stride, from_stride]
        else:
            dims.append([size, to_stride, from_stride])
    if not dims or dims[-1][1:] != [1, 1]:
        dims.append([1, 1, 1])
    if len(dims) > _DIMENSIONS:
        return None
    padded = [[1, 0, 0]] * (_DIMENSIONS - len(dims)) + dims
    sizes, to_strides, from_strides = (tuple(each) for each in zip(*padded, strict=True))
    return _Merged(sizes, to_strides, from_strides)


def bind_copy(
    target: torch.Tensor, source: torch.Tensor, *, device: torch.device, is_aligned: bool
) -> Callable[[int, int, int], None] | None:
    """target = source for views like these: `f(handle of the stream, address of target, of source)`.

    is_aligned: the addresses are multiples of 16 bytes. None where no kernel of ours does it.
    """
    merged = merge_dimensions(target, source)
    is_served = device.type == "cuda" and has_triton() and target.dtype == source.dtype and target.dtype in TRITON_NAMES
    if merged is None or not is_served or not target.numel():
        return None
    firsts, seconds, rows, runs, width = merged.sizes
    if rows * runs * width > _MOST_ELEMENTS:
        return None
    strides = (*merged.target[:4], *merged.source[:4])
    per_load = 16 // target.element_size()
    kind = CopyKind(target.dtype, runs, width, is_aligned and not any(n % per_load for n in (*strides, width)))
    blocks = -(-rows * runs * width // BLOCK)
    tail = (rows, blocks, seconds, *strides, *_constants(kind).values())
    made: list[Launcher] = []

    def launch(stream: int, target_at: int, source_at: int) -> None:
        if not made:
            with _load_lock:  # ranks may be threads
                compiled = _load_once(device.index, kind)
            made.append(make_launcher(compiled, firsts * seconds * blocks, (None, None), tail))
        made[0](stream, target_at, source_at)

    return launch


_load_lock = threading.RLock()


@functools.cache
def _load_once(device_index: int, kind: CopyKind) -> Any:
    return compile_copy(kind)


def _constants(kind: CopyKind) -> dict[str, Any]:
    """The kernel's constexpr arguments, in their order."""
    return {"RUNS": kind.runs, "WIDTH": kind.width, "BLOCK": BLOCK}


def compile_copy(kind: CopyKind, target: Any = None) -> Any:
    """Triton's compiled kernel, for the current device or a given `GPUTarget`."""
    import triton
    from triton.compiler import ASTSource

    from commfuse_megatron.kernels.strided_copy_kernel import strided_copy_kernel

    constants, names = _constants(kind), strided_copy_kernel.arg_names
    pointer = f"*{TRITON_NAMES[kind.dtype]}"
    signature = complete_signature(names, {"target": pointer, "source": pointer}, constants)
    bytes_of = {name: 16 for name in ("target", "source")}
    # Strides are multiples of what a load of 16 bytes takes.
    bytes_of |= {name: 16 // kind.dtype.itemsize for name in names if "stride" in name}
    divisible = {(names.index(name),): [["tt.divisibility", number]] for name, number in bytes_of.items()}
    source = ASTSource(
        strided_copy_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        divisible if kind.is_aligned else {},
    )
    return triton.compile(source, target=target, options={"num_warps": NUM_WARPS})
