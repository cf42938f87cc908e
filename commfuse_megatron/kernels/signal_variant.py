"""Tiles, table and compiled variants of the GEMM whose tiles signal: pure data, needs no GPU.

Knows chunks as rows and words; must not know tensors of operands, streams or who sets flags.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from commfuse_megatron.errors import ShapeError
from commfuse_megatron.kernels.launch import complete_signature
from commfuse_megatron.kernels.matmul_variant import TRITON_NAMES

BLOCK_K = 64
PIECE_N = 64  # columns that are handed over at once
GROUP_M = 8  # rows of tiles that are walked together, for the sake of L2
COUNTS_PER_TILE = 2  # its halves are counted one by one
NO_PARTIALS = -(2**31)  # where a chunk has none; the kernel is given the same value


class RowChunk(NamedTuple):
    """Rows of `a` and `out` that come, or go, together.

    first_row, end_row: the rows, `end_row` not among them.
    flag: index of the flag that says that these rows of `a` are here; None: they are from the beginning.
    counter: index of the counter of their finished half tiles; None: nobody waits for them.
    partials: for each partial that is added to these rows the index of the flag that says it is here, or None where it
        is from the beginning; empty: none is added.
    """

    first_row: int
    end_row: int
    flag: int | None = None
    counter: int | None = None
    partials: tuple[int | None, ...] = ()


@dataclass(frozen=True, slots=True)
class SignalTile:
    """What a block computes at once: two halves of `half_m` rows. speed: relative, at equal area."""

    half_m: int
    block_n: int
    stages: int
    speed: float

    @property
    def block_m(self) -> int:
        """Rows of a tile."""
        return 2 * self.half_m


# Of four tile shapes at 48 problems (eight linears; 2, 4 and 8 ranks; forward, dgrad), the two that are best somewhere:
# docs/results/gemm_h100_h200_202612.json.
SIGNAL_TILES = (
    SignalTile(64, 256, stages=3, speed=1.00),
    SignalTile(64, 128, stages=6, speed=0.97),
)


def choose_signal_tile(rows: Sequence[int], N: int, num_sms: int) -> SignalTile:
    """The tile with the least estimated time for chunks of so many rows: full waves times the time of one tile."""

    def estimated_time(tile: SignalTile) -> float:
        tiles = sum(-(-count // tile.block_m) for count in rows) * -(-N // tile.block_n)
        return -(-tiles // num_sms) * tile.block_m * tile.block_n / tile.speed

    return min(SIGNAL_TILES, key=estimated_time)


def _by_rows(chunk: RowChunk) -> tuple[int, int]:
    return chunk.first_row, chunk.end_row


def check_chunks(chunks: Sequence[RowChunk], M: int) -> None:
    """ShapeError unless every row is in exactly one chunk, and those with partials have equally many and touch."""
    end = 0
    for chunk in sorted(chunks, key=_by_rows):
        if chunk.first_row != end or chunk.end_row <= chunk.first_row:
            raise ShapeError(
                f"signal_matmul: chunk of rows {chunk.first_row} to {chunk.end_row} follows row {end}; "
                "chunks must cover every row once, and none may be empty."
            )
        end = chunk.end_row
    if end != M:
        raise ShapeError(f"signal_matmul: the chunks end at row {end}, and there are {M} rows.")
    added = sorted((chunk for chunk in chunks if chunk.partials), key=_by_rows)
    for before, after in itertools.pairwise(added):
        if len(before.partials) != len(after.partials) or before.end_row != after.first_row:
            raise ShapeError(
                f"signal_matmul: rows {before.first_row} to {before.end_row} get {len(before.partials)} partials, "
                f"rows {after.first_row} to {after.end_row} get {len(after.partials)}; rows with partials must be one "
                "range, with equally many each."
            )


def table_words(chunks: Sequence[RowChunk], N: int, tile: SignalTile) -> tuple[list[int], int]:
    """(the kernel's table, number of tiles); chunks are computed in the order given, and no tile is in two of them."""
    words: list[int] = []
    columns = range(0, N, tile.block_n)
    for index, chunk in enumerate(chunks):
        rows = range(chunk.first_row, chunk.end_row, tile.block_m)
        for first in range(0, len(rows), GROUP_M):
            for col in columns:
                for row in rows[first : first + GROUP_M]:
                    words += (row, chunk.end_row, col, index)
    num_tiles = len(words) // 4
    with_partials = [chunk for chunk in chunks if chunk.partials]
    first_row = min((chunk.first_row for chunk in with_partials), default=0)
    num_partials = max((len(chunk.partials) for chunk in chunks), default=0)
    for chunk in chunks:
        flags = chunk.partials or (None,) * num_partials
        words += (_word(chunk.flag), _word(chunk.counter), -first_row if chunk.partials else NO_PARTIALS)
        words += map(_word, flags)
    return words, num_tiles


def _word(index: int | None) -> int:
    return -1 if index is None else index


@dataclass(frozen=True, slots=True)
class SignalVariant:
    """The switches of one compiled kernel."""

    tile: SignalTile
    b_k_inner: bool
    waits: bool
    counts: bool
    partials: int
    dtype: torch.dtype

    @property
    def blocks(self) -> dict[str, list[int]]:
        """Blocks of the descriptors, in memory order."""
        tile = self.tile
        return {
            "a": [tile.half_m, BLOCK_K],
            "b": [tile.block_n, BLOCK_K] if self.b_k_inner else [BLOCK_K, tile.block_n],
            "out": [tile.half_m, PIECE_N],
            "partials": [tile.half_m, PIECE_N],
        }

    def constants(self) -> dict[str, int]:
        """The kernel's compile-time constants."""
        tile = self.tile
        return {
            "half_m": tile.half_m,
            "block_n": tile.block_n,
            "piece_n": PIECE_N,
            "pieces": tile.block_n // PIECE_N,
            "block_k": BLOCK_K,
            "stages": tile.stages,
            "stage_bytes": (tile.block_m + tile.block_n) * BLOCK_K * self.dtype.itemsize,
            "piece_bytes": tile.half_m * PIECE_N * self.dtype.itemsize,
            "b_k_inner": self.b_k_inner,
            "waits": self.waits,
            "counts": self.counts,
            "partials": self.partials,
            "no_partials": NO_PARTIALS,
        }


def compile_signal_variant(variant: SignalVariant, target: Any) -> Any:
    """Triton's compiled kernel for a `GPUTarget`."""
    import triton
    from triton.experimental.gluon._runtime import GluonASTSource
    from triton.experimental.gluon.language import NVMMASharedLayout

    from commfuse_megatron.kernels.signal_matmul_kernel import Constants, signal_matmul_kernel

    dtype = TRITON_NAMES[variant.dtype]
    layout = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * variant.dtype.itemsize, rank=2)
    types = {name: f"tensordesc<{dtype}[{rows}, {cols}],{layout!r}>" for name, (rows, cols) in variant.blocks.items()}
    types |= {"out_at": f"*{dtype}", "table": "*i32"}
    constants: dict[str, Any] = {"shape": Constants(variant.constants())}
    unused = {"partials": not variant.partials, "flags": not variant.waits and not variant.partials}
    unused["counters"] = not variant.counts
    types |= {"flags": "*i32", "counters": "*i32"}
    constants |= {name: None for name, is_unused in unused.items() if is_unused}
    names = signal_matmul_kernel.arg_names
    source = GluonASTSource(
        signal_matmul_kernel,
        complete_signature(names, types, constants),
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index("table"),): [["tt.divisibility", 16]]},
    )
    return triton.compile(source, target=target, options={"num_warps": 4})
