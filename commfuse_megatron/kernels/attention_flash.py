"""PyTorch's flash attention, called below `scaled_dot_product_attention`: that costs little host time.

It aligns a causal mask and a window to the last query and the last key ("bottom right"), which is what a split of
queries against a prefix of keys needs. It has about half of cuDNN's speed on Hopper.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import current_flash_attention_impl

from commfuse_megatron.kernels.attention import AttentionKernel, Dropout, Operands, SplitMask
from commfuse_megatron.problem import AttentionProblem

_MOST_FEATURES = 256


def flash_attention_unavailable_reason(problem: AttentionProblem, device: torch.device) -> str | None:
    """Why flash attention cannot compute `problem` on `device`, None if it can."""
    if device.type != "cuda":
        return f"flash attention runs on CUDA devices, this is {device}"
    if (other := current_flash_attention_impl()) is not None:
        return f"the program has activated {other} in the place of PyTorch's own flash attention"
    if not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without flash attention"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "flash attention needs compute capability 8.0"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"flash attention takes bfloat16 and float16, this is {problem.dtype}"
    if problem.head_dim != problem.value_dim or problem.head_dim % 8 or problem.head_dim > _MOST_FEATURES:
        features = f"{problem.head_dim} and {problem.value_dim}"
        return f"flash attention takes heads of one size, a multiple of 8 up to {_MOST_FEATURES}, these have {features}"
    if problem.has_mask:
        return "flash attention takes no mask tensor"
    return None


class FlashAttention(AttentionKernel):
    """See `AttentionKernel`. Dropout draws from the device's default generator, which is given the seed for one call:
    the kernel takes no other, and what the program draws must not depend on how often we try things out.
    """

    name = "flash"

    def forward(
        self, operands: Operands, mask: SplitMask, scale: float, dropout: Dropout | None
    ) -> tuple[torch.Tensor, ...]:
        """Fill `out`; returns the log-sum-exp of the scores and the generator's state."""
        q, k, v, out = operands
        probability = 0.0 if dropout is None else dropout.probability
        with _seeded(q.device, dropout):
            result, logsumexp, *state, _ = torch.ops.aten._flash_attention_forward(
                *map(_batch_first, (q, k, v)),
                None,
                None,
                q.size(0),
                k.size(0),
                probability,
                mask.band.is_causal,
                False,
                scale=scale,
                **_window(mask),
            )
        out.copy_(_batch_first(result))
        return logsumexp, *state

    def backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        state: tuple[torch.Tensor, ...],
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients in the dtype of the operands. Deterministic where PyTorch is told to be."""
        q, k, v, out = operands
        logsumexp, *rng_state = state
        gradients = torch.ops.aten._flash_attention_backward(
            *map(_batch_first, (grad_out, q, k, v, out)),
            logsumexp,
            None,
            None,
            q.size(0),
            k.size(0),
            0.0 if dropout is None else dropout.probability,
            mask.band.is_causal,
            *rng_state,
            scale=scale,
            **_window(mask),
        )
        grad_q, grad_k, grad_v = map(_batch_first, gradients)
        return grad_q, grad_k, grad_v


@contextmanager
def _seeded(device: torch.device, dropout: Dropout | None) -> Iterator[None]:
    if dropout is None:
        yield
        return
    generator = torch.cuda.default_generators[device.index]
    before = generator.get_state()
    generator.manual_seed(dropout.seed)
    try:
        yield
    finally:
        generator.set_state(before)


def _batch_first(tensor: torch.Tensor) -> torch.Tensor:
    """[S, B, H, D] seen as [B, S, H, D], and back."""
    return tensor.transpose(0, 1)


def _window(mask: SplitMask) -> dict[str, int]:
    left, right = mask.band.left, mask.band.right
    return {"window_size_left": -1 if left is None else left, "window_size_right": -1 if right is None else right}
