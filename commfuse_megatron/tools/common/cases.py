"""The shapes that are measured, by the names everybody uses. Plain numbers."""

from dataclasses import dataclass

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import GemmProblem


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
