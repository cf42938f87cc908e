"""Attention over a split sequence whose heads come, and whose gradients go, group by group: the engine of a block.

`ForwardInParts` sends a group's heads when the caller has them and attends all at the end; `BackwardInParts` sends the
gradient of the output, which it computes group by group, and leaves those of q, k and v to the caller, group by group.
Where nothing is overlapped the two `AtOnce` do the same in one go, with one group. Knows prepared passes; must not know
autograd.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, override

import torch

from commfuse_megatron.ops.qkv_rows import multiply_columns
from commfuse_megatron.ops.split_attention import Heads
from commfuse_megatron.ops.ulysses_pass import UlyssesCall, UlyssesPass, copy_all
from commfuse_megatron.ops.ulysses_passes import Backward, Forward, Saved, ulysses_backward, ulysses_forward
from commfuse_megatron.ops.ulysses_pieces import CopyPair, pack_copies
from commfuse_megatron.problem import HeadGroup, RowRange
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.tape_program import TapeKernel
from commfuse_megatron.runtime.tensor_program import Kernel
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lower_ulysses import PACK

Shapes = Sequence[tuple[int, ...]]


class ForwardOfGroups(Protocol):
    """A forward pass under way."""

    def submit(self) -> None:
        """The caller has submitted a kernel, beside which what has been sent may travel."""

    def bring(self, number: int, heads: Heads) -> None:
        """Send q, k and v of the next group: of all ranks' heads; k and v are None where groups share them."""

    def finish(self) -> tuple[torch.Tensor, Saved]:
        """Attend; see `ulysses_forward`."""


class BackwardOfGroups(Protocol):
    """A backward pass under way."""

    def begin(self, grad: torch.Tensor, weight: torch.Tensor, beside: Callable[[], None], due: Sequence[bool]) -> None:
        """From grad [M, N] of what the projection gave, with weight [N, H * D_v], to the attention's gradients.

        beside: computes what else is due, while the last of what is sent travels. due: by group, whether its gradients
        will be taken; where all will, none need be here yet.
        """

    def submit(self) -> None:
        """The caller has submitted a kernel, beside which what has been sent may travel."""

    def take(self, number: int) -> Heads:
        """The gradients of a group's q, k and v, once."""

    @property
    def is_taken(self) -> bool:
        """Whether those of all groups are that were due: nothing need be kept."""


class ForwardAtOnce:
    """The whole pass at its end."""

    def __init__(self, call: UlyssesCall) -> None:
        self._call = call
        self._heads: Heads | None = None

    def submit(self) -> None:
        """Nothing has been sent."""

    def bring(self, number: int, heads: Heads) -> None:
        """Keep those of the only group."""
        self._heads = heads

    def finish(self) -> tuple[torch.Tensor, Saved]:
        """Exchange and attend."""
        heads, self._heads = self._heads, None
        assert heads is not None
        return ulysses_forward(self._call, heads)


class BackwardAtOnce:
    """The whole pass at its beginning. shapes: of q, k and v of all heads."""

    def __init__(self, p: PreparedPass, call: UlyssesCall, saved: Saved, shapes: Shapes) -> None:
        self._p, self._call, self._saved = p, call, saved
        self._like = Heads(*(torch.empty(shape, device="meta") for shape in shapes))
        self._gradients: Heads | None = None

    def begin(self, grad: torch.Tensor, weight: torch.Tensor, beside: Callable[[], None], due: Sequence[bool]) -> None:
        """Multiply, exchange and attend."""
        rows, batch = self._like.q.shape[:2]
        grad_attended = (grad @ weight).unflatten(0, (rows, batch))
        beside()
        self._gradients = ulysses_backward(self._p, self._call, self._saved, grad_attended, self._like)

    def submit(self) -> None:
        """Nothing travels any more."""

    def take(self, number: int) -> Heads:
        """Those of all heads."""
        gradients, self._gradients = self._gradients, None
        assert gradients is not None
        return gradients

    @property
    def is_taken(self) -> bool:
        """See `BackwardOfGroups`."""
        return self._gradients is None


class _Packed(UlyssesPass):
    """What both passes have in common: the caller's products, or copies, are where they are sent from already."""

    def packed(self, turn: int) -> torch.Tensor:
        """[R, S_r, B, features]: what goes to every rank, and own rows."""
        rows = self.arriving.packed_for_all(turn)
        packed = self.memory["packed"][rows.start : rows.start + rows.count]
        shape = (self.problem.group_size, self.pieces.own_rows, self.problem.batch)
        return packed.view(*shape, self.arriving.exchange.widths[turn] * self.problem.unit)

    @override
    def kernels(self) -> dict[str, Kernel]:
        return super().kernels() | {PACK: lambda turn, reads, writes: None}

    @override
    def tape_kernels(self) -> dict[str, TapeKernel]:
        return super().tape_kernels() | {PACK: lambda binder, op: None}

    @override
    def to_tokens(self, number: int, tokens: torch.Tensor, ranks: range, rows: slice, operand: str) -> list[CopyPair]:
        return [CopyPair(tokens, self.packed(number)[ranks.start : ranks.stop, rows], (operand, "packed"))]


