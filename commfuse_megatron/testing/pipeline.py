"""One training step by Megatron's own schedules: micro-batches, pipeline stages, data-parallel buckets.

Unlike `training.Training` it takes several model chunks and micro-batches, and keeps losses and gradients apart for
comparison. Every rank must build its chunks and call `step` in the same order.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Outcome", "ScheduledRun"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """losses: one per micro-batch, on the last pipeline stage only. gradients: `main_grad` by parameter."""

    losses: tuple[float, ...]
    gradients: dict[str, torch.Tensor]


class ScheduledRun:
    """Model chunks under Megatron's DistributedDataParallel, driven by its forward-backward schedule.

    Args:
        optimizer: "adam" makes one too; "distributed" shards it over the data-parallel ranks and overlaps its
            communication with both passes.
    """

    def __init__(self, chunks: list[Any], *, optimizer: str | None = None) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

        is_distributed = optimizer == "distributed"
        config = self._config = chunks[0].config
        for chunk in chunks:
            for parameter in chunk.parameters():
                set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=is_distributed,
            overlap_grad_reduce=is_distributed,
            overlap_param_gather=is_distributed,
            bucket_size=20_000 if is_distributed else None,
        )
        self.chunks = chunks
        self.wrapped = [
            DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
            for number, chunk in enumerate(chunks)
        ]
        config.finalize_model_grads_func = finalize_model_grads
        self._optimizer = None
        if is_distributed:
            (wrapped,) = self.wrapped
            config.no_sync_func, config.param_sync_func = wrapped.no_sync, wrapped.start_param_sync
        if optimizer is not None:
            options = OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                params_dtype=config.params_dtype,
                clip_grad=0.0,
                use_distributed_optimizer=is_distributed,
                overlap_param_gather=is_distributed,
            )
            with _Float64IsFullPrecision():
                self._optimizer = get_megatron_optimizer(options, self.wrapped)

    def step(
        self, micro_batches: Sequence[torch.Tensor], *, forward_only: bool = False, packed: tuple[int, ...] = ()
    ) -> Outcome:
        """Forward and backward of all micro-batches ([batch, sequence + 1]), and the optimizer's step if there is one.

        forward_only: evaluate without gradients. packed: lengths of the sequences in the one row of each micro-batch.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for wrapped in self.wrapped:
            wrapped.train(not forward_only)
            wrapped.zero_grad_buffer()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        batch, length = micro_batches[0].shape
        losses = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, packed=packed),
            data_iterator=[iter(micro_batches) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=len(micro_batches),
            seq_length=length - 1,
            micro_batch_size=batch,
            forward_only=forward_only,
        )
        gradients = {} if forward_only else {name: p.main_grad.clone() for name, p in self._trained()}
        if self._optimizer is not None and not forward_only:
            with _Float64IsFullPrecision():
                self._optimizer.step()
        return Outcome(tuple(entry["loss"].item() for entry in losses), gradients)

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters as they are now, by name; gathered again where the optimizer shards them."""
        for wrapped in self.wrapped:
            if wrapped.ddp_config.overlap_param_gather:
                wrapped.start_param_sync(force_sync=True)
        return {name: parameter.detach() for name, parameter in self._named()}

    def _named(self) -> Iterator[tuple[str, Any]]:
        for number, chunk in enumerate(self.chunks):
            prefix = f"chunk {number}: " if len(self.chunks) > 1 else ""
            for name, parameter in chunk.named_parameters():
                yield prefix + name, parameter

    def _trained(self) -> Iterator[tuple[str, Any]]:
        return ((name, parameter) for name, parameter in self._named() if parameter.requires_grad)


class _Float64IsFullPrecision(TorchFunctionMode):
    """Lets Megatron's optimizers take float64: they know one type that need not be widened, float32, by its name."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1:
                return func(*args).replace("DoubleTensor", "FloatTensor")
        return func(*args, **(kwargs or {}))


def _forward_step(
    micro_batches: Iterator[torch.Tensor], model: Any, *, packed: tuple[int, ...]
) -> tuple[torch.Tensor, Any]:
    tokens = next(micro_batches)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    length = inputs.size(1)
    positions = torch.arange(length, device=tokens.device).expand_as(inputs)
    future = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)
    if packed:
        output = model(inputs, positions, None, labels=labels, packed_seq_params=_packed(packed, tokens.device))
    else:
        output = model(inputs, positions, future, labels=labels)

    def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.mean()
        return mean, {"loss": mean.detach()}

    return output, loss_of


def _packed(lengths: tuple[int, ...], device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )
