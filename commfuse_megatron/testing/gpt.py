"""A GPT of Megatron-Core small enough for a CPU: configuration, model, batch, loss.

The same code builds the stock model and the overlapped one, on CPU (inside `cpu_megatron`) and on CUDA. Local layers
only: neither Transformer Engine nor Apex is needed. Both models carry CommFuseNorm, since Megatron's own torch norm
refuses sequence parallelism; everything else of the stock model is Megatron's.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.plugin import apply_to_spec, convert_model
from commfuse_megatron.plugin.compat import HAVE_TRANSFORMER_ENGINE, megatron_groups
from commfuse_megatron.plugin.compat_training import rows_of_this_rank
from commfuse_megatron.plugin.spec import block_spec, local_layer_spec


@dataclass(frozen=True, kw_only=True)
class SmallGPT:
    """Sizes and variant. The default is a small Llama: RMSNorm, SwiGLU, grouped queries, no biases, rotary positions.

    `vocab_size` 256 makes every byte a token. Heads, query groups, `ffn_hidden_size` and `vocab_size` must be divisible
    by the tensor-parallel size, the length of a batch too.
    """

    num_layers: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 8
    num_query_groups: int = 4
    ffn_hidden_size: int = 128
    vocab_size: int = 256
    max_sequence_length: int = 512
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    is_gated: bool = True
    has_bias: bool = False
    has_tied_embeddings: bool = False
    dtype: torch.dtype = torch.float32

    @classmethod
    def layer_norm_and_bias(cls, **sizes: Any) -> "SmallGPT":
        """The other classic variant: LayerNorm, GELU, a bias in every linear, one query group per head."""
        defaults = {"normalization": "LayerNorm", "is_gated": False, "has_bias": True, "num_query_groups": 8}
        return cls(**{**defaults, **sizes})


@contextmanager
def tensor_parallel(group_size: int, *, seed: int = 1234, **other_sizes: Any) -> Iterator[None]:
    """Megatron's parallel state with tensor-parallel groups of `group_size`, destroyed at the end with its groups.

    Megatron itself only lets go of the groups, whose threads then run on: with gloo, a thousand after some states.
    torch.distributed must be initialised. `other_sizes` go to Megatron's `initialize_model_parallel`.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=group_size, **other_sizes)
    model_parallel_cuda_manual_seed(seed)
    try:
        yield
    except BaseException:
        # The others may still be waiting for this rank, and NCCL destroys a group when all its ranks do: to try here
        # would hide the error behind a hang.
        parallel_state.destroy_model_parallel()
        raise
    groups = megatron_groups()
    parallel_state.destroy_model_parallel()
    for group in groups:  # in the order of all ranks: NCCL may wait for the others in each
        if group is not dist.group.WORLD:
            with suppress(ValueError):  # a few have been destroyed by Megatron
                dist.destroy_process_group(group)


def transformer_config(gpt: SmallGPT, group_size: int, **overrides: Any) -> Any:
    """The TransformerConfig of `gpt` under tensor and sequence parallelism; keywords set further Megatron options.

    Weights are drawn on the CPU, so that a seed gives the same model at every tensor-parallel size and on every device.
    Dropout and fused kernels are off.
    """
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    make = MLATransformerConfig if overrides.get("multi_latent_attention") else TransformerConfig
    same = (
        "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "normalization",
    )  # fmt: skip
    fusions = ("bias_activation", "bias_dropout", "masked_softmax", "apply_rope", "gradient_accumulation")
    options: dict[str, Any] = {
        **{name: getattr(gpt, name) for name in same},
        **{f"{name}_fusion": False for name in fusions},
        "gated_linear_unit": gpt.is_gated,
        "activation_func": torch.nn.functional.silu if gpt.is_gated else torch.nn.functional.gelu,
        "add_bias_linear": gpt.has_bias,
        "add_qkv_bias": gpt.has_bias,
        "tensor_model_parallel_size": group_size,
        "sequence_parallel": group_size > 1,
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "params_dtype": gpt.dtype,
        "pipeline_dtype": gpt.dtype,
        "bf16": gpt.dtype == torch.bfloat16,
        "fp16": gpt.dtype == torch.float16,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    with warnings.catch_warnings():
        # Megatron says so of its own default.
        warnings.filterwarnings("ignore", message="full scope is deprecated")
        return make(**{**options, **overrides})


def build_gpt(
    gpt: SmallGPT,
    config: Any,
    *,
    overlap: OverlapConfig | bool,
    device: torch.device | str = "cpu",
    seed: int = 7,
    spec: Any = None,
) -> Any:
    """A GPTModel with weights drawn from `seed`.

    Args:
        config: from `transformer_config`.
        spec: the stock spec of the block; default: local layers with a norm that works under sequence parallelism.
        overlap: False builds the stock model; True, or a configuration, the one whose linears are overlapped, with the
            output layer.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    overlap_config = overlap if isinstance(overlap, OverlapConfig) else None
    if spec is None:
        spec = block_spec(local_layer_spec(), config, with_torch_norm=True)
    if overlap:
        spec = apply_to_spec(spec, overlap_config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=gpt.vocab_size,
            max_sequence_length=gpt.max_sequence_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=gpt.has_tied_embeddings,
        )
    model = model.to(device)
    return convert_model(model, overlap_config) if overlap else model


def missing_transformer_engine() -> str | None:
    """Why layers of Transformer Engine cannot be built here, None if they can."""
    if not torch.cuda.is_available():
        return "Transformer Engine needs a CUDA device, and PyTorch found none"
    if not HAVE_TRANSFORMER_ENGINE:
        return "Transformer Engine is not installed: pip install 'commfuse-megatron[te]'"
    return None


def loss_of(model: Any, tokens: torch.Tensor, *, with_mask: bool = True) -> torch.Tensor:
    """The mean of `losses_of`."""
    return losses_of(model, tokens, with_mask=with_mask).mean()


def losses_of(model: Any, tokens: torch.Tensor, *, with_mask: bool = True, **options: Any) -> torch.Tensor:
    """Cross-entropies [batch, sequence] of predicting tokens[:, 1:] from tokens[:, :-1]; tokens [batch, sequence + 1].

    Of a pipeline stage before the last, what it passes on. Without a mask the attention makes its own, which is causal
    in all our models; so it does under context parallelism, where a rank's tokens are those that Megatron deals it of
    the given ones. `options` go to the model.
    """
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.size(1)
    positions = torch.arange(length, device=tokens.device).expand_as(inputs)
    batch = rows_of_this_rank({"inputs": inputs, "positions": positions, "labels": labels})
    future = None
    if with_mask and batch["inputs"].size(1) == length:
        future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    return model(batch["inputs"], batch["positions"], future, labels=batch["labels"], **options)
