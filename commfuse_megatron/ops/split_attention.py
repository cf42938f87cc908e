"""One call's attention, split by queries: which rows, keys, mask and dropout belong to which split.

Knows kernels, not transfers. Splits are numbered as the schedule numbers chunks: flat, owner-major.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from commfuse_megatron.kernels.attention import AttentionKernel, BoundAttention, Dropout, Operands, SplitMask
from commfuse_megatron.problem import AttentionProblem, RowRange, VisibleKeys

# Splits draw their dropout masks from seeds this far apart: an odd number of no meaning.
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 1 << 63


class Heads(NamedTuple):
    """Operands of one call, contiguous: q [S, B, H, D], k [S, B, H_kv, D], v [S, B, H_kv, D_v]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class SplitAttention:
    """Forward and backward of single splits.

    Args:
        splits: rows of every split's queries.
        mask: booleans [.., .., S, S] in place of the problem's band of visible keys.
        dropout: of all splits; each one draws from a seed of its own.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        kernel: AttentionKernel,
        splits: Sequence[RowRange],
        scale: float,
        mask: torch.Tensor | None,
        dropout: Dropout | None,
    ) -> None:
        self.splits = splits
        self.mask = mask
        self.scale = scale
        self._kernel = kernel
        self._dropout = dropout
        self._visible: list[VisibleKeys] = [problem.visible_keys(queries) for queries in splits]

    @property
    def is_plain(self) -> bool:
        """Without mask and dropout."""
        return self.mask is None and self._dropout is None

    def forward(self, index: int, heads: Heads, attended: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Fill the rows of split `index` of `attended` [S, B, H, D_v]; returns the state for `backward`."""
        return self._kernel.forward(self._operands(index, heads, attended), *self._rest(index))

    def bind_forward(
        self, index: int, heads: Heads, attended: torch.Tensor, state_rows: int | None
    ) -> tuple[Operands, BoundAttention | None]:
        """The operands of `forward`, without dropout, and the call on their addresses; see `AttentionKernel`."""
        operands = self._operands(index, heads, attended)
        return operands, self._kernel.bind_forward(operands, self._rest(index)[0], self.scale, state_rows)

    def bind_backward(
        self, heads: Heads, attended: torch.Tensor, grad_attended: torch.Tensor, gradients: Heads
    ) -> BoundAttention | None:
        """`gradients` of split 0, which sees all keys, on addresses; results like `gradients`."""
        operands, (mask, scale, _) = self._operands(0, heads, attended), self._rest(0)
        return self._kernel.bind_backward(grad_attended, operands, mask, scale, gradients)

    def gradients(
        self,
        index: int,
        heads: Heads,
        attended: torch.Tensor,
        state: tuple[torch.Tensor, ...],
        grad_attended: torch.Tensor,
    ) -> Heads:
        """The gradients of split `index`'s queries, and of the keys and values that they see, as the kernel gives them.

        grad_attended: [queries, B, H, D_v].
        """
        operands = self._operands(index, heads, attended)
        return Heads(*self._kernel.backward(grad_attended, operands, state, *self._rest(index)))

    def add_gradients(self, index: int, found: Heads, sums: "InputGradients") -> None:
        """Put what `gradients` gave of split `index` where the gradients of all splits are put together."""
        queries, keys = self.splits[index], self._visible[index].keys
        sums.q[queries.start : queries.stop].copy_(found.q)
        sums.k_sum[keys.start : keys.stop] += found.k
        sums.v_sum[keys.start : keys.stop] += found.v

    def _queries(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[self.splits[index].start : self.splits[index].stop]

    def _operands(self, index: int, heads: Heads, attended: torch.Tensor) -> Operands:
        seen = slice(self._visible[index].keys.start, self._visible[index].keys.stop)
        return self._queries(index, heads.q), heads.k[seen], heads.v[seen], self._queries(index, attended)

    def _rest(self, index: int) -> tuple[SplitMask, float, Dropout | None]:
        queries, dropout = self.splits[index], self._dropout
        hidden = None if self.mask is None else self.mask[..., queries.start : queries.stop, :]
        if dropout is not None:
            dropout = apart(dropout, index)
        return SplitMask(self._visible[index], hidden), self.scale, dropout


class InputGradients:
    """Gradients of q, k and v while they are put together: those of keys and values as sums over splits, in fp32."""

    def __init__(self, heads: Heads) -> None:
        self._dtype = heads.k.dtype
        wide = torch.float64 if heads.k.dtype == torch.float64 else torch.float32
        self.q = torch.empty_like(heads.q)
        self.k_sum, self.v_sum = (torch.zeros_like(tensor, dtype=wide) for tensor in (heads.k, heads.v))

    def result(self) -> Heads:
        """The gradients in the dtype of the operands."""
        return Heads(self.q, self.k_sum.to(self._dtype), self.v_sum.to(self._dtype))


def apart(dropout: Dropout, number: int) -> Dropout:
    """The same with a seed of its own, for part `number` of a call."""
    return dropout._replace(seed=(dropout.seed + number * _SEED_STEP) % _SEEDS)


def operands_for_kernels(heads: Heads, *, is_kept: bool) -> Heads:
    """Operands as kernels load them. is_kept: until the backward pass, so they hold no more memory than they need."""
    heads = Heads(*map(_for_kernels, heads))
    return _filling_their_memory(heads) if is_kept else heads


def _filling_their_memory(heads: Heads) -> Heads:
    """Operands to be kept until the backward pass: those that would keep more memory alive than they need are copied.

    As values that are a view into a fused projection, whose queries and keys went through rotary embedding.
    """
    needed: dict[int, int] = {}
    for tensor in heads:
        start = tensor.untyped_storage().data_ptr()
        needed[start] = needed.get(start, 0) + tensor.nbytes
    copies = []
    for tensor in heads:
        storage = tensor.untyped_storage()
        is_filled = needed[storage.data_ptr()] >= storage.nbytes()
        copies.append(tensor if is_filled else tensor.clone(memory_format=torch.contiguous_format))
    return Heads(*copies)


def _for_kernels(tensor: torch.Tensor) -> torch.Tensor:
    """An operand as kernels load it, 16 bytes at a time: itself, if it is a view into a fused projection, say."""
    per_load = 16 // tensor.element_size()
    *outer, last = tensor.stride()
    is_aligned = last == 1 and not any(stride <= 0 or stride % per_load for stride in outer)
    if is_aligned and tensor.data_ptr() % 16 == 0:
        return tensor
    # Not `contiguous`, which leaves what begins elsewhere, or has an odd stride in a dimension of size 1, as it is.
    return tensor.clone(memory_format=torch.contiguous_format)
