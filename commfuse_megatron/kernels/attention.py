"""Attention of a range of queries against the keys that they see: the interface of its kernels, and the plain one.

Knows tensors and bands of visible keys; must not know groups or schedules. All tensors are [S, B, heads, features],
Megatron's order. Beware: what a kernel's forward returns belongs to exactly that call; its backward must be given the
same operands, `out` included, unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from commfuse_megatron.problem import VisibleKeys

#: What takes the place of a score that a mask tensor hides: Megatron's number, so that a query that sees nothing gets
#: the mean of all values there as here.
MASKED_SCORE = -10000.0


class Dropout(NamedTuple):
    """Dropout of attention probabilities. The same seed gives the same mask, in backward and when recomputed."""

    probability: float
    seed: int


class SplitMask(NamedTuple):
    """What the queries of one split see of the keys given along with them.

    band: left and right of it count (see `VisibleKeys`). hidden: instead, booleans that broadcast to [B, heads,
    queries, keys]; True hides.
    """

    band: VisibleKeys
    hidden: torch.Tensor | None = None


#: Of one call: q, k, v, out.
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class BoundAttention(NamedTuple):
    """A call on addresses.

    run: takes the handle of the stream and addresses: of scratch memory, q, k, v, out, state; of a backward pass also
    grad_out, grad_q, grad_k, grad_v. scratch_bytes: what it needs of scratch memory, which begins at a multiple of 256
    and is only used while the call runs; 0: none, the address does not matter.
    """

    run: Callable[..., None]
    scratch_bytes: int


class AttentionKernel(ABC):
    """What computes attention. Kernels run on the current stream and block nothing."""

    name: ClassVar[str]
    #: Whether `bind_forward` and `bind_backward` may give something.
    can_bind: ClassVar[bool] = False

    @abstractmethod
    def forward(
        self, operands: Operands, mask: SplitMask, scale: float, dropout: Dropout | None
    ) -> tuple[torch.Tensor, ...]:
        """Fill `out`; returns what `backward` needs besides the operands.

        q [S_q, B, H, D], k [S_k, B, H_kv, D], v [S_k, B, H_kv, D_v], out [S_q, B, H, D_v]; H is a multiple of H_kv.
        """

    @abstractmethod
    def backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        state: tuple[torch.Tensor, ...],
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q, k and v from that of `out`. operands: of the forward call."""

    def bind_forward(
        self, operands: Operands, mask: SplitMask, scale: float, state_rows: int | None = None
    ) -> BoundAttention | None:
        """`forward` without dropout for tensors like these, on addresses; None where it cannot be had.

        The state is one tensor, fp32 [B, H, S_q, 1], which the caller allocates: contiguous, or these rows of a
        contiguous one with `state_rows` of them.
        """
        return None

    def bind_backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        mask: SplitMask,
        scale: float,
        gradients: Sequence[torch.Tensor] | None = None,
    ) -> BoundAttention | None:
        """`backward` of what `bind_forward` bound, on addresses; None where it cannot be had.

        The gradients are in the dtype of the operands: contiguous, or in tensors like these.
        """
        return None


def join_states(states: Sequence[tuple[torch.Tensor, ...]], queries: Sequence[int]) -> tuple[torch.Tensor, ...] | None:
    """What one call without dropout would leave for `backward`, from what calls for its splits left; None if it cannot
    be told.

    The first tensor of a state is a number for each query [B, H, S_q, ...], and is joined; what else there is describes
    dropout, and is one split's. queries: of every split, in order.
    """
    found = [(state, size) for state, size in zip(states, queries, strict=True) if size]
    lengths = {len(state) for state, _ in found}
    if lengths == {0}:
        return ()
    if len(lengths) > 1 or any(state[0].dim() < 3 or state[0].size(2) != size for state, size in found):
        return None
    first, *others = (state for state, _ in found)
    return torch.cat([first[0], *(state[0] for state in others)], dim=2), *first[1:]


