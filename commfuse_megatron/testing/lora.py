"""Low-rank adapters on Megatron's linears, as adapter libraries put them there: a wrapper around each linear.

Owns a wrapper to compare models with, no training recipe. A linear with the norm before it in the same module is asked
for the norm's output by attribute (`return_layernorm_output`), since the adapter must see what the linear sees; a class
that does not know the attribute leaves the adapter with the input of the norm, which no shape tells apart.
"""

import copy
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, sharded_state_dict_default

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import compat

#: What an adapter before a column-parallel linear takes: this rank's rows, or those of all ranks.
NormOutput = Literal["rows", "gathered"]


class LoRALinear(torch.nn.Module):
    """A tensor-parallel linear plus `scale * B(A(x))`, where x is what the linear multiplies: the norm's output.

    `to_wrap` is the linear, `adapter` holds A (`linear_in`) and B (`linear_out`). In checkpoints the linear keeps the
    names that it has without the wrapper; those of the adapter come after `adapter.`.
    """

    def __init__(self, to_wrap: torch.nn.Module, adapter: torch.nn.Module, scale: float) -> None:
        super().__init__()
        self.to_wrap: Any = to_wrap
        self.adapter: Any = adapter
        self._scale = scale
        self.register_load_state_dict_pre_hook(_name_wrapped)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and bias in the shapes of the wrapped linear."""
        output, bias, *rest = self.to_wrap(x, *args, **kwargs)
        if isinstance(output, tuple):  # without a bias to return, the norm's output comes beside the output
            output, *rest = output
        adapted = self.adapter(rest[0] if rest else x, is_gathered=bool(rest) and self.adapter.takes_gathered)
        return output + self._scale * adapted, bias

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """The wrapped linear under its own names, and the adapter."""
        destination = self.to_wrap.state_dict(*args, destination=destination, prefix=prefix, keep_vars=keep_vars)
        return self.adapter.state_dict(destination=destination, prefix=f"{prefix}adapter.", keep_vars=keep_vars)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The same for distributed checkpoints."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        wrapped = sharded_state_dict_default(self.to_wrap, prefix, sharded_offsets, metadata)
        return wrapped | self.adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata)


def _name_wrapped(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in [name for name in state if name.startswith(prefix)]:
        rest = name.removeprefix(prefix)
        if not rest.startswith("adapter."):
            state[f"{prefix}to_wrap.{rest}"] = state.pop(name)


class _Adapter(torch.nn.Module):
    """A pair of linears beside a tensor-parallel one under sequence parallelism; r is `rank`.

    | beside | form     | linear_in                                  | linear_out                                |
    |--------|----------|--------------------------------------------|-------------------------------------------|
    | column | rows     | [r/R, K], gathers rows; output gathered    | [N/R, r]                                  |
    | column | gathered | [r/R, K] on gathered rows; output gathered | [N/R, r]                                  |
    | row    | rows     | [r, K/R], output reduce-scattered to rows  | [N, r], replicated, on rows               |
    | row    | gathered | [r, K/R], output all-reduced               | [N/R, r]; output gathered, split to rows  |

    In the gathered form of a column-parallel pair the gradient of x is a partial sum, which is due to whoever gathered.
    """

    def __init__(self, linear: Any, rank: int, norm_output: NormOutput, *, is_gated: bool) -> None:
        super().__init__()
        input_size, output_size = _sizes(linear)
        self._is_row = _parallel_mode(linear) == "row"
        self._group = compat.group_of(linear)
        self._is_gated = is_gated
        self._works_on_rows = norm_output == "rows"
        self.takes_gathered = not self._is_row and not self._works_on_rows
        common = {"init_method": torch.nn.init.xavier_normal_, "bias": False, "tp_group": self._group}
        alone = _config(linear.config, False)
        config = _config(linear.config, True) if self._works_on_rows else alone
        kind, options = ColumnParallelLinear, {"gather_output": True, "disable_grad_reduce": not self._works_on_rows}
        if self._is_row:
            kind, options = RowParallelLinear, {"input_is_parallel": True, "skip_bias_add": False}
        self.linear_in = kind(input_size, rank, config=config, **options, **common)
        if self._is_row and self._works_on_rows:
            self.linear_out = _on_rows(rank, output_size, linear.config)
        else:
            gathers = self._is_row or getattr(linear, "gather_output", False)
            self.linear_out = ColumnParallelLinear(rank, output_size, config=alone, gather_output=gathers, **common)

    def forward(self, x: torch.Tensor, *, is_gathered: bool) -> torch.Tensor:
        """What to add to the linear's output. x: rows [S/R, B, K], gathered [S, B, K]; [S, B, K/R] beside a row."""
        if self.takes_gathered and not is_gathered:
            x = gather_from_sequence_parallel_region(x, group=self._group)
        hidden, _ = self.linear_in(x)
        if isinstance(self.linear_out, torch.nn.Linear):
            return self.linear_out(hidden)
        output, _ = self.linear_out(hidden)
        return scatter_to_sequence_parallel_region(output, group=self._group) if self._is_row else output

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """The same entries in both forms; the rows of B beside a gated fc1 are two halves, as those of fc1 are."""
        entries: dict[str, Any] = {}
        for name, linear in self.named_children():
            entries |= sharded_state_dict_default(
                linear, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self._group
            )
            entries.pop(f"{prefix}{name}._extra_state", None)  # nothing; torch's linear, of rows alone, has none
        if self._is_gated:
            weight = f"{prefix}linear_out.weight"
            entries[weight] = apply_swiglu_sharded_factory(entries[weight], sharded_offsets)
        return entries


