"""PyTorch's flash attention, called below `scaled_dot_product_attention`: that costs little host time.

Behind the same two operators a program may put FlashAttention-3 or -4, where its package is installed, with
`torch.nn.attention.activate_flash_attention_impl`. They take less than PyTorch's own.

The contract that bites: all of them align a causal mask and a window to the last query and the last key ("bottom
right"), which is what a split of queries against a prefix of keys needs. PyTorch's own has about half of cuDNN's speed
on Hopper.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import current_flash_attention_impl

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels.attention import BoundAttention, Dropout, Operands, SplitMask
from commfuse_megatron.problem import AttentionProblem

__all__ = ["FlashAttention", "active_flash_implementation", "flash_attention_unavailable_reason"]


class _Limits(NamedTuple):
    """What an implementation takes. majors: of compute capabilities; any from 8.0 if there are none."""

    majors: tuple[int, ...]
    most_features: int
    takes_windows: bool
    takes_dropout: bool


# By the name under which a program activates it; PyTorch's own under None. Of FA3 and FA4 what PyTorch 2.11 checks, and
# the head sizes of their packages: FA4 lists up to 128, and more only for some GPUs and versions. FA4's backward
# pass takes no windows, and a kernel is chosen for both passes. Read, not run: neither was installed anywhere.
_LIMITS = {
    None: _Limits((), 256, takes_windows=True, takes_dropout=True),
    "FA3": _Limits((9,), 256, takes_windows=True, takes_dropout=False),
    "FA4": _Limits((9, 10), 128, takes_windows=False, takes_dropout=False),
}


def active_flash_implementation() -> str | None:
    """The name of what the program has put in the place of PyTorch's own flash attention; None if nothing."""
    return current_flash_attention_impl()


def flash_attention_unavailable_reason(problem: AttentionProblem, device: torch.device) -> str | None:
    """Why the flash attention that is active now cannot compute `problem` on `device`, None if it can."""
    if device.type != "cuda":
        return f"flash attention runs on CUDA devices, this is {device}"
    implementation = active_flash_implementation()
    limits, kernel = _LIMITS.get(implementation), _say(implementation)
    if limits is None:
        return f"{kernel} is active, and what that takes is not known: use FA3, FA4 or PyTorch's own"
    if implementation is None and not torch.backends.cuda.is_flash_attention_available():
        return "this PyTorch was built without flash attention"
    major = torch.cuda.get_device_capability(device)[0]
    if limits.majors and major not in limits.majors:
        return f"{kernel} needs compute capability {' or '.join(f'{each}.x' for each in limits.majors)}"
    if major < 8:
        return f"{kernel} needs compute capability 8.0"
    if problem.dtype not in ("bfloat16", "float16"):
        return f"{kernel} takes bfloat16 and float16, this is {problem.dtype}"
    if problem.head_dim != problem.value_dim or problem.head_dim % 8 or problem.head_dim > limits.most_features:
        features = f"{problem.head_dim} and {problem.value_dim}"
        return f"{kernel} takes heads of one size, a multiple of 8 up to {limits.most_features}, these have {features}"
    if problem.has_mask:
        return f"{kernel} takes no mask tensor"
    if problem.has_dropout and not limits.takes_dropout:
        return f"{kernel} takes no dropout"
    if not limits.takes_windows and (problem.left is not None or problem.right not in (None, 0)):
        return f"{kernel} takes no windows in its backward pass"
    return None


def _say(implementation: str | None) -> str:
    return "flash attention" if implementation is None else f"flash attention ({implementation})"


class FlashAttention:
    """See `AttentionKernel`. Dropout draws from the device's default generator, which is given the seed for one call:
    the kernel takes no other, and what the program draws must not depend on how often we try things out.

    Made for the implementation that is active; where another one is later, calls raise UnsupportedError: its limits may
    be others, and one must not be given what the other saved.
    """

    can_bind = False

    def __init__(self) -> None:
        self._implementation = active_flash_implementation()
        self.name = "flash" if self._implementation is None else f"flash ({self._implementation})"

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, ...]:
        """Fill `out`; returns the log-sum-exp of the scores and the generator's state."""
        self._require_active()
        probability = 0.0 if dropout is None else dropout.probability
        with self._on_device_of(q), _seeded(q.device, dropout):
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
                **self._window(mask),
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
        self._require_active()
        q, k, v, out = operands
        logsumexp, *rng_state = state
        with self._on_device_of(q):
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
                **self._window(mask),
            )
        grad_q, grad_k, grad_v = map(_batch_first, gradients)
        return grad_q, grad_k, grad_v

    def bind_forward(
        self, operands: Operands, mask: SplitMask, scale: float, state_rows: int | None = None
    ) -> BoundAttention | None:
        """None: PyTorch's functions take tensors."""
        return None

    def bind_backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        mask: SplitMask,
        scale: float,
    ) -> BoundAttention | None:
        """None, as for `bind_forward`."""
        return None

    def stale_reason(self) -> str | None:
        """Why calls planned with this kernel cannot go on: the program has activated another implementation since."""
        active = active_flash_implementation()
        if active == self._implementation:
            return None
        return (
            f"this attention was planned with {_say(self._implementation)}, and {_say(active)} is active now: make a "
            "new OverlapContext after activating or restoring an implementation"
        )

    def _require_active(self) -> None:
        reason = self.stale_reason()
        if reason is not None:
            raise UnsupportedError(reason)

    def _on_device_of(self, tensor: torch.Tensor) -> Any:
        """FA4 launches on the current device's stream, whatever device its operands are on."""
        return nullcontext() if self._implementation is None else torch.cuda.device(tensor.get_device())

    def _window(self, mask: SplitMask) -> dict[str, Any]:
        left, right = mask.band.left, mask.band.right
        if self._implementation == "FA4":  # -1 is a window to it too; without windows `is_causal` says it all
            return {}
        return {"window_size_left": -1 if left is None else left, "window_size_right": -1 if right is None else right}


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
