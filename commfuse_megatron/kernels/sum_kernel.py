"""The device code of `sum_partials`. Imports Triton, so only that file imports this one, when it first launches."""

import triton
import triton.language as tl


@triton.jit
def sum_partials_kernel(
    own,
    partials,
    bias,
    out,
    cols,
    own_stride: tl.int64,
    out_stride: tl.int64,
    partial_stride: tl.int64,
    partial_row_stride: tl.int64,
    NUM_PARTIALS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block sums BLOCK columns of one row: own, then the partials in their order, then the bias; one rounding."""
    blocks_per_row = tl.cdiv(cols, BLOCK)
    row = (tl.program_id(0) // blocks_per_row).to(tl.int64)
    index = (tl.program_id(0) % blocks_per_row) * BLOCK + tl.arange(0, BLOCK)
    mask = index < cols
    ACC: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = tl.load(own + row * own_stride + index, mask=mask).to(ACC)
    first = partials + row * partial_row_stride
    if NUM_PARTIALS <= 16:  # all loads in flight at once
        for p in tl.static_range(NUM_PARTIALS):
            total += tl.load(first + p * partial_stride + index, mask=mask).to(ACC)
    else:
        for p in tl.range(NUM_PARTIALS, loop_unroll_factor=8):
            total += tl.load(first + p * partial_stride + index, mask=mask).to(ACC)
    if HAS_BIAS:
        total += tl.load(bias + index, mask=mask).to(ACC)
    tl.store(out + row * out_stride + index, total.to(out.dtype.element_ty), mask=mask)
