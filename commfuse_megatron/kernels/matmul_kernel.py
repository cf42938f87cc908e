"""The device code of the persistent GEMM: one kernel, whose switches are compile-time constants.

Owns what happens inside a block; must not know tensors or heuristics (`matmul_variant.py` does). Imports Triton, so
only that file imports this one, when it first compiles. The two counters of a shared product are zero between launches:
the last block to find no tile makes them so.
"""

import triton
import triton.language as tl

ADDEND_NONE = tl.constexpr(0)
ADDEND_POINTER = tl.constexpr(1)  # any strides
ADDEND_TMA = tl.constexpr(2)  # rows contiguous, aligned
ADDEND_ROW = tl.constexpr(3)  # the same row for every m: a bias


@triton.jit
def _tile_origin(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of the tile's first element: GROUP_M tiles down, then one across, for the sake of L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    group = tile // tiles_in_group
    first_m = group * GROUP_M
    group_height = min(tiles_m - first_m, GROUP_M)
    within = tile % tiles_in_group
    return (first_m + within % group_height) * BLOCK_M, (within // group_height) * BLOCK_N


@triton.jit
def _load_operand(
    x,
    outer,
    inner,
    outer_size,
    inner_size,
    stride,
    BLOCK_OUTER: tl.constexpr,
    BLOCK_INNER: tl.constexpr,
    TMA: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Tile [BLOCK_OUTER, BLOCK_INNER] of an operand whose inner dim is contiguous; zero outside of it."""
    if TMA:
        tile = x.load([outer, inner])
    else:
        if ALIGNED:  # says to the compiler that 16-byte loads are legal, mask included
            stride = stride // 8 * 8
            inner_size = inner_size // 8 * 8
        outer_index = outer + tl.arange(0, BLOCK_OUTER)
        inner_index = inner + tl.arange(0, BLOCK_INNER)
        mask = (outer_index < outer_size)[:, None] & (inner_index < inner_size)[None, :]
        # 64 bits: an operand may hold more than 2**31 elements.
        offsets = (outer_index.to(tl.int64) * stride)[:, None] + inner_index[None, :]
        tile = tl.load(x + offsets, mask=mask, other=0.0)
    return tile


@triton.jit
def _multiply(
    a,
    b,
    row,
    col,
    M,
    N,
    K,
    a_stride,
    b_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    A_TMA: tl.constexpr,
    A_K_INNER: tl.constexpr,
    A_ALIGNED: tl.constexpr,
    B_TMA: tl.constexpr,
    B_K_INNER: tl.constexpr,
    B_ALIGNED: tl.constexpr,
):
    """One fp32 output tile."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        k = step * BLOCK_K
        if A_K_INNER:
            a_tile = _load_operand(a, row, k, M, K, a_stride, BLOCK_M, BLOCK_K, A_TMA, A_ALIGNED)
        else:
            a_tile = _load_operand(a, k, row, K, M, a_stride, BLOCK_K, BLOCK_M, A_TMA, A_ALIGNED).T
        if B_K_INNER:
            b_tile = _load_operand(b, col, k, N, K, b_stride, BLOCK_N, BLOCK_K, B_TMA, B_ALIGNED).T
        else:
            b_tile = _load_operand(b, k, col, K, N, b_stride, BLOCK_K, BLOCK_N, B_TMA, B_ALIGNED)
        acc = tl.dot(a_tile, b_tile, acc)
    return acc


@triton.jit
def _write(
    acc,
    out,
    addend,
    row,
    col,
    M,
    N,
    out_stride_m,
    out_stride_n,
    addend_stride_m,
    addend_stride_n,
    addend_stride_p,
    addend_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUT_TMA: tl.constexpr,
    OUT_N_INNER: tl.constexpr,
    ADDEND: tl.constexpr,
    ADDENDS: tl.constexpr,
):
    """Adds the addend in fp32, rounds once, stores: an element of it is read before that of `out` is written."""
    rows = row + tl.arange(0, BLOCK_M)
    cols = col + tl.arange(0, BLOCK_N)
    mask = (rows < M)[:, None] & (cols < N)[None, :]
    if ADDEND == ADDEND_TMA:
        for index in tl.static_range(ADDENDS):
            acc += addend.load([row + index * addend_rows, col]).to(tl.float32)
    elif ADDEND == ADDEND_ROW:
        bias = tl.load(addend + cols.to(tl.int64) * addend_stride_n, mask=cols < N, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    elif ADDEND == ADDEND_POINTER:
        offsets = (rows.to(tl.int64) * addend_stride_m)[:, None] + (cols.to(tl.int64) * addend_stride_n)[None, :]
        for index in tl.static_range(ADDENDS):
            acc += tl.load(addend + index * addend_stride_p + offsets, mask=mask, other=0.0).to(tl.float32)
    if OUT_TMA:
        out.store([row, col], acc.to(out.dtype))
    elif OUT_N_INNER:
        offsets = (rows.to(tl.int64) * out_stride_m)[:, None] + cols[None, :]
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)
    else:
        offsets = (rows.to(tl.int64) * out_stride_m)[:, None] + (cols.to(tl.int64) * out_stride_n)[None, :]
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write_in_parts(
    acc,
    out,
    addend,
    row,
    col,
    M,
    N,
    out_stride_m,
    out_stride_n,
    addend_stride_m,
    addend_stride_n,
    addend_stride_p,
    addend_rows,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUT_TMA: tl.constexpr,
    OUT_N_INNER: tl.constexpr,
    ADDEND: tl.constexpr,
    ADDENDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """`_write`, in 1, 2 or 4 parts along N: the staging buffer in shared memory need hold one part only."""
    if PARTS == 1:
        _write(acc, out, addend, row, col, M, N, out_stride_m, out_stride_n, addend_stride_m, addend_stride_n,
               addend_stride_p, addend_rows, BLOCK_M, BLOCK_N, OUT_TMA, OUT_N_INNER, ADDEND, ADDENDS)  # fmt: skip
    else:
        # Thread for thread, the split only renames registers: the accumulator's layout repeats along N.
        HALF_N: tl.constexpr = BLOCK_N // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF_N).permute(0, 2, 1).split()
        _write_in_parts(left, out, addend, row, col, M, N, out_stride_m, out_stride_n, addend_stride_m,
                        addend_stride_n, addend_stride_p, addend_rows, BLOCK_M, HALF_N, OUT_TMA, OUT_N_INNER,
                        ADDEND, ADDENDS, PARTS // 2)  # fmt: skip
        _write_in_parts(right, out, addend, row, col + HALF_N, M, N, out_stride_m, out_stride_n, addend_stride_m,
                        addend_stride_n, addend_stride_p, addend_rows, BLOCK_M, HALF_N, OUT_TMA, OUT_N_INNER,
                        ADDEND, ADDENDS, PARTS // 2)  # fmt: skip


@triton.jit
def persistent_matmul_kernel(
    a,
    b,
    out,
    addend,
    counters,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    total_blocks: tl.int32,
    a_stride: tl.int64,
    b_stride: tl.int64,
    out_stride_m: tl.int64,
    out_stride_n: tl.int64,
    addend_stride_m: tl.int64,
    addend_stride_n: tl.int64,
    addend_stride_p: tl.int64,
    addend_rows: tl.int32,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PARTS: tl.constexpr,
    A_TMA: tl.constexpr,
    A_K_INNER: tl.constexpr,
    A_ALIGNED: tl.constexpr,
    B_TMA: tl.constexpr,
    B_K_INNER: tl.constexpr,
    B_ALIGNED: tl.constexpr,
    OUT_TMA: tl.constexpr,
    OUT_N_INNER: tl.constexpr,
    ADDEND: tl.constexpr,
    ADDENDS: tl.constexpr,
    SHARES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    """out = a @ b (+ addend); each matrix is a TMA descriptor where its switch says so, else a pointer.

    Several addends lie `addend_stride_p` elements apart; by TMA they are one matrix, `addend_rows` rows apart.

    Block i computes tiles i, i + blocks, ... Where two launches share the tiles of one product (SHARES), a block takes
    the next free one from counters[0]; counters[1] counts the blocks, `total_blocks` of both launches, that found none.
    """
    tl.assume(K > 0)  # an inner loop that always runs can be fused with the loop over tiles (FLATTEN)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    if SHARES:
        # The first tile is taken like all others, not by block index: a block that waits for its SM holds no tile back.
        tile = tl.atomic_add(counters, 1, sem="relaxed")
        while tile < tiles:
            row, col = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            acc = _multiply(a, b, row, col, M, N, K, a_stride, b_stride, BLOCK_M, BLOCK_N, BLOCK_K,
                            A_TMA, A_K_INNER, A_ALIGNED, B_TMA, B_K_INNER, B_ALIGNED)  # fmt: skip
            _write_in_parts(acc, out, addend, row, col, M, N, out_stride_m, out_stride_n, addend_stride_m,
                            addend_stride_n, addend_stride_p, addend_rows, BLOCK_M, BLOCK_N, OUT_TMA, OUT_N_INNER,
                            ADDEND, ADDENDS, PARTS)  # fmt: skip
            tile = tl.atomic_add(counters, 1, sem="relaxed")
        # A block comes here once, after its last access to counters[0]: when all have come, nobody touches it any more.
        if tl.atomic_add(counters + 1, 1, sem="acq_rel") == total_blocks - 1:
            tl.atomic_xchg(counters, 0, sem="relaxed")
            tl.atomic_xchg(counters + 1, 0, sem="relaxed")
    else:
        for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
            row, col = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
            acc = _multiply(a, b, row, col, M, N, K, a_stride, b_stride, BLOCK_M, BLOCK_N, BLOCK_K,
                            A_TMA, A_K_INNER, A_ALIGNED, B_TMA, B_K_INNER, B_ALIGNED)  # fmt: skip
            _write_in_parts(acc, out, addend, row, col, M, N, out_stride_m, out_stride_n, addend_stride_m,
                            addend_stride_n, addend_stride_p, addend_rows, BLOCK_M, BLOCK_N, OUT_TMA, OUT_N_INNER,
                            ADDEND, ADDENDS, PARTS)  # fmt: skip
