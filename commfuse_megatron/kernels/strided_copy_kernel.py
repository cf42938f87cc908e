"""The device code of `bind_copy`. Imports Triton, so only that file imports this one, when it first launches."""

import triton
import triton.language as tl


@triton.jit
def strided_copy_kernel(
    target,
    source,
    rows,
    blocks,
    seconds,
    target_stride_0: tl.int64,
    target_stride_1: tl.int64,
    target_stride_2: tl.int64,
    target_stride_3: tl.int64,
    source_stride_0: tl.int64,
    source_stride_1: tl.int64,
    source_stride_2: tl.int64,
    source_stride_3: tl.int64,
    RUNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block copies BLOCK elements of [rows, RUNS, WIDTH], the last of which lie one behind the other."""
    pair = tl.program_id(0) // blocks
    index = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    first, second = (pair // seconds).to(tl.int64), (pair % seconds).to(tl.int64)
    column, run = index % WIDTH, (index // WIDTH) % RUNS
    row = index // (RUNS * WIDTH)
    mask = row < rows
    row, run = row.to(tl.int64), run.to(tl.int64)
    from_here = source + first * source_stride_0 + second * source_stride_1
    to_here = target + first * target_stride_0 + second * target_stride_1
    found = tl.load(from_here + row * source_stride_2 + run * source_stride_3 + column, mask=mask)
    tl.store(to_here + row * target_stride_2 + run * target_stride_3 + column, found, mask=mask)
