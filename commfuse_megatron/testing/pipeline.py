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

from commfuse_megatron.testing.gpt import losses_of
from commfuse_megatron.testing.training import Float64IsFullPrecision, data_parallel


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
        from megatron.core.distributed import finalize_model_grads

        self.chunks = chunks
        is_distributed = optimizer == "distributed"
        options = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        self.wrapped, self._optimizer = data_parallel(
            chunks,
            lr=None if optimizer is None else 1e-3,
            bucket_size=20_000 if is_distributed else None,
            **dict.fromkeys(options, is_distributed),
        )
        config = chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        if is_distributed:
            (wrapped,) = self.wrapped
            config.no_sync_func, config.param_sync_func = wrapped.no_sync, wrapped.start_param_sync

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
        gradients = {} if forward_only else {name: p.main_grad.clone() for name, p in self._named() if p.requires_grad}
        if self._optimizer is not None and not forward_only:
            with Float64IsFullPrecision():
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


def _forward_step(
    micro_batches: Iterator[torch.Tensor], model: Any, *, packed: tuple[int, ...]
) -> tuple[torch.Tensor, Any]:
    tokens = next(micro_batches)
    options = {"packed_seq_params": _packed(packed, tokens.device)} if packed else {}
    return losses_of(model, tokens, with_mask=not packed, **options), _mean


def _mean(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    from megatron.core import parallel_state

    # As Megatron's scripts give it: this rank's part of the mean over context-parallel ranks. Its schedules multiply it
    # by their number, in place.
    mean = losses.mean() / parallel_state.get_context_parallel_world_size()
    return mean, {"loss": mean.detach()}


def _packed(lengths: tuple[int, ...], device: torch.device) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=longest, max_seqlen_kv=longest
    )
