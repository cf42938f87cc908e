"""The device code of the GEMM whose tiles wait for flags and are counted. The warps of a block have four parts.

One warp loads, and waits for rows of `a`; two groups of four warps multiply half a tile each; for each group one warp
stores what it is handed, and counts it when it is in memory. So neither waits nor counts hold up the matrix units:
loads run ahead by the stages of the ring, and half a tile is stored and counted while the next one is multiplied.

Written in Gluon, because Triton's own pipeliner and signals exclude each other. Imports Triton, so only
`signal_variant.py` imports this file, when it first compiles.

The table (int32) has four words for every tile, in the order of computation: its first row, the end of its chunk, its
first column, its chunk. Behind them are, for every chunk, the flag that its rows of `a` wait for, the counter of its
half tiles, the row of the partials minus that of `out`, and one flag for each partial. A flag or counter of -1 is none.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


class Constants:
    """Compile-time constants by name: one argument of a device function instead of many."""

    def __init__(self, values: dict[str, int]) -> None:
        self._values = tuple(values.items())
        for name, value in self._values:
            setattr(self, name, gl.constexpr(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constants) and self._values == other._values

    def __hash__(self) -> int:
        return hash(self._values)

    def __repr__(self) -> str:  # becomes a part of the names of device functions
        return "_".join(str(int(value)) for _, value in self._values)


# Labels are local to the braces. The fence orders what was written before the flag was set with loads by TMA.
_WAIT = gl.constexpr("""{
    .reg .pred is_set;
    .reg .b32 seen;
again:
    ld.acquire.sys.global.b32 seen, [$1];
    setp.eq.b32 is_set, seen, $2;
    @is_set bra done;
    nanosleep.u32 40;
    bra again;
done:
    fence.proxy.async;
    mov.b32 $0, seen;
}""")
# Every lane waits for the stores that it issued, until they are in memory; then one lane may speak for all.
_WAIT_FOR_STORES = gl.constexpr("""{
    cp.async.bulk.wait_group 0;
    fence.proxy.async;
    bar.warp.sync 0xffffffff;
    mov.b32 $0, $1;
}""")


@gluon.jit
def _wait_for_flag(flags, index, value):
    if index >= 0:
        gl.inline_asm_elementwise(_WAIT, "=r,l,r", [flags + index, value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_tiles(a, b, table, flags, flag_value, a_ring, b_ring, full, empty, num_tiles, K, shape: gl.constexpr):
    """The loading warp."""
    stage = 0
    phase = 1
    last_chunk = -1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = gl.load(table + tile * 4)
        col = gl.load(table + tile * 4 + 2)
        if shape.waits:
            chunk = gl.load(table + tile * 4 + 3)
            if chunk != last_chunk:
                words = table + num_tiles * 4 + chunk * (3 + shape.partials)
                _wait_for_flag(flags, gl.load(words), flag_value)
            last_chunk = chunk
        for k in range(0, K, shape.block_k):
            here = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            mbarrier.expect(here, shape.stage_bytes)
            tma.async_copy_global_to_shared(a, [row, k], here, a_ring.index(2 * stage))
            tma.async_copy_global_to_shared(a, [row + shape.half_m, k], here, a_ring.index(2 * stage + 1))
            if shape.b_k_inner:
                tma.async_copy_global_to_shared(b, [col, k], here, b_ring.index(stage))
            else:
                tma.async_copy_global_to_shared(b, [k, col], here, b_ring.index(stage))
            stage += 1
            wraps = stage == shape.stages
            phase = phase ^ wraps.to(gl.int32)
            stage = gl.where(wraps, 0, stage)


@gluon.jit
def _store_tiles(out, partials, partial_rows, table, flags, flag_value, counters, staging, staged, unstaged, arrived,
                 taken, num_tiles, half: gl.constexpr, shape: gl.constexpr):  # fmt: skip
    """The storing warp of a group. It also brings partials, to where results are handed over afterwards.

    Rows whose tile holds some of the next chunk have been stored by the group.
    """
    phase = 0
    taken_phase = 0
    last_chunk = -1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row = gl.load(table + tile * 4)
        is_whole = row + 2 * shape.half_m <= gl.load(table + tile * 4 + 1)
        col = gl.load(table + tile * 4 + 2)
        chunk = gl.load(table + tile * 4 + 3)
        words = table + num_tiles * 4 + chunk * (3 + shape.partials)
        row += half * shape.half_m
        if shape.partials > 0:
            shift = gl.load(words + 2)
            if shift != shape.no_partials:
                for index in range(shape.partials):
                    if chunk != last_chunk:
                        _wait_for_flag(flags, gl.load(words + 3 + index), flag_value)
                    for piece in gl.static_range(shape.pieces):
                        if index > 0:
                            mbarrier.wait(taken.index(piece), taken_phase)
                        mbarrier.expect(arrived.index(piece), shape.piece_bytes)
                        corner = [row + shift + index * partial_rows, col + piece * shape.piece_n]
                        tma.async_copy_global_to_shared(partials, corner, arrived.index(piece), staging.index(piece))
                    taken_phase = taken_phase ^ gl.where(index > 0, 1, 0)
                last_chunk = chunk
        for piece in gl.static_range(shape.pieces):
            mbarrier.wait(staged.index(piece), phase)
            if is_whole:
                tma.async_copy_shared_to_global(out, [row, col + piece * shape.piece_n], staging.index(piece))
                tma.store_wait(0)  # it has been read
            mbarrier.arrive(unstaged.index(piece))
        phase = phase ^ 1
        if shape.counts:
            counter = gl.load(words + 1)
            if counter >= 0:
                counter = gl.inline_asm_elementwise(_WAIT_FOR_STORES, "=r,r", [counter], dtype=gl.int32,
                                                    is_pure=False, pack=1)  # fmt: skip
                gl.atomic_add(counters + counter, 1, sem="release", scope="sys")


@gluon.jit
def _add_arrived(part, piece: gl.constexpr, is_last, staging, arrived, taken, phase, shape: gl.constexpr):
    """Half a tile plus one partial of it, in fp32."""
    width: gl.constexpr = part.shape[1]
    if width > shape.piece_n:
        left, right = part.reshape(shape.half_m, 2, width // 2).permute(0, 2, 1).split()
        count: gl.constexpr = width // (2 * shape.piece_n)
        left = _add_arrived(left, piece, is_last, staging, arrived, taken, phase, shape)
        right = _add_arrived(right, piece + count, is_last, staging, arrived, taken, phase, shape)
        part = gl.join(left, right).permute(0, 2, 1).reshape(shape.half_m, width)
    else:
        mbarrier.wait(arrived.index(piece), phase)
        part += staging.index(piece).load(part.type.layout).to(gl.float32)
        mbarrier.arrive(taken.index(piece), pred=not is_last)
    return part


@gluon.jit
def _hand_over(part, piece: gl.constexpr, out_at, row, col, end_row, is_whole, N, out_stride, staging, staged, unstaged,
               phase, shape: gl.constexpr):  # fmt: skip
    """A group's half tile, in pieces: rounds once, gives it to the storing warp."""
    width: gl.constexpr = part.shape[1]
    if width > shape.piece_n:
        left, right = part.reshape(shape.half_m, 2, width // 2).permute(0, 2, 1).split()
        count: gl.constexpr = width // (2 * shape.piece_n)
        _hand_over(left, piece, out_at, row, col, end_row, is_whole, N, out_stride, staging, staged, unstaged, phase,
                   shape)  # fmt: skip
        _hand_over(right, piece + count, out_at, row, col + width // 2, end_row, is_whole, N, out_stride, staging,
                   staged, unstaged, phase, shape)  # fmt: skip
    else:
        rounded = part.to(out_at.dtype.element_ty)
        mbarrier.wait(unstaged.index(piece), phase)
        if is_whole:
            staging.index(piece).store(rounded)
            fence_async_shared()
        else:
            layout: gl.constexpr = part.type.layout
            rows = row + gl.arange(0, shape.half_m, gl.SliceLayout(1, layout))
            cols = col + gl.arange(0, shape.piece_n, gl.SliceLayout(0, layout))
            mask = (rows < end_row)[:, None] & (cols < N)[None, :]
            gl.store(out_at + (rows.to(gl.int64) * out_stride)[:, None] + cols[None, :], rounded, mask=mask)
        gl.thread_barrier()  # all have stored before one of them says so
        mbarrier.arrive(staged.index(piece))


@gluon.jit
def _multiply_tiles(out_at, table, a_ring, b_ring, full, empty, staging, staged, unstaged, arrived, taken, num_tiles, N,
                    K, out_stride, half: gl.constexpr, shape: gl.constexpr):  # fmt: skip
    """One group of four warps: half a tile after the other."""
    gl.assume(K > 0)  # a loop that might not run makes ptxas wait behind every single wgmma
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, shape.block_n, 16])
    stage = 0
    phase = 0
    staging_phase = 1
    arrived_phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc = gl.zeros([shape.half_m, shape.block_n], gl.float32, layout)
        previous = 0
        for k in range(0, K, shape.block_k):
            mbarrier.wait(full.index(stage), phase)
            b_tile = b_ring.index(stage)
            if shape.b_k_inner:
                b_tile = b_tile.permute((1, 0))
            acc = warpgroup_mma(a_ring.index(2 * stage + half), b_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index(previous), pred=k > 0)
            previous = stage
            stage += 1
            wraps = stage == shape.stages
            phase = phase ^ wraps.to(gl.int32)
            stage = gl.where(wraps, 0, stage)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(previous))

        row = gl.load(table + tile * 4)
        end_row = gl.load(table + tile * 4 + 1)
        col = gl.load(table + tile * 4 + 2)
        is_whole = row + 2 * shape.half_m <= end_row
        if shape.partials > 0:
            chunk = gl.load(table + tile * 4 + 3)
            if gl.load(table + num_tiles * 4 + chunk * (3 + shape.partials) + 2) != shape.no_partials:
                for index in range(shape.partials):
                    is_last = index == shape.partials - 1
                    acc = _add_arrived(acc, 0, is_last, staging, arrived, taken, arrived_phase, shape)
                    acc = gl.convert_layout(acc, layout, assert_trivial=True)
                    arrived_phase = arrived_phase ^ 1
        _hand_over(acc, 0, out_at, row + half * shape.half_m, col, end_row, is_whole, N, out_stride, staging, staged,
                   unstaged, staging_phase, shape)  # fmt: skip
        staging_phase = staging_phase ^ 1


