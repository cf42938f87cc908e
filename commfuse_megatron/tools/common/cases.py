"""The linears and blocks with attention that are measured, by the names everybody uses. Plain numbers."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import AttentionProblem, GemmProblem, RowRange, UlyssesProblem, chunk_ranges
from commfuse_megatron.schedule import Algorithm, Collective, Costs, Work, simulate
from commfuse_megatron.schedule.binding import bind
from commfuse_megatron.schedule.lower_attention import lower_query_split
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Compute

_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class _Model:
    """Features of the residual stream and of the MLP's second linear, which the first doubles where it is gated."""

    hidden: int
    heads: int
    kv_heads: int
    ffn: int = 0
    is_gated: bool = True

    @property
    def features(self) -> dict[str, int]:
        """Those that ranks share, of each linear; 0 where the model has none."""
        qkv = (self.heads + 2 * self.kv_heads) * _HEAD_DIM
        fc1 = self.ffn * (2 if self.is_gated else 1)
        return {"qkv": qkv, "proj": self.heads * _HEAD_DIM, "fc1": fc1, "fc2": self.ffn}


# From the models' published configurations; the last one is the MLP of CommFuse's table (arXiv 2604.24013).
_MODELS = {
    "llama-8b": _Model(4096, heads=32, kv_heads=8, ffn=14336),
    "llama-70b": _Model(8192, heads=64, kv_heads=8, ffn=28672),
    "llama-405b": _Model(16384, heads=128, kv_heads=8, ffn=53248),
    "gpt3-175b": _Model(12288, heads=96, kv_heads=96, ffn=49152, is_gated=False),
    "paper-mlp": _Model(4096, heads=0, kv_heads=0, ffn=16384, is_gated=False),
}
ULYSSES_MODELS = ("llama-8b", "llama-70b")
# The last is the attention of CommFuse's Table 4, whose heads it does not give.
_WITH_ATTENTION = {name: _MODELS[name] for name in ULYSSES_MODELS} | {"paper": _Model(4096, heads=32, kv_heads=32)}

MODELS, ATTENTION_MODELS = tuple(_MODELS), tuple(_WITH_ATTENTION)
#: Layers of the models whose steps are predicted.
STEP_LAYERS = {"llama-8b": 32, "llama-70b": 80}
LINEARS = ("qkv", "proj", "fc1", "fc2")

#: Tokens of the cases in which all variants are measured.
FULL_M = (2048, 8192)
PASSES = ("fprop", "backward")
#: The variant in which the planner chooses; Megatron's own step, and that step without communication.
PLANNED, STOCK, FREE = "planned", "stock", "no_communication"
#: On the CPU nothing is timed for its own sake: sizes at which everything runs in seconds.
CPU_SHRINK = 64
HEADLINE_MODELS = ("llama-8b", "llama-70b")
HEADLINE_M = 8192

# (batch, sequence) of the paper's cases; all others take any sequence, batch 1.
_PAPER_SIZES = {"paper-mlp.fc1": (32, 4096), "paper-mlp.fc2": (32, 4096)} | {
    f"paper.attention-{batch}x{rows}": (batch, rows) for batch, rows in ((16, 4096), (4, 8192), (32, 2048), (64, 1024))
}
CASE_NAMES = tuple(
    f"{name}.{linear}" for name, model in _MODELS.items() for linear in LINEARS if model.features[linear]
)
ULYSSES_CASE_NAMES = tuple(f"{name}.ulysses" for name in ULYSSES_MODELS)
ATTENTION_CASE_NAMES = (
    *(f"{name}.attention" for name in ULYSSES_MODELS),
    *(name for name in _PAPER_SIZES if name.startswith("paper.")),
)

