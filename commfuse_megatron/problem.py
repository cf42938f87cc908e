"""Sizes of one problem and how its rows are cut: plain numbers, no torch.

Rows are positions of the sequence axis; one row of a [S, B, H] tensor is B * H contiguous elements. Shards follow
`torch.tensor_split`: the first S mod R ranks hold one row more. Chunks cut a shard in the same way.
"""

import math
from dataclasses import dataclass, fields

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


class _Pass:
    """One pass of one operation on S * B tokens."""

    __slots__ = ()
    op: str
    pass_name: str
    rows: int
    batch: int

    @property
    def sends(self) -> bool:
        """Whether ranks have anything to send each other in this pass, whatever its plan."""
        return True

    @property
    def M(self) -> int:
        """Tokens of the full sequence."""
        return self.rows * self.batch

    @property
    def call(self) -> str:
        """Which pass of which operation this is."""
        return f"{self.op} {self.pass_name}"


@dataclass(frozen=True, slots=True)
class GemmProblem(_Pass):
    """One pass of one linear, as seen by a rank: equal on all ranks of the group.

    op: "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce", "linear_grad_all_reduce" or
    "embedding_reduce_scatter" (K is 1, the weight a vocabulary).
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
    def flops(self) -> int:
        """Floating-point operations of this rank's GEMMs in this pass."""
        gemms = 1 if self.pass_name == "fprop" else sum(kind in self.needs.split("+") for kind in ("input", "weight"))
        return 2 * self.M * self.N * self.K * gemms

    @property
    def sends(self) -> bool:
        """Whether ranks send anything: of the linears that all-reduce only in one of their passes."""
        if self.op == "linear_all_reduce":
            return self.pass_name == "fprop"
        return self.op != "linear_grad_all_reduce" or (self.pass_name == "backward" and "input" in self.needs)

    @property
    def all_reduces(self) -> bool:
        """Whether this pass sums a product over ranks, all rows of it for every rank."""
        return self.op in ("linear_all_reduce", "linear_grad_all_reduce") and self.sends

    @property
    def wire_features(self) -> int:
        """Features of the rows that travel: those of x or of its gradient, or those of y or of its gradient."""
        return self.K if self.op in ("all_gather_linear", "linear_grad_all_reduce") else self.N

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest shard on the wire: one owner's rows of `wire_features`."""
        largest_shard = -(-self.rows // self.group_size)
        return largest_shard * self.batch * self.wire_features * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        needs = f" needs {self.needs}" if self.needs else ""
        sizes = f"S={self.rows} B={self.batch} N={self.N} K={self.K}"
        return f"{self.call} {sizes} {self.dtype} over {self.group_size} ranks{needs}"


@dataclass(frozen=True, slots=True)
class VisibleKeys:
    """The keys that some consecutive queries need, and the band of them that each query sees.

    keys: rows of k and v. left, right: with the last query aligned to the last key of `keys` ("bottom right"), how many
    keys before and after its own position a query sees; None: all there are.
    """

    keys: RowRange
    left: int | None
    right: int | None

    @property
    def is_causal(self) -> bool:
        """Whether the band is the plain lower triangle, aligned bottom right."""
        return self.left is None and self.right == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttentionPass(_Pass):
    """What the two attentions share.

    rows, batch: S and B of the full sequence. heads, kv_heads: of queries, of keys and values (fewer: grouped queries).
    head_dim, value_dim: features per head of q and k, of v. left, right: how many keys before and after its own
    position a query sees, None: all. has_dropout: of attention probabilities.
    needs: which gradients the backward pass must produce, in fprop as well, since both take the same path: "input" (q,
    k, v), "weight"; "" where no backward pass follows.
    """

    op: str
    pass_name: str
    rows: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: str
    group_size: int
    left: int | None = None
    right: int | None = None
    has_dropout: bool = False
    needs: str = ""

    @property
    def _features(self) -> str:
        return f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}+{self.value_dim}"

    @property
    def _band(self) -> str:
        left, right = ("all" if bound is None else bound for bound in (self.left, self.right))
        return f"keys -{left}..+{right}"

    @property
    def _rest(self) -> str:
        extra = (" dropout" if self.has_dropout else "") + (f" needs {self.needs}" if self.needs else "")
        return f"{self.dtype} over {self.group_size} ranks{extra}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProblem(_AttentionPass):
    """One pass of attention with its output projection, as seen by a rank: equal on all ranks of the group.

    Every rank holds the full sequence for its own heads. N: output features of the projection. has_mask: a mask is
    given as a tensor, and no band. The rest as in `_AttentionPass`.
    """

    N: int
    has_mask: bool = False
    op: str = "query_split_attention"

    @property
    def K(self) -> int:
        """Input features of the projection on this rank."""
        return self.heads * self.value_dim

    @property
    def shard_bytes(self) -> int:
        """Bytes of the largest shard of y on the wire."""
        return self.projection.shard_bytes

    @property
    def projection(self) -> GemmProblem:
        """The output projection alone."""
        return GemmProblem(
            op="linear_reduce_scatter",
            pass_name=self.pass_name,
            rows=self.rows,
            batch=self.batch,
            N=self.N,
            K=self.K,
            dtype=self.dtype,
            group_size=self.group_size,
            needs="" if self.pass_name == "fprop" else self.needs,
        )

    def visible_keys(self, queries: RowRange) -> VisibleKeys:
        """The keys that `queries` need. A mask given as a tensor may show all of them."""
        first = 0 if self.left is None else max(0, queries.start - self.left)
        stop = self.rows if self.right is None else min(self.rows, queries.stop + self.right)
        after = stop - queries.stop  # keys that the last query's position lies before the last key
        left = None if self.left is None else self.left + after
        right = None if self.right is None else self.right - after
        return VisibleKeys(RowRange(first, stop), left, right)

    def count_scores(self, queries: RowRange) -> int:
        """Pairs of a query in `queries` and a key that it sees, for one head of one sequence of the batch."""
        start, stop = queries.start, queries.stop
        total = queries.size * self.rows
        if self.right is not None:
            total = _sum_of_least(start + self.right + 1, stop + self.right + 1, self.rows)
        if self.left is not None:
            hidden = start - self.left, stop - self.left
            total -= _sum_of_least(*hidden, self.rows) - _sum_of_least(*hidden, 0)
        return total

    def __str__(self) -> str:
        kv = f"/{self.kv_heads}" if self.kv_heads != self.heads else ""
        mask = "masked" if self.has_mask else self._band
        return (
            f"{self.call} S={self.rows} B={self.batch} heads={self.heads}{kv} D={self._features} N={self.N} {mask} "
            f"{self._rest}"
        )


