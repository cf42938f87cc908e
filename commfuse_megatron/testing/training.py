"""Training steps as Megatron does them: its data-parallel wrapper, its gradient finalisation, its optimizer."""

from typing import Any

import torch

from commfuse_megatron.testing.gpt import loss_of

__all__ = ["Training"]


class Training:
    """A model with Megatron's DistributedDataParallel and Adam around it; one `step` per batch.

    `finalize_model_grads` sums what sequence parallelism left partial on each rank: the gradients of norms and of
    biases added after a reduce-scatter.
    """

    def __init__(self, model: Any, *, lr: float = 1e-3, overlap_grad_reduce: bool = False) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

        config = model.config
        for parameter in model.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        is_16_bit = config.params_dtype in (torch.bfloat16, torch.float16)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=is_16_bit, overlap_grad_reduce=overlap_grad_reduce
        )
        self.wrapped = DistributedDataParallel(config, ddp_config, model)
        options = OptimizerConfig(
            optimizer="adam", lr=lr, bf16=config.bf16, fp16=config.fp16, params_dtype=config.params_dtype, clip_grad=0.0
        )
        self.optimizer = get_megatron_optimizer(options, [self.wrapped])

    def step(self, tokens: torch.Tensor) -> float:
        """Forward, backward, one optimizer step on `tokens` [batch, sequence + 1]; the loss before the step."""
        loss = self.backward(tokens)
        self.optimizer.step()
        return loss

    def backward(self, tokens: torch.Tensor) -> float:
        """Forward and backward only; returns the loss.

        The gradients lie in `main_grad`, final over all ranks (in fp16 times the optimizer's loss scale).
        """
        from megatron.core.distributed import finalize_model_grads

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = loss_of(self.wrapped, tokens)
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([self.wrapped])
        return loss.item()
