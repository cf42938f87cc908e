"""The linears and attention blocks that are measured, by the names everybody uses. Plain numbers."""

import functools
from dataclasses import dataclass
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import AttentionProblem, GemmProblem, RowRange, chunk_ranges
from commfuse_megatron.schedule import Algorithm, Collective, Costs, Work, simulate
from commfuse_megatron.schedule.binding import bind
from commfuse_megatron.schedule.lower_attention import lower_query_split
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.program import Compute


@dataclass(frozen=True, slots=True)
class _Model:
    """Features of the four linears; 0 where the model has none. `tokens`: the only (sequence, batch), else any."""

    hidden: int
    fc1: int  # output features, gate included
    fc2: int  # input features
    qkv: int = 0  # output features of the fused query-key-value projection
    attention: int = 0  # input features of the output projection
    tokens: tuple[int, int] | None = None


# From the models' published configurations; the last one is the MLP of CommFuse's table (arXiv 2604.24013).
_MODELS = {
    "llama-8b": _Model(hidden=4096, qkv=6144, attention=4096, fc1=28672, fc2=14336),
    "llama-70b": _Model(hidden=8192, qkv=10240, attention=8192, fc1=57344, fc2=28672),
    "llama-405b": _Model(hidden=16384, qkv=18432, attention=16384, fc1=106496, fc2=53248),
    "gpt3-175b": _Model(hidden=12288, qkv=36864, attention=12288, fc1=49152, fc2=49152),
    "paper-mlp": _Model(hidden=4096, fc1=16384, fc2=16384, tokens=(4096, 32)),
}

MODELS = tuple(_MODELS)
#: Layers of the models whose steps are predicted.
STEP_LAYERS = {"llama-8b": 32, "llama-70b": 80}
LINEARS = ("qkv", "proj", "fc1", "fc2")

#: Tokens of the cases in which all variants are measured.
FULL_M = (2048, 8192)
PASSES = ("fprop", "backward")
#: The variant in which the planner chooses; Megatron's own step, and that step without communication.
PLANNED, STOCK, FREE = "planned", "stock", "no_communication"
#: What a run that is cut short should have measured comes first.
TOKENS = (8192, 2048, 16384, 4096, 1024)
#: On the CPU nothing is timed for its own sake: sizes at which everything runs in seconds.
CPU_SHRINK = 64
HEADLINE_MODELS = ("llama-8b", "llama-70b")
HEADLINE_M = 8192

CASE_NAMES = tuple(
    f"{name}.{linear}" for name, model in _MODELS.items() for linear in LINEARS if model.qkv or linear in ("fc1", "fc2")
)


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One linear of one model on one rank: a GEMM of M x N x K beside an all-gather of x or a reduce-scatter of y.

    M: tokens of the full sequence, `batch` at each position. shrink: what the published sizes were divided by.
    """

    name: str
    op: str
    M: int
    N: int
    K: int
    group_size: int
    batch: int = 1
    shrink: int = 1

    @property
    def sizes(self) -> dict[str, Any]:
        """What rows and predictions say of it, by their names."""
        sizes = {"M": self.M, "N": self.N, "K": self.K}
        return {"case": self.name, "op": self.op, **sizes, "group_size": self.group_size}

    @property
    def gathers(self) -> bool:
        """Whether the forward pass gathers x; otherwise it scatters y."""
        return self.op == "all_gather_linear"

    @property
    def shard_shape(self) -> tuple[int, int]:
        """[tokens, features] of the shard that travels: of x (all-gather) or of y (reduce-scatter)."""
        return self.M // self.group_size, self.K if self.gathers else self.N

    def problem(self, pass_name: str, dtype: str) -> GemmProblem:
        """The problem that our operation states for this case."""
        needs = "" if pass_name == "fprop" else "input+weight"
        rows = self.M // self.batch
        return GemmProblem(self.op, pass_name, rows, self.batch, self.N, self.K, dtype, self.group_size, needs)


def tokens_of(model: str, asked: tuple[int, ...]) -> tuple[int, ...]:
    """The values of M to run for `model`: what is asked for, or the model's own."""
    own = _MODELS[model].tokens
    return asked if own is None else (own[0] * own[1],)


def too_small(M: int, tokens: int, group_size: int, shrink: int) -> str:
    """What is said of a case where some rank would have nothing."""
    divided = f" divided by {shrink}" if shrink > 1 else ""
    if tokens >= group_size:
        return f"nothing is left of its features,{divided}"
    return f"M={M}{divided} leaves {tokens} rows for {group_size} ranks, each of which needs one"


def linear_case(name: str, M: int, group_size: int, shrink: int = 1) -> LinearCase:
    """The case `name` ("llama-70b.qkv") with M tokens over `group_size` ranks, all sizes divided by `shrink`.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    if name not in CASE_NAMES:
        raise ConfigError(f'unknown case "{name}"; known are {", ".join(CASE_NAMES)}')
    model_name, linear = name.split(".")
    model = _MODELS[model_name]
    is_column = linear in ("qkv", "fc1")
    features = {"qkv": model.qkv, "fc1": model.fc1, "proj": model.attention, "fc2": model.fc2}[linear]
    hidden, features, tokens = model.hidden // shrink, features // shrink, M // shrink
    if tokens < group_size or min(hidden, features) < 1:
        raise ConfigError(f"{name}: {too_small(M, tokens, group_size, shrink)}")
    if tokens % group_size or features % group_size:
        raise ConfigError(
            f"{name}: M={tokens} and {features} features must be multiples of the group size {group_size}"
        )
    batch = 1
    if model.tokens is not None and model.tokens[0] % (group_size * shrink) == 0:
        batch = model.tokens[1]
    if is_column:
        return LinearCase(name, "all_gather_linear", tokens, features // group_size, hidden, group_size, batch, shrink)
    return LinearCase(name, "linear_reduce_scatter", tokens, hidden, features // group_size, group_size, batch, shrink)


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _AttentionModel:
    """tokens: (batch, sequence) of the only cases; else a sequence of any length, batch 1."""

    hidden: int
    heads: int
    kv_heads: int
    tokens: tuple[tuple[int, int], ...] = ()


# From the models' published configurations; the last is the attention of CommFuse's Table 4 (arXiv 2604.24013), whose
# heads it does not give.
_ATTENTION_MODELS = {
    "llama-8b": _AttentionModel(hidden=4096, heads=32, kv_heads=8),
    "llama-70b": _AttentionModel(hidden=8192, heads=64, kv_heads=8),
    "paper": _AttentionModel(4096, 32, 32, ((16, 4096), (4, 8192), (32, 2048), (64, 1024))),
}
_HEAD_DIM = 128

ATTENTION_MODELS = tuple(_ATTENTION_MODELS)
#: Of models that any sequence length is asked of.
ATTENTION_TOKENS = (8192, 4096, 16384)

ATTENTION_CASE_NAMES = tuple(
    name
    for key, model in _ATTENTION_MODELS.items()
    for name in ([f"{key}.attention-{b}x{s}" for b, s in model.tokens] or [f"{key}.attention"])
)

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
    model = _ATTENTION_MODELS[name.split(".")[0]]
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