class MathAttention(AttentionKernel):
    """Attention by its formula, in fp32 (fp64 for fp64): any device, dtype and size; keeps a split's scores in memory.

    Computes the probabilities again in backward, by the same softmax and with the same dropout. (From a saved logarithm
    of the denominator they would not add up to 1 in fp32 where a mask hides all keys of a query.)
    """

    name = "math"

    def forward(
        self, operands: Operands, mask: SplitMask, scale: float, dropout: Dropout | None
    ) -> tuple[torch.Tensor, ...]:
        """Fill `out`; nothing has to be kept."""
        q, k, v, out = operands
        scores, _ = _scores(_grouped(q, k.size(2)), _wide(k), mask, scale)
        probabilities = scores.softmax(-1)
        if dropout is not None:
            probabilities *= _kept(probabilities, dropout)
        result = torch.einsum("bgrqk,kbgd->qbgrd", probabilities, _wide(v))
        out.copy_(result.reshape(out.shape))
        return ()

    def backward(
        self,
        grad_out: torch.Tensor,
        operands: Operands,
        state: tuple[torch.Tensor, ...],
        mask: SplitMask,
        scale: float,
        dropout: Dropout | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients in fp32 (fp64), q's in the shape of q."""
        q, k, v, out = operands
        groups = k.size(2)
        q_wide, k_wide, v_wide = _grouped(q, groups), _wide(k), _wide(v)
        grad, out_wide = _grouped(grad_out, groups), _grouped(out, groups)
        scores, hidden = _scores(q_wide, k_wide, mask, scale)
        probabilities = scores.softmax(-1)
        kept = None if dropout is None else _kept(probabilities, dropout)
        grad_probabilities = torch.einsum("qbgrd,kbgd->bgrqk", grad, v_wide)
        if kept is not None:
            grad_probabilities *= kept
        delta = (grad * out_wide).sum(-1).permute(1, 2, 3, 0).unsqueeze(-1)
        grad_scores = grad_probabilities.sub_(delta).mul_(probabilities).mul_(scale)
        if hidden is not None:  # a constant took the score's place
            grad_scores.masked_fill_(hidden, 0.0)
        grad_q = torch.einsum("bgrqk,kbgd->qbgrd", grad_scores, k_wide).reshape(q.shape)
        grad_k = torch.einsum("bgrqk,qbgrd->kbgd", grad_scores, q_wide)
        if kept is not None:
            probabilities *= kept
        grad_v = torch.einsum("bgrqk,qbgrd->kbgd", probabilities, grad)
        return grad_q, grad_k, grad_v


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _grouped(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    """[S, B, H, D] -> [S, B, groups, H / groups, D], wide: heads that share keys side by side."""
    return _wide(tensor).unflatten(2, (groups, tensor.size(2) // groups))


def _scores(
    q: torch.Tensor, k: torch.Tensor, mask: SplitMask, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores [B, groups, H / groups, S_q, S_k] with what is not seen out of the way, and what a mask tensor hides."""
    scores = torch.einsum("qbgrd,kbgd->bgrqk", q, k).mul_(scale)
    if mask.hidden is not None:
        hidden = mask.hidden
        if hidden.dim() == 4 and hidden.size(1) > 1:  # a mask of its own for every head
            hidden = hidden.unflatten(1, scores.shape[1:3])
        elif hidden.dim() == 4:
            hidden = hidden.unsqueeze(2)
        return scores.masked_fill_(hidden, MASKED_SCORE), hidden
    left, right = mask.band.left, mask.band.right
    if left is None and right is None:
        return scores, None
    num_queries, num_keys = scores.shape[-2:]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=scores.device)
    offset = num_keys - num_queries
    if right is not None:
        seen = seen.tril_(offset + right)
    if left is not None:
        seen = seen.triu_(offset - left)
    return scores.masked_fill_(seen.logical_not_(), float("-inf")), None


def _kept(probabilities: torch.Tensor, dropout: Dropout) -> torch.Tensor:
    """0 where dropped, else 1 / (1 - p): the same for the same seed."""
    generator = torch.Generator(probabilities.device).manual_seed(dropout.seed)
    # Not in the program's default dtype, which may be another one when the backward pass comes, and too coarse.
    drawn = torch.rand(probabilities.shape, generator=generator, device=probabilities.device, dtype=torch.float32)
    return (drawn >= dropout.probability).to(probabilities.dtype).div_(1 - dropout.probability)
