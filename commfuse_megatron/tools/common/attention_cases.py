"""The attention blocks that are measured, of tensor parallelism and of a split sequence (Ulysses). Plain numbers."""

import functools
from dataclasses import dataclass

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import AttentionProblem, RowRange, UlyssesProblem, chunk_ranges
from commfuse_megatron.schedule import Algorithm, Collective, Costs, Work, simulate
from commfuse_megatron.schedule.binding import bind
from commfuse_megatron.schedule.lower_attention import lower_query_split
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Compute
from commfuse_megatron.tools.common.cases import LinearCase, too_small


@dataclass(frozen=True, slots=True)
class _Model:
    """tokens: (batch, sequence) of the only cases; else a sequence of any length, batch 1."""

    hidden: int
    heads: int
    kv_heads: int
    tokens: tuple[tuple[int, int], ...] = ()


# From the models' published configurations; the last is the attention of CommFuse's Table 4 (arXiv 2604.24013), whose
# heads it does not give.
_MODELS = {
    "llama-8b": _Model(hidden=4096, heads=32, kv_heads=8),
    "llama-70b": _Model(hidden=8192, heads=64, kv_heads=8),
    "paper": _Model(4096, 32, 32, ((16, 4096), (4, 8192), (32, 2048), (64, 1024))),
}
_HEAD_DIM = 128

ATTENTION_MODELS = tuple(_MODELS)
#: Of models that any sequence length is asked of.
ATTENTION_TOKENS = (8192, 4096, 16384)

ATTENTION_CASE_NAMES = tuple(
    name
    for key, model in _MODELS.items()
    for name in ([f"{key}.attention-{b}x{s}" for b, s in model.tokens] or [f"{key}.attention"])
)

#: Of a split sequence; the paper measured none.
ULYSSES_MODELS = tuple(key for key, model in _MODELS.items() if not model.tokens)
ULYSSES_TOKENS = (32768, 8192, 65536)
ULYSSES_CASE_NAMES = tuple(f"{key}.ulysses" for key in ULYSSES_MODELS)

#: What the paper publishes of its cases, forward, 4 ranks, ms: no overlap, data slicing, row-parallel, query-split.
PAPER_MS: dict[str, tuple[float | None, ...]] = {
    "paper.attention-16x4096": (270.1, 246.1, 230.9, 215.8),
    "paper.attention-4x8192": (195.6, 279.7, None, 145.1),
}


@dataclass(frozen=True, slots=True)
class AttentionCase(LinearCase):
    """Causal attention and its projection on one rank: N and K are the projection's, K that of this rank's heads."""

    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1

    @property
    def rows(self) -> int:
        """S, the full sequence."""
        return self.M // self.batch

    def attention(self, dtype: str, needs: str = "") -> AttentionProblem:
        """The problem that our operation states for the forward pass of this case."""
        return AttentionProblem(
            pass_name="fprop",
            rows=self.rows,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            N=self.N,
            dtype=dtype,
            group_size=self.group_size,
            right=0,
            needs=needs,
        )


