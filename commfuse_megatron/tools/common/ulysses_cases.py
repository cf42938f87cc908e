"""The blocks of attention over a split sequence that are measured. Plain numbers."""

from dataclasses import dataclass

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import AttentionProblem, UlyssesProblem
from commfuse_megatron.tools.common.cases import ATTENTION_SHAPES, HEAD_DIM, LinearCase

#: The paper measured none.
ULYSSES_MODELS = tuple(key for key, model in ATTENTION_SHAPES.items() if not model.tokens)
ULYSSES_TOKENS = (32768, 8192, 65536)
ULYSSES_CASE_NAMES = tuple(f"{key}.ulysses" for key in ULYSSES_MODELS)


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
    model, rows, head_dim = ATTENTION_SHAPES[name.split(".")[0]], M // shrink, max(1, HEAD_DIM // shrink)
    if rows < 2 * group_size or rows % (2 * group_size):
        raise ConfigError(f"{name}: {rows} rows must be a multiple of {2 * group_size}, twice the group size")
    if model.kv_heads % group_size:
        raise ConfigError(f"{name}: {model.kv_heads} heads of keys must be a multiple of the group size {group_size}")
    sizes = (rows, max(1, model.hidden // shrink), model.heads * head_dim, group_size, 1, shrink)
    return UlyssesCase(name, "ulysses_attention", *sizes, model.heads, model.kv_heads, head_dim)