def _config(config: Any, is_sequence_parallel: bool) -> Any:
    config = copy.copy(config)
    config.sequence_parallel = is_sequence_parallel
    config.gradient_accumulation_fusion = False  # Megatron's linears need Apex for it
    return config


def _on_rows(rank: int, output_size: int, config: Any) -> torch.nn.Linear:
    device = None if config.use_cpu_initialization else torch.cuda.current_device()
    linear = torch.nn.Linear(rank, output_size, bias=False, device=device, dtype=config.params_dtype)
    # Each rank sees its own rows only: `finalize_model_grads` has to sum the gradients.
    linear.weight.sequence_parallel = True  # type: ignore[attr-defined]
    return linear


def add_lora(
    model: torch.nn.Module, *, rank: int = 8, alpha: float = 16.0, norm_output: NormOutput = "rows", seed: int = 3
) -> None:
    """Wrap every tensor-parallel linear of `model` in a LoRALinear, in place; A and B are drawn from `seed`.

    Experts stay as they are. Under recompute the embedding's output is made to require a gradient: Megatron's reentrant
    checkpoints give the adapters inside none, or keep no input to recompute from, where no input of theirs needs one.

    Raises UnsupportedError, before anything is wrapped, without sequence parallelism.
    """
    places = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if _parallel_mode(child) is not None and not getattr(child, "is_expert", False)
    ]
    for parent, name in places:
        if not getattr(parent, name).sequence_parallel:
            raise UnsupportedError(f"{name} has no sequence parallelism, which the adapters here are made for")
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else []):
        torch.manual_seed(seed)
        for parent, name in places:
            linear: Any = getattr(parent, name)
            if hasattr(linear, "return_layernorm_output"):
                linear.return_layernorm_output = True
                linear.return_layernorm_output_gathered = norm_output == "gathered"
            is_gated = name == "linear_fc1" and linear.config.gated_linear_unit
            adapter = _Adapter(linear, rank, norm_output, is_gated=is_gated)
            setattr(parent, name, LoRALinear(linear, adapter, alpha / rank))
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and module.config.recompute_granularity is not None:
            module.register_forward_hook(_require_gradient)


def _parallel_mode(module: torch.nn.Module) -> str | None:
    """How a tensor-parallel linear of Megatron, Transformer Engine or ours is split; None for what is none."""
    if isinstance(module, RowParallelLinear):
        return "row"
    if isinstance(module, ColumnParallelLinear):
        return "column"
    mode = getattr(module, "parallel_mode", None) if isinstance(module, compat.TRANSFORMER_ENGINE_LINEARS) else None
    return mode if mode in ("column", "row") else None


def _sizes(linear: Any) -> tuple[int, int]:
    """Input and output features of all ranks together."""
    if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        return linear.input_size, linear.output_size
    group_size = compat.group_of(linear).size()
    is_row = linear.parallel_mode == "row"
    return linear.in_features * (group_size if is_row else 1), linear.out_features * (1 if is_row else group_size)


def _require_gradient(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()
