"""Sizes of one problem and how its rows are cut: plain numbers, no torch.

Rows are positions of the sequence axis; one row of a [S, B, H] tensor is B * H contiguous elements. Shards follow
`torch.tensor_split`: the first S mod R ranks hold one row more. Chunks cut a shard in the same way.
"""

from dataclasses import dataclass

__all__ = ["DTYPE_BYTES", "GemmProblem", "RowRange", "chunk_ranges", "shard_range", "split_range"]

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` up to, not including, `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of rows, 0 if empty."""
        return self.stop - self.start


def split_range(rows: RowRange, parts: int) -> tuple[RowRange, ...]:
    """Cut a range into `parts` contiguous ranges as `torch.tensor_split` does: the first ones hold one row more."""
    base, extra = divmod(rows.size, parts)
    ranges = []
    start = rows.start
    for part in range(parts):
        stop = start + base + (part < extra)
        ranges.append(RowRange(start, stop))
        start = stop
    return tuple(ranges)


def shard_range(total_rows: int, group_size: int, group_rank: int) -> RowRange:
    """The rows that `group_rank` keeps of a sequence of `total_rows`."""
    return split_range(RowRange(0, total_rows), group_size)[group_rank]


def chunk_ranges(total_rows: int, group_size: int, chunks_per_shard: int) -> tuple[tuple[RowRange, ...], ...]:
    """Row ranges of all chunks: `result[owner_rank][index]`. Some are empty when rows are few."""
    return tuple(split_range(shard, chunks_per_shard) for shard in split_range(RowRange(0, total_rows), group_size))


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """One pass of one linear, as seen by a rank: equal on all ranks of the group.

    op: "all_gather_linear", "linear_reduce_scatter" or "embedding_reduce_scatter" (K is 1, the weight a vocabulary).
    pass_name: "fprop" or "backward".
    rows, batch: S and B of the full sequence, so M = S * B tokens.
    N, K: output and input features of this rank's weight.
    needs: which gradients a backward pass must produce ("" in fprop).
    """

    op: str
    pass_name: str
    rows: int
    batch: int
    N: int
    K: int
    dtype: str
    group_size: int
    needs: str = ""

    @property
    def M(self) -> int:
        """Tokens of the full sequence."""
        return self.rows * self.batch

    @property
    def flops(self) -> int:
        """Floating-point operations of this rank's GEMMs in this pass."""
        gemms = 1 if self.pass_name == "fprop" else sum(kind in self.needs.split("+") for kind in ("input", "weight"))
        return 2 * self.M * self.N * self.K * gemms

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest shard on the wire: rows of x (all-gather) or of y (reduce-scatter)."""
        features = self.K if self.op == "all_gather_linear" else self.N
        largest_shard = -(-self.rows // self.group_size)
        return largest_shard * self.batch * features * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        needs = f" needs {self.needs}" if self.needs else ""
        return (
            f"{self.op} {self.pass_name} S={self.rows} B={self.batch} N={self.N} K={self.K} {self.dtype} "
            f"over {self.group_size} ranks{needs}"
        )
