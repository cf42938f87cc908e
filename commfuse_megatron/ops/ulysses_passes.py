"""Both passes of attention over a split sequence, whatever the path: `ulysses_attention` plans and calls them.

Knows prepared passes and kernels; must not know autograd.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, override

import torch

from commfuse_megatron.kernels.attention import join_states
from commfuse_megatron.ops.split_attention import Heads, operands_for_kernels
from commfuse_megatron.ops.ulysses_pass import Marked, UlyssesCall, UlyssesPass, attention_of, copy_all, problem_of
from commfuse_megatron.ops.ulysses_pieces import CopyPair, Piece, pack_copies, sum_pieces, unpack_copies
from commfuse_megatron.ops.ulysses_tapes import (
    ulysses_backward_kernel,
    ulysses_forward_kernels,
)
from commfuse_megatron.problem import HeadGroup
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.tape_program import TapeKernel
from commfuse_megatron.runtime.tensor_program import Kernel
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lower_ulysses import ATTEND_GROUP, UNPACK

State = tuple[torch.Tensor, ...]


class Saved(NamedTuple):
    """What a backward pass needs of its forward pass; none of it lies in a window.

    heads: q, k, v as the call brought them in a group of one rank, else the one tensor in which those of own heads
    arrived. attended: of own heads, group after group. states: what kernels left, by group.
    """

    heads: tuple[torch.Tensor, ...]
    attended: torch.Tensor
    states: list[State]


def ulysses_forward(call: UlyssesCall, heads: Heads) -> tuple[torch.Tensor, Saved]:
    """(this rank's rows of all heads [S_r, B, H * D_v], what the backward pass needs)."""
    p, problem = call.forward, problem_of(call.forward)
    with p:
        if not problem.M:
            out = heads.q.new_empty(heads.q.size(0), problem.batch, problem.N)
            return out, Saved((), out.new_empty(0), [])
        if problem.group_size == 1:
            return _attend_alone(call, heads)
        run = Forward(call, heads.q, heads)
        return run.overlapped() if p.plan.is_scheduled else run.sequential()


def ulysses_backward(p: PreparedPass, call: UlyssesCall, saved: Saved, grad: torch.Tensor, like: Heads) -> Heads:
    """Gradients of this rank's rows of q, k and v. grad: [S_r, B, H * D_v]; like: meta tensors of q, k and v."""
    problem = problem_of(p)
    gradients = Heads(*(grad.new_empty(each.shape) for each in like))
    with p:
        if not problem.M:
            return gradients
        grad = grad.unflatten(-1, (problem.heads, problem.value_dim))
        if problem.group_size == 1:
            attention, heads = attention_of(call, problem, problem.head_groups(1)[0], []), Heads(*saved.heads)
            attended = saved.attended.view(grad.shape)
            with Marked(p, ATTEND_GROUP):
                found = attention.gradients(0, heads, attended, saved.states[0], grad)
            return Heads(*(each.to(grad.dtype) for each in found))
        run = Backward(p, call, saved, grad, gradients)
        (run.overlapped if p.plan.is_scheduled else run.sequential)()
        return gradients


def _attend_alone(call: UlyssesCall, heads: Heads) -> tuple[torch.Tensor, Saved]:
    problem = problem_of(call.forward)
    heads = operands_for_kernels(heads, is_kept=bool(problem.needs))
    flat = heads.q.new_empty(problem.rows, problem.batch, problem.N)
    attended = flat.unflatten(-1, (problem.heads, problem.value_dim))
    with Marked(call.forward, ATTEND_GROUP):
        state = attention_of(call, problem, problem.head_groups(1)[0], []).forward(0, heads, attended)
    # The result may be changed in place, as of more ranks; what is saved may not.
    return flat.clone() if problem.needs else flat, Saved(tuple(heads), flat, [state])


class Forward(UlyssesPass):
    """A forward pass of several ranks, inside its with-block.

    like: of the dtype and device of all. given: q, k and v of all heads; None where they come group by group.
    """

    def __init__(self, call: UlyssesCall, like: torch.Tensor, given: Heads | None) -> None:
        super().__init__(call.forward, call)
        self._given = given
        self.out = like.new_empty(self.pieces.own_rows, self.problem.batch, self.problem.N)
        self.memory = self.exchanged(like)
        self.attended = self.pieces.attended(self.memory["a"])
        self.heads: list[Heads] = []
        self.states: list[dict[int, State]] = [{} for _ in self.groups]

    def overlapped(self) -> tuple[torch.Tensor, Saved]:
        """Groups of heads one after the other, each while the next travels."""
        p, given = self.p, self._given
        assert given is not None
        asked, arrived, tensors = self.asked(pauses=False)
        if self.may_replay:
            states = self.new_states()
            on_tape = tensors | given._asdict() | self.named_states(states)
            layout = (*self.layout, *(tensor.stride() for tensor in given))
            if p.run_from_tape(asked, on_tape, kernels=self.tape_kernels(), layout=layout):
                return self.out, Saved(arrived, self.memory["a"], [(state,) for state in states])
        p.run_on_tensors(asked, tensors, kernels=self.kernels())
        return self.out, self.saved(arrived)

    def asked(self, *, pauses: bool) -> tuple[Asked, tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """What is asked of the pass, where it leaves what arrives, if anybody needs that, and all operands by name."""
        asked, arrived, tensors = Asked(keeps_gathered=bool(self.problem.needs), pauses=pauses), (), self.memory
        if asked.keeps_gathered:
            memory = self.units(self.out, self.arriving.total_rows)
            return asked, (memory,), tensors | self.p.context.memory_for_gathered(memory)
        return asked, arrived, tensors

    @override
    def kernels(self) -> dict[str, Kernel]:
        return super().kernels() | {ATTEND_GROUP: self._attend_group, ATTEND: self._attend}

    @override
    def tape_kernels(self) -> dict[str, TapeKernel]:
        attend = ulysses_forward_kernels(self.pieces, self.attention, self.attended, self.runs)
        return attend | super().tape_kernels()

    @property
    def layout(self) -> tuple[Hashable, ...]:
        """What a tape depends on beside its operands."""
        return self.call.scale, self.p.attention

    def new_states(self) -> list[torch.Tensor]:
        """Memory for what a tape leaves of the softmax, by group."""
        return [view.new_empty(view.size(1), view.size(2), view.size(0), 1, dtype=torch.float32)
                for view in self.attended]  # fmt: skip

    def named_states(self, states: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a tape fills, by name."""
        return {"out": self.out} | {f"states {number}": state for number, state in enumerate(states)}

    def sequential(self) -> tuple[torch.Tensor, Saved]:
        """All-to-all, attention, all-to-all."""
        arrived = self.exchange(self.arriving, self.pack_for_all())
        with Marked(self.p, ATTEND_GROUP):
            self._attend_group(0, [arrived], [])
        self._put(0, self.all_pieces(self.exchange(self.leaving, self.memory["a"])))
        return self.out, self.saved((arrived,))

    @override
    def to_tokens(self, number: int, tokens: torch.Tensor, ranks: range, rows: slice, operand: str) -> list[CopyPair]:
        group, heads, found = self.groups[number], self._given, list[CopyPair]()
        assert heads is not None
        given, parts = heads._asdict(), self.pieces.in_tokens(group, tokens, heads)._asdict()
        for name in ("q", "k", "v") if group.brings_kv else ("q",):
            chosen = group.q if name == "q" else group.kv
            names = (operand, name)
            found += pack_copies(parts[name], given[name][rows], chosen, ranks, self.problem.group_size, names)
        return found

    def _heads(self, number: int, rows: torch.Tensor) -> Heads:
        if number == len(self.heads):
            tokens = rows.view(self.problem.rows, self.problem.batch, -1)
            first = self.heads[0] if self.heads else None
            self.heads.append(self.pieces.in_tokens(self.groups[number], tokens, first))
        return self.heads[number]

    def _attend_group(self, number: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        heads = self._heads(number, reads[0])
        self.states[number][0] = self.attention[number].forward(0, heads, self.attended[number])

    def _attend(self, chunk: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        group, run = self.leaving.group_and_run(chunk)
        heads = self._heads(group, reads[0])
        self.states[group][1 + run] = self.attention[group].forward(1 + run, heads, self.attended[group])

    def _put_copies(self, number: int, pieces: Sequence[Piece]) -> list[CopyPair]:
        out = self.out.unflatten(-1, (self.problem.heads, self.problem.value_dim))
        return unpack_copies(out, self.groups[number].q, pieces, "out")

    def _put(self, number: int, pieces: Sequence[Piece]) -> None:
        copy_all(self._put_copies(number, pieces))

    @override
    def unpack_copies(self, number: int, reads: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> list[CopyPair]:
        return self._put_copies(number, self.pieces.at_home(reads))

    def saved(self, arrived: tuple[torch.Tensor, ...]) -> Saved:
        """What the backward pass needs, with the states of runs joined to what one call for a group would have left."""
        if not self.problem.needs:
            return Saved((), self.memory["a"], [])
        heads, states = self.pieces.heads(arrived[0]), []
        for number, found in enumerate(self.states):
            state = found.get(0)
            if state is None:
                order = sorted(found, key=lambda index: self.runs[index - 1].start)
                sizes = [self.runs[index - 1].size for index in order]
                state = join_states([found[index] for index in order], sizes)
            if state is None:  # a kernel leaves nothing of some runs: one query that sees one key is cuDNN's formula
                scratch = torch.empty_like(self.attended[number])
                state = self.attention[number].forward(0, heads[number], scratch)
            states.append(state)
        return Saved(arrived, self.memory["a"], states)


class Backward(UlyssesPass):
    """A backward pass of several ranks, inside its with-block.

    grad: [S_r, B, H, D_v], of the dtype and device of all. gradients: to be filled; None where they are made group by
    group.
    """

    def __init__(
        self, p: PreparedPass, call: UlyssesCall, saved: Saved, grad: torch.Tensor, gradients: Heads | None
    ) -> None:
        super().__init__(p, call)
        self.grad, self._gradients, self.saved = grad, gradients, saved
        self.heads, self.attended = self.pieces.heads(saved.heads[0]), self.pieces.attended(saved.attended)
        self.memory = self.exchanged(grad)
        #: Whether gradients of keys and values are sums over groups, or over ranks.
        self.sums_groups = self.problem.own_kv_heads == 1 and len(self.groups) > 1
        self.sums_ranks = self.problem.kv_heads % self.problem.group_size > 0
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def overlapped(self) -> None:
        """Groups of heads one after the other, each while the next one's gradients travel."""
        p, asked = self.p, Asked(is_backward=True)
        if self.may_bind:
            assert self._gradients is not None
            named = {f"grad_{name}": gradient for name, gradient in self._gradients._asdict().items()}
            on_tape = {**self.memory, "grad": self.grad, **self.named_saved(), **named}
            if p.run_from_tape(asked, on_tape, kernels=self.tape_kernels(), layout=self.layout):
                return
        p.run_on_tensors(asked, self.memory, kernels=self.kernels())

    @property
    def may_bind(self) -> bool:
        """Whether the pass may be on a tape, with what the forward pass left."""
        are_bound = all(len(state) == 1 and state[0].is_contiguous() for state in self.saved.states)
        return self.may_replay and are_bound and not (self.sums_groups or self.sums_ranks)

    @property
    def layout(self) -> tuple[Hashable, ...]:
        """What a tape depends on beside its operands."""
        return self.call.scale, self.p.attention, torch.are_deterministic_algorithms_enabled()

    def named_saved(self) -> dict[str, torch.Tensor]:
        """What a tape reads of the forward pass, by name."""
        states = {f"states {number}": state for number, (state,) in enumerate(self.saved.states)}
        return {"heads": self.saved.heads[0], "attended": self.saved.attended} | states

    @override
    def tape_kernels(self) -> dict[str, TapeKernel]:
        attend = ulysses_backward_kernel(self.pieces, self.attention, self.heads, self.attended)
        return attend | super().tape_kernels()

    @override
    def kernels(self) -> dict[str, Kernel]:
        return super().kernels() | {ATTEND_GROUP: self._attend_group, UNPACK: self._unpack}

    def sequential(self) -> None:
        """All-to-all, attention, all-to-all."""
        arrived = self.exchange(self.arriving, self.pack_for_all())
        with Marked(self.p, ATTEND_GROUP):
            self._attend_group(0, [arrived], [self.memory["a"]])
        self._put(0, self.all_pieces(self.exchange(self.leaving, self.memory["a"])))

    def gradients(self, number: int) -> tuple[Heads, HeadGroup]:
        """Gradients of q, k and v to be filled for a group, and which of each rank's heads there are its own."""
        assert self._gradients is not None
        return self._gradients, self.groups[number]

    def name_of_gradient(self, name: str, number: int) -> str:
        """Of q, k or v, for a group, as an operand of a tape."""
        return f"grad_{name}"

    def group_of(self, turn: int) -> int:
        """The number of the group whose turn it is."""
        return len(self.groups) - 1 - turn

    turn_of = group_of

    @override
    def to_tokens(self, number: int, tokens: torch.Tensor, ranks: range, rows: slice, operand: str) -> list[CopyPair]:
        group, names = self.groups[self.group_of(number)], (operand, "grad")
        heads = tokens.unflatten(-1, (group.q.size, self.problem.value_dim))
        return pack_copies(heads, self.grad[rows], group.q, ranks, self.problem.group_size, names)

    def _attend_group(self, turn: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        number, problem = self.group_of(turn), self.problem
        group, attended, state = self.groups[number], self.attended[number], self.saved.states[number]
        grad = reads[0].view(attended.shape)
        found = self.attention[number].gradients(0, self.heads[number], attended, state, grad)
        tokens = writes[0].view(problem.rows, problem.batch, -1)
        target = self.pieces.in_tokens(group, tokens, self.heads[number])
        target.q.copy_(found.q)
        k, v = found.k, found.v
        if self.sums_groups:  # the last of them takes the sum home
            wide = torch.float64 if self.grad.dtype == torch.float64 else torch.float32
            earlier = self._sums
            k, v = k.to(wide), v.to(wide)
            if earlier is not None:
                k, v = earlier[0] + k, earlier[1] + v
            self._sums = (k, v)
        if group.brings_kv:
            target.k.copy_(k)
            target.v.copy_(v)

    def _put_copies(self, number: int, pieces: Sequence[Piece]) -> list[CopyPair]:
        gradients, group = self.gradients(number)
        parts = [self.pieces.in_tokens(group, piece.tokens, self.heads[0]) for piece in pieces]
        found = []
        for index, name in enumerate(("q", "k", "v") if group.brings_kv and not self.sums_ranks else ("q",)):
            chosen = group.q if name == "q" else group.kv
            of_name = [piece.of(part[index]) for piece, part in zip(pieces, parts, strict=True)]
            found += unpack_copies(gradients[index], chosen, of_name, self.name_of_gradient(name, number))
        return found

    def _put(self, number: int, pieces: Sequence[Piece]) -> None:
        copy_all(self._put_copies(number, pieces))
        gradients, group = self.gradients(number)
        if group.brings_kv and self.sums_ranks:
            parts = [self.pieces.in_tokens(group, piece.tokens, None) for piece in pieces]
            sum_pieces(gradients.k, [piece.of(part.k) for piece, part in zip(pieces, parts, strict=True)])
            sum_pieces(gradients.v, [piece.of(part.v) for piece, part in zip(pieces, parts, strict=True)])

    @override
    def unpack_copies(self, turn: int, reads: Sequence[torch.Tensor], _: Sequence[torch.Tensor]) -> list[CopyPair]:
        return self._put_copies(self.group_of(turn), self.pieces.at_home(reads))

    def _unpack(self, turn: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        self._put(self.group_of(turn), self.pieces.at_home(reads))
