"""The shapes that are measured, by the names everybody uses. Plain numbers."""

from dataclasses import dataclass

from commfuse_megatron.errors import ConfigError

__all__ = ["CASE_NAMES", "LinearCase", "linear_case"]


@dataclass(frozen=True, slots=True)
class _Model:
    hidden: int
    qkv: int  # output features of the fused query-key-value projection
    attention: int  # input features of the output projection
    fc1: int  # output features, gate included
    fc2: int  # input features


# From the models' published configurations.
_MODELS = {
    "llama-8b": _Model(hidden=4096, qkv=6144, attention=4096, fc1=28672, fc2=14336),
    "llama-70b": _Model(hidden=8192, qkv=10240, attention=8192, fc1=57344, fc2=28672),
    "llama-405b": _Model(hidden=16384, qkv=18432, attention=16384, fc1=106496, fc2=53248),
    "gpt3-175b": _Model(hidden=12288, qkv=36864, attention=12288, fc1=49152, fc2=49152),
}
_LINEARS = ("qkv", "proj", "fc1", "fc2")

CASE_NAMES = tuple(f"{model}.{linear}" for model in _MODELS for linear in _LINEARS)


@dataclass(frozen=True, slots=True)
class LinearCase:
    """One linear of one model on one rank: a GEMM of M x N x K beside an all-gather of x or a reduce-scatter of y."""

    name: str
    op: str
    M: int
    N: int
    K: int
    group_size: int

    @property
    def shard_shape(self) -> tuple[int, int]:
        """[tokens, features] of the shard that travels: of x (all-gather) or of y (reduce-scatter)."""
        return self.M // self.group_size, self.K if self.op == "all_gather_linear" else self.N


def linear_case(name: str, M: int, group_size: int) -> LinearCase:
    """The case `name` ("llama-70b.qkv") with M tokens over `group_size` ranks.

    Raises ConfigError for an unknown name, or sizes that the group does not divide.
    """
    if name not in CASE_NAMES:
        raise ConfigError(f'unknown case "{name}"; known are {", ".join(CASE_NAMES)}')
    model_name, linear = name.split(".")
    model = _MODELS[model_name]
    is_column = linear in ("qkv", "fc1")
    features = {"qkv": model.qkv, "fc1": model.fc1, "proj": model.attention, "fc2": model.fc2}[linear]
    if M % group_size or features % group_size:
        raise ConfigError(f"{name}: M={M} and {features} features must be multiples of the group size {group_size}")
    if is_column:
        return LinearCase(name, "all_gather_linear", M, features // group_size, model.hidden, group_size)
    return LinearCase(name, "linear_reduce_scatter", M, model.hidden, features // group_size, group_size)