@gluon.jit
def _make_barriers(number: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for index in gl.static_range(number):
        mbarrier.init(barriers.index(index), count=count)
    return barriers


@gluon.jit
def signal_matmul_kernel(
    a,
    b,
    out,
    out_at,
    partials,
    table,
    flags,
    counters,
    flag_value: gl.int32,
    num_tiles: gl.int32,
    N: gl.int32,
    K: gl.int32,
    partial_rows: gl.int32,
    out_stride: gl.int64,
    shape: gl.constexpr,
):
    """out = a @ b (+ partials of the rows that have some). a, b, out, partials: TMA descriptors, `out_at`: address.

    partial_rows: from a row of one partial to the same row of the next.
    Block i computes tiles i, i + blocks, ... of the table.
    """
    a_ring = gl.allocate_shared_memory(a.dtype, [2 * shape.stages, shape.half_m, shape.block_k], a.layout)
    if shape.b_k_inner:
        b_ring = gl.allocate_shared_memory(b.dtype, [shape.stages, shape.block_n, shape.block_k], b.layout)
    else:
        b_ring = gl.allocate_shared_memory(b.dtype, [shape.stages, shape.block_k, shape.block_n], b.layout)
    staging_0 = gl.allocate_shared_memory(out.dtype, [shape.pieces, shape.half_m, shape.piece_n], out.layout)
    staging_1 = gl.allocate_shared_memory(out.dtype, [shape.pieces, shape.half_m, shape.piece_n], out.layout)
    full = _make_barriers(shape.stages, 1)
    empty = _make_barriers(shape.stages, 2)  # both groups
    staged_0 = _make_barriers(shape.pieces, 1)
    staged_1 = _make_barriers(shape.pieces, 1)
    unstaged_0 = _make_barriers(shape.pieces, 1)
    unstaged_1 = _make_barriers(shape.pieces, 1)
    arrived_0 = _make_barriers(shape.pieces, 1)
    arrived_1 = _make_barriers(shape.pieces, 1)
    taken_0 = _make_barriers(shape.pieces, 1)
    taken_1 = _make_barriers(shape.pieces, 1)
    fence_async_shared()
    zero: gl.constexpr = gl.constexpr(0)
    one: gl.constexpr = gl.constexpr(1)
    # Registers: 65536 = 128 x (2 x 232 + 40), where the four single warps (one is idle) make up a group.
    gl.warp_specialize(
        [
            (_multiply_tiles, (out_at, table, a_ring, b_ring, full, empty, staging_0, staged_0, unstaged_0, arrived_0,
                               taken_0, num_tiles, N, K, out_stride, zero, shape)),
            (_multiply_tiles, (out_at, table, a_ring, b_ring, full, empty, staging_1, staged_1, unstaged_1, arrived_1,
                               taken_1, num_tiles, N, K, out_stride, one, shape)),
            (_load_tiles, (a, b, table, flags, flag_value, a_ring, b_ring, full, empty, num_tiles, K, shape)),
            (_store_tiles, (out, partials, partial_rows, table, flags, flag_value, counters, staging_0, staged_0,
                            unstaged_0, arrived_0, taken_0, num_tiles, zero, shape)),
            (_store_tiles, (out, partials, partial_rows, table, flags, flag_value, counters, staging_1, staged_1,
                            unstaged_1, arrived_1, taken_1, num_tiles, one, shape)),
        ],
        [4, 1, 1, 1],
        [232, 40, 40, 40],
    )  # fmt: skip
