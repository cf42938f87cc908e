"""Which compile-time variant of the kernel serves a call, and how to compile it. Pure data: needs no GPU.

Knows layouts; must not know tensors, streams or devices. Compiling goes through `compile_variant` alone, for the device
in hand as for the ahead-of-time test.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from commfuse_megatron.kernels.launch import complete_signature
from commfuse_megatron.kernels.tiles import POINTER_TILE, Tile, choose_tile

MAX_TMA_STRIDE_BYTES = 2**40
SHARED_BYTES = 227 * 1024  # what a block may use on capability 9.0
POINTER_SHARED_BYTES = 96 * 1024  # the least of what 8.x devices offer
BARRIER_BYTES = 1024  # more than the barriers and alignment take

# Values of the kernel's ADDEND switch; matmul_kernel.py has the same ones, and a test compares.
ADDEND_NONE, ADDEND_POINTER, ADDEND_TMA, ADDEND_ROW = range(4)

TRITON_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class Layout(NamedTuple):
    """All of a matrix that matters but its address and values."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    device_index: int  # -1: not on a CUDA device
    is_aligned: bool  # address is a multiple of 16 bytes
    copies: int = 1  # matrices of this layout, of an addend
    copy_stride: int = 0  # elements from one to the next


def span_bytes(layout: Layout) -> int:
    """Distance from the first element to the end of the last one."""
    if 0 in layout.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(layout.shape, layout.strides, strict=True))
    last += (layout.copies - 1) * layout.copy_stride
    return (last + 1) * layout.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Operand:
    """How the kernel reaches a or b: which dim is contiguous (`last_dim_inner`), and by which loads."""

    tma: bool
    last_dim_inner: bool
    is_aligned: bool  # 16-byte pointer loads are legal


def _contiguous_dim(layout: Layout) -> int | None:
    """The dim with stride 1, the last one if both; a dim of size 1 has any stride we like."""
    rows, cols = layout.shape
    if layout.strides[1] == 1 or cols == 1:
        return 1
    if layout.strides[0] == 1 or rows == 1:
        return 0
    return None