#: What the paper publishes of its cases, forward, 4 ranks, ms: no overlap, data slicing, row-parallel, query-split.
PAPER_MS: dict[str, tuple[float | None, ...]] = {
    "paper.attention-16x4096": (270.1, 246.1, 230.9, 215.8),
    "paper.attention-4x8192": (195.6, 279.7, None, 145.1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """A linear, or a block with attention, of one model on one rank; M: tokens of the full sequence, batch included.

    By `op`:

        all_gather_linear, linear_reduce_scatter   a GEMM of M x N x K beside an all-gather of x or reduce-scatter of y
        linear_grad_all_reduce, linear_all_reduce   the same without sequence parallelism, in the pass that sends
        query_split_attention   causal attention of this rank's heads and its projection: N and K are the projection's
        ulysses_attention       causal attention over a sequence split over ranks, in zigzag order, between its two
                                linears: N is the width of the model, K that of all heads of queries

    shrink: what the published sizes were divided by.
    """

    name: str
    op: str
    M: int
    N: int
    K: int
    group_size: int
    batch: int = 1
    shrink: int = 1
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0

    @property
    def sizes(self) -> dict[str, Any]:
        """What rows and predictions say of it, by their names."""
        sizes = {"M": self.M, "N": self.N, "K": self.K}
        return {"case": self.name, "op": self.op, **sizes, "group_size": self.group_size}

    @property
    def all_reduces(self) -> bool:
        """Whether every rank brings and gets all rows."""
        return self.op in _ALL_REDUCES.values()

    @property
    def gathers(self) -> bool:
        """Whether the forward pass gathers x; otherwise it scatters y."""
        return self.op == "all_gather_linear"

    @property
    def rows(self) -> int:
        """S, the full sequence."""
        return self.M // self.batch

    @property
    def shard_shape(self) -> tuple[int, int]:
        """[tokens, features] of the shard that travels: of x (all-gather) or of y (reduce-scatter)."""
        return self.M // self.group_size, self.problem("fprop", "bfloat16").wire_features

    @property
    def qkv_features(self) -> int:
        """Of all heads of queries, then of keys, then of values."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def problem(self, pass_name: str, dtype: str) -> GemmProblem:
        """The problem that our operation states for a linear."""
        needs = "" if pass_name == "fprop" else "input+weight"
        return GemmProblem(self.op, pass_name, self.rows, self.batch, self.N, self.K, dtype, self.group_size, needs)

    def attention(self, dtype: str) -> AttentionProblem:
        """What a rank attends, forward; with a projection, the problem that our operation states."""
        if self.op == "ulysses_attention":
            return self.exchange(dtype).attention()
        return AttentionProblem(**self._heads(dtype), N=self.N)

    def exchange(self, dtype: str) -> UlyssesProblem:
        """The problem that our operation states over a split sequence, forward."""
        return UlyssesProblem(**self._heads(dtype), order="zigzag")

    def _heads(self, dtype: str) -> dict[str, Any]:
        sizes: dict[str, Any] = {"pass_name": "fprop", "rows": self.rows, "batch": self.batch, "heads": self.heads}
        sizes |= {"kv_heads": self.kv_heads, "head_dim": self.head_dim, "value_dim": self.head_dim, "right": 0}
        return sizes | {"dtype": dtype, "group_size": self.group_size}


def tokens_of(name: str, asked: tuple[int, ...]) -> tuple[int, ...]:
    """The values of M to run for the case `name`: what is asked for, or its own."""
    return (_PAPER_SIZES[name][0] * _PAPER_SIZES[name][1],) if name in _PAPER_SIZES else asked


def _divided(size: int, shrink: int) -> str:
    return f" ({size} divided by {shrink}: --shrink)" if shrink > 1 else ""


def linear_case(name: str, M: int, group_size: int, shrink: int = 1) -> Case:
    """The case `name` ("llama-70b.qkv") with M tokens over `group_size` ranks, all sizes divided by `shrink`.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    _require_known(name, CASE_NAMES)
    model_name, linear = name.split(".")
    model = _MODELS[model_name]
    hidden, features, tokens = model.hidden // shrink, model.features[linear] // shrink, M // shrink
    _require_rows(name, M, tokens, group_size, shrink)
    if min(hidden, features) < 1:
        raise ConfigError(f"{name}: nothing is left of its features, divided by {shrink}")
    if tokens % group_size or features % group_size:
        raise ConfigError(
            f"{name}: {tokens} tokens{_divided(M, shrink)} and {features} features must be multiples of the group size"
            f" {group_size}"
        )
    batch, rows = _PAPER_SIZES.get(name, (1, 0))
    rest = (group_size, batch if rows % (group_size * shrink) == 0 else 1, shrink)
    if linear in ("qkv", "fc1"):
        return Case(name, "all_gather_linear", tokens, features // group_size, hidden, *rest)
    return Case(name, "linear_reduce_scatter", tokens, hidden, features // group_size, *rest)


_ALL_REDUCES = {"all_gather_linear": "linear_grad_all_reduce", "linear_reduce_scatter": "linear_all_reduce"}


def all_reduce_case(name: str, M: int, group_size: int, shrink: int = 1) -> Case:
    """The linear of `linear_case` without sequence parallelism. Raises ConfigError as that."""
    case = linear_case(name, M, group_size, shrink)
    return replace(case, op=_ALL_REDUCES[case.op])


def all_reduce_pass(name: str) -> str:
    """The pass in which the case of this name all-reduces: the other one sends nothing."""
    return "backward" if name.split(".")[1] in ("qkv", "fc1") else "fprop"


def attention_case(name: str, M: int, group_size: int, shrink: int = 1) -> Case:
    """The case `name` with M tokens over `group_size` ranks; sequence and features per head divided by `shrink`.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    _require_known(name, ATTENTION_CASE_NAMES)
    model, (batch, _) = _WITH_ATTENTION[name.split(".")[0]], _PAPER_SIZES.get(name, (1, 0))
    rows, hidden, head_dim = M // batch // shrink, max(1, model.hidden // shrink), max(1, _HEAD_DIM // shrink)
    _require_rows(name, M, rows, group_size, batch * shrink)
    if rows % group_size:
        raise ConfigError(
            f"{name}: {rows} rows{_divided(M // batch, shrink)} must be a multiple of the group size {group_size}"
        )
    if model.heads % group_size:
        raise ConfigError(f"{name}: {model.heads} heads must be a multiple of the group size {group_size}")
    heads = (model.heads // group_size, max(1, model.kv_heads // group_size), head_dim)
    sizes = (rows * batch, hidden, heads[0] * head_dim, group_size, batch, shrink)
    return Case(name, "query_split_attention", *sizes, *heads)


def ulysses_case(name: str, M: int, group_size: int, shrink: int = 1) -> Case:
    """The case `name` ("llama-8b.ulysses") of a sequence of M tokens over `group_size` ranks; sizes over `shrink`.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    _require_known(name, ULYSSES_CASE_NAMES)
    model, rows = _MODELS[name.split(".")[0]], M // shrink
    if rows < 2 * group_size or rows % (2 * group_size):
        raise ConfigError(f"{name}: {rows} rows must be a multiple of {2 * group_size}, twice the group size")
    if model.kv_heads % group_size:
        raise ConfigError(f"{name}: {model.kv_heads} heads of keys must be a multiple of the group size {group_size}")
    hidden, head_dim = max(1, model.hidden // shrink), max(1, _HEAD_DIM // shrink)
    sizes = (rows, hidden, model.heads * head_dim, group_size, 1, shrink)
    return Case(name, "ulysses_attention", *sizes, model.heads, model.kv_heads, head_dim)


def _require_known(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f'unknown case "{name}"; known are {", ".join(known)}')


def _require_rows(name: str, M: int, rows: int, group_size: int, divisor: int) -> None:
    if rows < group_size:
        divided = f" divided by {divisor}" if divisor > 1 else ""
        raise ConfigError(f"{name}: M={M}{divided} leaves {rows} rows for {group_size} ranks, each of which needs one")


@dataclass(frozen=True, slots=True)
class Kind:
    """What one benchmark times. tokens: values of M by default, first what a run that is cut short should have."""

    models: tuple[str, ...]
    case_names: tuple[str, ...]
    tokens: tuple[int, ...]
    make_case: Callable[[str, int, int, int], Case]


#: By the word that `commfuse bench` has for it.
KINDS = {
    "linears": Kind(MODELS, CASE_NAMES, (8192, 2048, 16384, 4096, 1024), linear_case),
    "all-reduce": Kind(MODELS, CASE_NAMES, (8192, 2048, 16384, 4096, 1024), all_reduce_case),
    "attention": Kind(ATTENTION_MODELS, ATTENTION_CASE_NAMES, (8192, 4096, 16384), attention_case),
    "ulysses": Kind(ULYSSES_MODELS, ULYSSES_CASE_NAMES, (32768, 8192, 65536), ulysses_case),
}


def attention_bound_ms(case: Case, compute_ms: float, comm_ms: float, splits_per_shard: int) -> float:
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
def _split_shares(case: Case, splits_per_shard: int) -> list[float]:
    """The share of every split in the products of the block."""
    problem = case.attention("bfloat16")

    def products(queries: RowRange) -> float:
        scores = problem.count_scores(queries) * case.heads * 2 * case.head_dim
        return float(case.batch * (scores + queries.size * case.N * case.K))

    total = products(RowRange(0, case.rows))
    chunks = chunk_ranges(case.rows, case.group_size, splits_per_shard)
    return [products(queries) / total for shard in chunks for queries in shard]
