"""A model of Megatron's, stock or with the plugin, as commands train and time it: sizes, text, how it is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import distributed as dist

from commfuse_megatron.config import AttentionConfig, LinearConfig, OverlapConfig, PassConfig, UlyssesConfig
from commfuse_megatron.tools.common.text import batch_of

#: What is compared is the overlapped path, whatever would be faster for so small a model.
_SLICED = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=1)
OVERLAPPED = OverlapConfig(
    linear=LinearConfig(fprop=_SLICED, dgrad=_SLICED),
    attention=AttentionConfig(path="row_parallel"),
    ulysses=UlyssesConfig(path="overlapped"),
)

#: As `testing.lora`'s, which imports Megatron.
NormOutput = Literal["rows", "gathered"]


_SIZES = ("hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "vocab_size")
#: Sizes of a `Task` by name, from the models' published configurations; the layers are as many as asked for.
MODELS: dict[str, dict[str, Any]] = {
    "demo": dict(zip(_SIZES, (256, 8, 8, 512, 256), strict=True)),
    "llama-8b": dict(zip(_SIZES, (4096, 32, 8, 14336, 128256), strict=True)),
    "llama-70b": dict(zip(_SIZES, (8192, 64, 8, 28672, 128256), strict=True)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and the text it is trained on, byte by byte. Tensor parallel over all ranks, or over as many as are left
    where so many share each sequence.

    pattern: None for a GPT, else the layers of a HybridModel ("*" attention, "-" MLP, "M" Mamba). lr: Adam's.
    """

    device_type: str
    dtype: torch.dtype
    text: bytes = b""
    num_steps: int = 50
    pattern: str | None = None
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_attention_heads: int = 8
    num_query_groups: int = 4
    vocab_size: int = 256
    sequence: int = 64
    batch: int = 2
    lr: float = 1e-3
    context_parallel: int = 1

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())

    @property
    def dtype_name(self) -> str:
        """E.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def with_mask(self) -> bool:
        """Whether attention is handed its mask; Transformer Engine's makes its own."""
        return self.transformer_impl == "local"

    def batch_of(self, step: int) -> torch.Tensor:
        """Tokens [batch, sequence + 1] of a step, on the CPU; the same in every run."""
        return batch_of(self.text, step=step, batch=self.batch, length=self.sequence + 1)


@contextmanager
def tensor_parallel_megatron(
    device_type: str, context_parallel: int = 1, *, group_size: int | None = None
) -> Iterator[None]:
    """Megatron, tensor parallel over the default group, or so many groups that share sequences, on that kind of device;
    our contexts are closed at the end. group_size: of tensor-parallel groups, where the others are data-parallel."""
    with ExitStack() as stack:
        if device_type == "cpu":
            from commfuse_megatron.testing import cpu_megatron
            from commfuse_megatron.testing.pretraining import PRETRAINING_SHIMS

            stack.enter_context(cpu_megatron())
            stack.enter_context(PRETRAINING_SHIMS["hybrid_final_norm"]())
        from commfuse_megatron.plugin import reset_contexts
        from commfuse_megatron.testing.gpt import tensor_parallel

        sizes = {"context_parallel_size": context_parallel}
        stack.enter_context(tensor_parallel(group_size or dist.get_world_size() // context_parallel, **sizes))
        yield
        reset_contexts()


def build_model(
    task: Task,
    *,
    overlap: OverlapConfig | Literal[False],
    dtype: torch.dtype | None = None,
    lora: NormOutput | None = None,
    **options: Any,
) -> Any:
    """The task's model, stock (False) or with the plugin.

    Args:
        dtype: another one than the task's.
        lora: frozen, with low-rank adapters of this form at all linears.
        options: Megatron's. On GPUs weights are drawn where they lie, which makes each model's others, unless
            `use_cpu_initialization` says otherwise.
    """
    from megatron.core import parallel_state

    from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config

    group_size = parallel_state.get_tensor_model_parallel_world_size()
    gpt = SmallGPT(
        num_layers=task.num_layers if task.pattern is None else len(task.pattern),
        hidden_size=task.hidden_size,
        ffn_hidden_size=task.ffn_hidden_size,
        num_attention_heads=task.num_attention_heads,
        num_query_groups=max(task.num_query_groups, group_size),  # Megatron wants as many as ranks, or more
        vocab_size=task.vocab_size,
        max_sequence_length=task.sequence,
        dtype=dtype or task.dtype,
    )
    chosen: dict[str, Any] = {"transformer_impl": task.transformer_impl}
    if task.device_type == "cuda":
        chosen["use_cpu_initialization"] = False
    if task.context_parallel > 1:
        chosen |= {"context_parallel_size": task.context_parallel, "cp_comm_type": "a2a"}
    if task.pattern is not None:
        chosen["is_hybrid_model"] = True
    config = transformer_config(gpt, group_size, **chosen | options)
    if task.pattern is not None:
        model = _build_hybrid(task, gpt, config, overlap)
    else:
        spec = None
        if task.transformer_impl == "transformer_engine":
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        model = build_gpt(gpt, config, overlap=overlap, device=task.device, spec=spec)
    if lora is not None:
        from commfuse_megatron.testing.lora import add_lora

        model.requires_grad_(False)
        add_lora(model, norm_output=lora)
    return model


def _build_hybrid(task: Task, gpt: Any, config: Any, overlap: OverlapConfig | Literal[False]) -> Any:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from commfuse_megatron.plugin import apply_to_spec, convert_model
    from commfuse_megatron.plugin.hybrid_spec import stock_stack_spec_local

    spec = stock_stack_spec_local if task.transformer_impl == "local" else hybrid_stack_spec
    model = HybridModel(
        config=config,
        hybrid_stack_spec=apply_to_spec(spec, overlap) if overlap else spec,
        vocab_size=gpt.vocab_size,
        max_sequence_length=gpt.max_sequence_length,
        hybrid_layer_pattern=task.pattern,
        position_embedding_type="rope",
    ).to(task.device)
    return convert_model(model, overlap) if overlap else model


def stock_reasons(model: Any) -> dict[str, str | None]:
    """By linear of a model that was overlapped: why it, or a call of it, was not; None if all calls were. Under context
    parallelism core attentions, too, and no linears of one rank."""
    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.plugin.support import ONE_RANK

    return {
        layer.name: None
        if layer.path == "overlapped"
        else f"{layer.path}: {'; '.join((*layer.reasons, *layer.sequential_reasons)) or 'no reason given'}"
        for layer in model_report(model).layers
        # Adapters' linears are Megatron's own, in stock and here.
        if ".adapter." not in layer.name and layer.reasons != (ONE_RANK,)
    }
