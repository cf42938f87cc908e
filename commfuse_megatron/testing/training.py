"""Training steps as Megatron does them: its data-parallel wrapper, its gradient finalisation, its optimizer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from commfuse_megatron.testing.gpt import loss_of


def data_parallel(chunks: Sequence[Any], *, lr: float | None, **options: Any) -> tuple[list[Any], Any]:
    """Model chunks in Megatron's DistributedDataParallel with these `options`, and their Adam; None without `lr`."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for chunk in chunks:
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = chunks[0].config
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=config.params_dtype.itemsize == 2, **options)
    wrapped = [
        DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]
    if lr is None:
        return wrapped, None
    adam = OptimizerConfig(
        optimizer="adam",
        lr=lr,
        bf16=config.bf16,
        fp16=config.fp16,
        params_dtype=config.params_dtype,
        clip_grad=0.0,
        use_distributed_optimizer=ddp_config.use_distributed_optimizer,
        overlap_param_gather=ddp_config.overlap_param_gather,
    )
    with Float64IsFullPrecision():
        return wrapped, get_megatron_optimizer(adam, wrapped)


class Float64IsFullPrecision(TorchFunctionMode):
    """Lets Megatron's optimizers take float64: they know one type that need not be widened, float32, by its name."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1:
                return func(*args).replace("DoubleTensor", "FloatTensor")
        return func(*args, **(kwargs or {}))


class Training:
    """A model with Megatron's DistributedDataParallel and Adam around it; one `step` per batch.

    `finalize_model_grads` sums what sequence parallelism left partial on each rank: the gradients of norms and of
    biases added after a reduce-scatter.

    Args:
        with_mask: hand the attention a mask; Transformer Engine's makes its own.
    """

    def __init__(
        self, model: Any, *, lr: float = 1e-3, overlap_grad_reduce: bool = False, with_mask: bool = True
    ) -> None:
        (self.wrapped,), self.optimizer = data_parallel([model], lr=lr, overlap_grad_reduce=overlap_grad_reduce)
        self._model = model
        self._with_mask = with_mask

    def step(self, tokens: torch.Tensor) -> float:
        """Forward, backward, one optimizer step on `tokens` [batch, sequence + 1]; the loss before the step."""
        loss = self.backward(tokens)
        self.optimizer.step()
        return loss

    def backward(self, tokens: torch.Tensor) -> float:
        """Forward and backward only; returns the loss.

        The gradients lie in `main_grad`, final over all ranks (in fp16 times the optimizer's loss scale). Under
        `cuda_graph_impl: local` Megatron records the first call and captures its graphs at the end of it, as its
        schedules do; later calls replay them.
        """
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.transformer.cuda_graphs import create_cudagraphs

        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = loss_of(self.wrapped, tokens, with_mask=self._with_mask)
        self.optimizer.scale_loss(loss).backward()
        finalize_model_grads([self.wrapped])
        found = self._of_all_rows(loss.detach()).item()
        if getattr(self._model.config, "cuda_graph_impl", "none") == "local":
            create_cudagraphs()
        return found

    def _of_all_rows(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean over the ranks that share the sequences, which have equally many rows."""
        from megatron.core import parallel_state

        ranks = parallel_state.get_context_parallel_world_size()
        if ranks > 1:
            torch.distributed.all_reduce(loss, group=parallel_state.get_context_parallel_group())
        return loss / ranks

    def grad_norm(self) -> float:
        """The norm of all gradients of the last step, over the tensor-parallel group, in float64. Collective."""
        from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate

        trained = [p for p in self._model.parameters() if p.requires_grad]
        own = [p.main_grad for p in trained if param_is_not_tensor_parallel_duplicate(p)]
        total = torch.stack([gradient.double().square().sum() for gradient in own]).sum()
        torch.distributed.all_reduce(total, group=self._model.pg_collection.tp)
        return total.sqrt().item()

    def save(self, folder: Path) -> None:
        """Write weights and optimizer state as Megatron's distributed checkpoint. Collective; `folder` is shared."""
        from megatron.core import dist_checkpointing

        if torch.distributed.get_rank() == 0:
            folder.mkdir(parents=True)
        torch.distributed.barrier()
        dist_checkpointing.save(self._sharded_state(is_loading=False), str(folder))

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, of this model or of one with the same weights. Collective."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self._sharded_state(is_loading=True), str(folder))
        self._model.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

    def _sharded_state(self, *, is_loading: bool) -> dict[str, Any]:
        metadata = {"dp_cp_group": self._model.pg_collection.dp_cp}
        model_state = self._model.sharded_state_dict(metadata=metadata)
        return {
            "model": model_state,
            "optimizer": self.optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata),
        }