def _sum_of_least(start: int, stop: int, most: int) -> int:
    """Sum of min(i, most) over i in range(start, stop)."""
    cut = min(max(most, start), stop)
    return (start + cut - 1) * (cut - start) // 2 + (stop - cut) * most


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads that travel and are attended together.

    q, kv: which of a rank's own heads of queries, and which of keys and values these need. brings_kv: keys and values
    travel with this group, else with an earlier one that needs the same.
    """

    q: RowRange
    kv: RowRange
    brings_kv: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UlyssesProblem(_AttentionPass):
    """One pass of attention over a sequence that is split over ranks: equal on all ranks of the group.

    heads, kv_heads: of all ranks together, of which rank r attends the r-th part; with fewer kv_heads than ranks,
    several ranks attend with the same one. order: "contiguous" or "zigzag" (see `kept_rows`). beside: what the caller
    has for the same, such as "Transformer Engine 2.20.2", which is a plan of its own ("stock"); "" where it has
    nothing. The rest as in `_AttentionPass`.
    """

    order: str = "contiguous"
    beside: str = ""
    op: str = "ulysses_attention"

    @property
    def N(self) -> int:
        """Features of the result."""
        return self.heads * self.value_dim

    @property
    def K(self) -> int:
        """Features of all heads of queries."""
        return self.heads * self.head_dim

    @property
    def unit(self) -> int:
        """Features of which any head holds a whole number: what is exchanged is counted in these."""
        return math.gcd(self.head_dim, self.value_dim)

    @property
    def own_heads(self) -> int:
        """Heads of queries that a rank attends."""
        return self.heads // self.group_size

    @property
    def own_kv_heads(self) -> int:
        """Heads of keys and values that a rank attends with."""
        return max(1, self.kv_heads // self.group_size)

    def kept_rows(self, group_rank: int) -> tuple[RowRange, ...]:
        """The rows that a rank keeps, in its own order: `shard_range`, or of 2 R chunks numbers r and 2 R - 1 - r."""
        if self.order == "contiguous":
            return (shard_range(self.rows, self.group_size, group_rank),)
        chunks = split_range(RowRange(0, self.rows), 2 * self.group_size)
        return chunks[group_rank], chunks[2 * self.group_size - 1 - group_rank]

    def head_groups(self, number: int) -> tuple[HeadGroup, ...]:
        """A rank's own heads in about so many groups, in the order of a forward pass.

        They share no heads of keys and values, unless there is only one of those.
        """
        shared_by = self.own_heads // self.own_kv_heads
        if self.own_kv_heads > 1:
            found = split_range(RowRange(0, self.own_kv_heads), min(number, self.own_kv_heads))
            return tuple(HeadGroup(RowRange(kv.start * shared_by, kv.stop * shared_by), kv, True) for kv in found)
        queries = split_range(RowRange(0, self.own_heads), min(number, self.own_heads))
        return tuple(HeadGroup(q, RowRange(0, 1), q.start == 0) for q in queries)

    def attention(self, group: HeadGroup | None = None) -> AttentionProblem:
        """What a rank computes for a group of its heads, or for all of them, without a projection."""
        of_rank = {"heads": self.own_heads, "kv_heads": self.own_kv_heads}
        if group is not None:
            of_rank = {"heads": group.q.size, "kv_heads": group.kv.size}
        shared = {field.name: getattr(self, field.name) for field in fields(_AttentionPass)}
        return AttentionProblem(**shared | of_rank, N=0)

    def __str__(self) -> str:
        return (
            f"{self.call} S={self.rows} {self.order} B={self.batch} heads={self.heads}/{self.kv_heads} "
            f"D={self._features} {self._band} {self._rest}{f' beside {self.beside}' if self.beside else ''}"
        )


#: What operations are planned for.
Problem = GemmProblem | AttentionProblem | UlyssesProblem