def outer_stride(layout: Layout, last_dim_inner: bool) -> int:
    """Stride of the dim that is not contiguous; for size 1, where it never counts, one that suits TMA."""
    outer = 0 if last_dim_inner else 1
    if layout.shape[outer] == 1:
        return -(-layout.shape[1 - outer] // 16) * 16
    return layout.strides[outer]


def _choose_operand(layout: Layout, allow_tma: bool) -> Operand | None:
    """None where neither stride is 1."""
    inner = _contiguous_dim(layout)
    if inner is None:
        return None
    itemsize = layout.dtype.itemsize
    stride = outer_stride(layout, last_dim_inner=inner == 1)
    stride_fits = layout.is_aligned and stride * itemsize % 16 == 0
    # Rows that overlap (an expanded operand has stride 0) are for pointers: a descriptor wants each row behind the last
    # one.
    tma = allow_tma and stride_fits and layout.shape[inner] <= stride and stride * itemsize < MAX_TMA_STRIDE_BYTES
    return Operand(
        tma=tma, last_dim_inner=inner == 1, is_aligned=stride_fits and layout.shape[inner] * itemsize % 16 == 0
    )


@dataclass(frozen=True, slots=True)
class Variant:
    """The switches of one compiled kernel."""

    tile: Tile
    parts: int
    a: Operand
    b: Operand
    out_tma: bool
    out_n_inner: bool
    addend_kind: int
    addends: int
    shares: bool
    dtype: torch.dtype
    out_dtype: torch.dtype
    addend_dtype: torch.dtype | None

    @property
    def flatten(self) -> bool:
        """Whether the loops over tiles and over K are one."""
        return self.tile.flatten and self.a.tma and self.b.tma and not self.shares

    @property
    def a_block(self) -> list[int]:
        """Block of a's descriptor, in memory order."""
        return _in_memory_order(self.tile.block_m, self.tile.block_k, self.a)

    @property
    def b_block(self) -> list[int]:
        """Block of b's descriptor, in memory order."""
        return _in_memory_order(self.tile.block_k, self.tile.block_n, self.b)

    @property
    def out_block(self) -> list[int]:
        """Block of the descriptors of out and addend."""
        return [self.tile.block_m, self.tile.block_n // self.parts]

    def constants(self) -> dict[str, Any]:
        """The kernel's constexpr arguments, in their order."""
        return {
            "BLOCK_M": self.tile.block_m,
            "BLOCK_N": self.tile.block_n,
            "BLOCK_K": self.tile.block_k,
            "GROUP_M": self.tile.group_m,
            "PARTS": self.parts,
            "A_TMA": self.a.tma,
            "A_K_INNER": self.a.last_dim_inner,
            "A_ALIGNED": self.a.is_aligned,
            "B_TMA": self.b.tma,
            "B_K_INNER": not self.b.last_dim_inner,
            "B_ALIGNED": self.b.is_aligned,
            "OUT_TMA": self.out_tma,
            "OUT_N_INNER": self.out_n_inner,
            "ADDEND": self.addend_kind,
            "ADDENDS": self.addends,
            "SHARES": self.shares,
            "FLATTEN": self.flatten,
        }


def _in_memory_order(rows: int, cols: int, operand: Operand) -> list[int]:
    return [rows, cols] if operand.last_dim_inner else [cols, rows]


def _can_store_by_tma(layout: Layout) -> bool:
    """Rows contiguous, aligned and apart."""
    stride = outer_stride(layout, last_dim_inner=True)
    return (
        (layout.strides[1] == 1 or layout.shape[1] == 1)
        and layout.is_aligned
        and stride * layout.dtype.itemsize % 16 == 0
        and layout.shape[1] <= stride
        and stride * layout.dtype.itemsize < MAX_TMA_STRIDE_BYTES
    )


def _addend_kind(addend: Layout | None, allow_tma: bool) -> int:
    if addend is None:
        return ADDEND_NONE
    if addend.copies == 1 and (addend.shape[0] == 1 or addend.strides[0] == 0):
        return ADDEND_ROW
    # Several are one tall matrix to a descriptor.
    is_tall = addend.copies == 1 or (addend.strides[0] > 0 and addend.copy_stride % addend.strides[0] == 0)
    return ADDEND_TMA if allow_tma and is_tall and _can_store_by_tma(addend) else ADDEND_POINTER


def _epilogue_parts(tile: Tile, itemsize: int, staged_itemsize: int, shared_bytes: int) -> int:
    """In how many parts a tile is stored: the fewest whose staging fits beside the stages of the K loop."""
    stages = tile.num_stages * (tile.block_m + tile.block_n) * tile.block_k * itemsize
    for parts in (1, 2, 4):
        if (
            parts >= tile.min_parts
            and stages + tile.block_m * tile.block_n // parts * staged_itemsize + BARRIER_BYTES <= shared_bytes
        ):
            return parts
    return 4


def choose_variant(
    a: Layout,
    b: Layout,
    out: Layout,
    addend: Layout | None,
    *,
    num_sms: int,
    shares: bool,
    allow_tma: bool,
    tile: Tile | None = None,
) -> Variant | None:
    """The variant for one call; None where a or b has no stride of 1. Sizes are at least 1 and fit together."""
    a_operand, b_operand = _choose_operand(a, allow_tma), _choose_operand(b, allow_tma)
    if a_operand is None or b_operand is None:
        return None
    out_tma = allow_tma and _can_store_by_tma(out)
    addend_kind = _addend_kind(addend, allow_tma)
    by_tma = a_operand.tma and b_operand.tma
    if tile is None:
        tile = choose_tile(*out.shape, num_sms) if by_tma else POINTER_TILE
    staged = out.dtype.itemsize
    if addend is not None and addend_kind != ADDEND_ROW:
        staged += addend.dtype.itemsize
    return Variant(
        tile=tile,
        parts=_epilogue_parts(tile, a.dtype.itemsize, staged, SHARED_BYTES if by_tma else POINTER_SHARED_BYTES),
        a=a_operand,
        b=b_operand,
        out_tma=out_tma,
        out_n_inner=out.strides[1] == 1,
        addend_kind=addend_kind,
        addends=1 if addend is None else addend.copies,
        shares=shares,
        dtype=a.dtype,
        out_dtype=out.dtype,
        addend_dtype=None if addend is None else addend.dtype,
    )


def compile_variant(variant: Variant, target: Any = None) -> Any:
    """Triton's compiled kernel, for the current device or a given `GPUTarget`."""
    import triton
    from triton.compiler import ASTSource

    from commfuse_megatron.kernels.matmul_kernel import persistent_matmul_kernel

    constants = variant.constants()
    dtype = TRITON_NAMES[variant.dtype]
    types = {
        "a": _argument_type(variant.a.tma, dtype, variant.a_block),
        "b": _argument_type(variant.b.tma, dtype, variant.b_block),
        "out": _argument_type(variant.out_tma, TRITON_NAMES[variant.out_dtype], variant.out_block),
    }
    if variant.addend_dtype is None:
        constants["addend"] = None
    else:
        by_tma = variant.addend_kind == ADDEND_TMA
        types["addend"] = _argument_type(by_tma, TRITON_NAMES[variant.addend_dtype], variant.out_block)
    if variant.shares:
        types["counters"] = "*i32"
    else:
        constants["counters"] = None
    names = persistent_matmul_kernel.arg_names
    attributes = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, operand in (("a", variant.a), ("b", variant.b))
        if operand.is_aligned and not operand.tma
    }
    source = ASTSource(
        persistent_matmul_kernel,
        complete_signature(names, types, constants),
        {(names.index(name),): value for name, value in constants.items()},
        attributes,
    )
    options = {"num_warps": variant.tile.num_warps, "num_stages": variant.tile.num_stages}
    return triton.compile(source, target=target, options=options)


def _argument_type(by_tma: bool, dtype: str, block: list[int]) -> str:
    return f"tensordesc<{dtype}[{block[0]}, {block[1]}]>" if by_tma else f"*{dtype}"