class ForwardInParts(_Packed, Forward):
    """A group is sent while the caller computes the next one."""

    def __init__(self, call: UlyssesCall, like: torch.Tensor) -> None:
        """Begin. like: of the dtype and device of all heads."""
        super().__init__(call, like, None)
        asked, self._arrived, tensors = self.asked(pauses=True)
        self._states = self.new_states() if self.may_replay else None
        if self._states is not None:
            tensors = tensors | self.named_states(self._states)
        on_tape = self.tape_kernels() if self._states is not None else None
        self._run = self.p.begin_in_parts(
            asked, tensors, kernels=self.kernels(), tape_kernels=on_tape, layout=self.layout
        )

    def submit(self) -> None:
        """See `ForwardOfGroups`."""
        self._run.submit()

    def bring(self, number: int, heads: Heads) -> None:
        """See `ForwardOfGroups`."""
        ranks, group = range(self.problem.group_size), _alone(self.groups[number])
        parts = self.pieces.in_tokens(group, self.packed(number), heads)
        for index in range(3 if group.brings_kv else 1):
            chosen = group.kv if index else group.q
            copy_all(pack_copies(parts[index], heads[index], chosen, ranks, len(ranks), ("packed", "")))
        if number + 1 < len(self.groups):
            self._run.go_on()

    def finish(self) -> tuple[torch.Tensor, Saved]:
        """See `ForwardOfGroups`."""
        self._run.go_on()
        assert self._run.is_done
        if self._run.mode == "tape":
            assert self._states is not None
            return self.out, Saved(self._arrived, self.memory["a"], [(state,) for state in self._states])
        return self.out, self.saved(self._arrived)


class BackwardInParts(_Packed, Backward):
    """The output's gradient is sent group by group as it is computed, and the caller takes those of q, k and v."""

    def __init__(self, p: PreparedPass, call: UlyssesCall, saved: Saved, shapes: Sequence[Shapes]) -> None:
        """shapes: by group, of q, k and v of all ranks' heads."""
        super().__init__(p, call, saved, saved.attended, None)
        self._found: dict[int, Heads] = {}
        self._left: set[int] = set()
        named: dict[str, torch.Tensor] = {}
        for number, of_group in enumerate(shapes):
            found = [saved.attended.new_empty(shape) for shape in of_group]
            self._found[number] = Heads(*[*found, None, None][:3])  # type: ignore[arg-type]
            named |= {self.name_of_gradient(name, number): each for name, each in zip("qkv", found, strict=False)}
        tensors, on_tape = self.memory, None
        if self.may_bind:
            tensors, on_tape = self.memory | self.named_saved() | named, self.tape_kernels()
        asked = Asked(is_backward=True, pauses=True)
        self._run = p.begin_in_parts(asked, tensors, kernels=self.kernels(), tape_kernels=on_tape, layout=self.layout)

    def begin(self, grad: torch.Tensor, weight: torch.Tensor, beside: Callable[[], None], due: Sequence[bool]) -> None:
        """See `BackwardOfGroups`."""
        self._left = {number for number, is_due in enumerate(due) if is_due}
        for turn in range(len(self.groups)):
            chosen, value_dim = self.groups[self.group_of(turn)].q, self.problem.value_dim
            columns = RowRange(chosen.start * value_dim, chosen.stop * value_dim)
            multiply_columns(grad, weight, columns, self.packed(turn).flatten(1, 2))
            self._run.submit()
            self._run.go_on()
        beside()
        self._run.submit()
        self._run.go_on()
        while not (all(due) or self._run.is_done):
            self._run.go_on()
        if not all(due):
            self._found = {number: found for number, found in self._found.items() if number in self._left}

    def submit(self) -> None:
        """See `BackwardOfGroups`."""
        self._run.submit()

    def take(self, number: int) -> Heads:
        """See `BackwardOfGroups`."""
        num_groups = len(self.groups)  # each is one part that sends and one that unpacks; one attends
        while self._run.num_done < num_groups + 2 + self.turn_of(number):
            self._run.go_on()
        self._left.discard(number)
        return self._found.pop(number)

    @property
    def is_taken(self) -> bool:
        """See `BackwardOfGroups`."""
        return not self._left

    @override
    def gradients(self, number: int) -> tuple[Heads, HeadGroup]:
        return self._found[number], _alone(self.groups[number])

    @override
    def name_of_gradient(self, name: str, number: int) -> str:
        return f"grad_{name} {number}"


def _alone(group: HeadGroup) -> HeadGroup:
    """The same heads where each rank has no others."""
    return HeadGroup(RowRange(0, group.q.size), RowRange(0, group.kv.size), group.brings_kv)