@dataclass(frozen=True, slots=True)
class UlyssesCase(LinearCase):
    """Causal attention over a sequence split over ranks, in zigzag order, between its two linears, on one rank.

    N is the width of the model, K that of all heads of queries.
    """

    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 1

    @property
    def rows(self) -> int:
        """S, the full sequence."""
        return self.M // self.batch

    @property
    def qkv_features(self) -> int:
        """What the first linear gives: all heads of queries, then of keys, then of values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def attention(self, dtype: str) -> AttentionProblem:
        """What a rank computes, forward."""
        return UlyssesProblem(
            pass_name="fprop",
            rows=self.rows,
            batch=self.batch,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.head_dim,
            dtype=dtype,
            group_size=self.group_size,
            order="zigzag",
            right=0,
            needs="input",
        ).attention()


def ulysses_case(name: str, M: int, group_size: int, shrink: int = 1) -> UlyssesCase:
    """The case `name` ("llama-8b.ulysses") of a sequence of M tokens over `group_size` ranks; sizes over `shrink`.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    if name not in ULYSSES_CASE_NAMES:
        raise ConfigError(f'unknown case "{name}"; known are {", ".join(ULYSSES_CASE_NAMES)}')
    model, rows, head_dim = _MODELS[name.split(".")[0]], M // shrink, max(1, _HEAD_DIM // shrink)
    if rows < 2 * group_size or rows % (2 * group_size):
        raise ConfigError(f"{name}: {rows} rows must be a multiple of {2 * group_size}, twice the group size")
    if model.kv_heads % group_size:
        raise ConfigError(f"{name}: {model.kv_heads} heads of keys must be a multiple of the group size {group_size}")
    sizes = (rows, max(1, model.hidden // shrink), model.heads * head_dim, group_size, 1, shrink)
    return UlyssesCase(name, "ulysses_attention", *sizes, model.heads, model.kv_heads, head_dim)


def attention_tokens(name: str, asked: tuple[int, ...]) -> tuple[int, ...]:
    """The values of M to run for the case `name`: what is asked for, or its own. ConfigError for unknown names."""
    _require_known(name)
    _, _, sizes = name.partition("-") if name.startswith("paper") else ("", "", "")
    if not sizes:
        return asked
    batch, rows = sizes.split("x")
    return (int(batch) * int(rows),)


def attention_case(name: str, M: int, group_size: int, shrink: int = 1) -> AttentionCase:
    """The case `name` with M tokens over `group_size` ranks; sequence and features per head divided by `shrink`.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    _require_known(name)
    model = _MODELS[name.split(".")[0]]
    batch = int(name.partition("-")[2].split("x")[0]) if model.tokens else 1
    rows, head_dim = M // batch // shrink, max(1, _HEAD_DIM // shrink)
    if rows < group_size:
        raise ConfigError(f"{name}: {too_small(M, rows, group_size, batch * shrink)}")
    if rows % group_size:
        shrunk = f" ({M // batch} divided by {shrink}: --shrink)" if shrink > 1 else ""
        raise ConfigError(f"{name}: {rows} rows{shrunk} must be a multiple of the group size {group_size}")
    if model.heads % group_size:
        raise ConfigError(f"{name}: {model.heads} heads must be a multiple of the group size {group_size}")
    heads, kv_heads = model.heads // group_size, max(1, model.kv_heads // group_size)
    hidden = max(1, model.hidden // shrink)
    return AttentionCase(
        name, "query_split_attention", rows * batch, hidden, heads * head_dim, group_size, batch, shrink, heads,
        kv_heads, head_dim,
    )  # fmt: skip


def _require_known(name: str) -> None:
    if name not in ATTENTION_CASE_NAMES:
        raise ConfigError(f'unknown case "{name}"; known are {", ".join(ATTENTION_CASE_NAMES)}')


def attention_bound_ms(case: AttentionCase, compute_ms: float, comm_ms: float, splits_per_shard: int) -> float:
    """The least that the schedule allows the slowest rank, forward: splits cost what their scores and rows do.

    compute_ms: the whole block, cut in proportion to its products. comm_ms: all transfers of a rank.
    """
    shares = _split_shares(case, splits_per_shard)
    us_per_row = comm_ms * 1e3 / (case.M - case.M // case.group_size)

    def work_us(rank: int, op: Work, beside_us: float) -> tuple[float, float]:
        us = shares[op.chunk] * compute_ms * 1e3 if isinstance(op, Compute) else 0.0
        return us, us

    policy, sizes = Policy(has_windows=True), (splits_per_shard, case.rows, case.batch)
    bound = [
        bind(Collective.REDUCE_SCATTER, Algorithm.DIRECT, case.group_size, rank, *sizes)
        for rank in range(case.group_size)
    ]
    programs = [lower_query_split(scatter, policy, has_bias=False) for scatter in bound]
    costs = Costs(work_us, lambda sender, receiver, channel, rows: rows * us_per_row)
    return simulate(programs, costs).total_us / 1e3


@functools.lru_cache(maxsize=64)
def _split_shares(case: AttentionCase, splits_per_shard: int) -> list[float]:
    """The share of every split in the products of the block."""
    problem = case.attention("bfloat16")

    def products(queries: RowRange) -> float:
        scores = problem.count_scores(queries) * case.heads * 2 * case.head_dim
        return float(case.batch * (scores + queries.size * case.N * case.K))

    total = products(RowRange(0, case.rows))
    chunks = chunk_ranges(case.rows, case.group_size, splits_per_shard)
    return [products(queries) / total for shard in chunks for queries in shard]
