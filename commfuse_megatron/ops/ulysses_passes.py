"""Both passes of attention over a split sequence, whatever the path: `ulysses_attention` plans and calls them.

Knows prepared passes and kernels; must not know autograd. What travels of a group of heads is, for each token, its
heads of queries, then of keys, then of values: kernels take them as views, so nothing is taken apart where it arrives.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import distributed as dist

from commfuse_megatron.kernels.attention import Dropout, join_states
from commfuse_megatron.ops.split_attention import Heads, SplitAttention, apart, operands_for_kernels
from commfuse_megatron.problem import HeadGroup, RowRange, UlyssesProblem
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.schedule.exchange import BoundExchange
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lower_ulysses import ATTEND_GROUP, PACK, UNPACK

__all__ = ["Saved", "UlyssesCall", "ulysses_backward", "ulysses_forward"]

State = tuple[torch.Tensor, ...]

#: Of which ranks, and which of this rank's rows of each: pieces [ranks, rows, B, features], in the order of ranks.
Pieces = list[tuple[slice, slice, torch.Tensor]]


class UlyssesCall(NamedTuple):
    """One call: its forward pass, and what differs between calls of one problem."""

    forward: PreparedPass
    scale: float
    dropout: Dropout | None


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
    p, problem = call.forward, _problem_of(call.forward)
    with p:
        if not problem.M:
            out = heads.q.new_empty(heads.q.size(0), problem.batch, problem.N)
            return out, Saved((), out, [])
        if problem.group_size == 1:
            return _attend_alone(call, heads)
        run = _Forward(call, heads)
        return run.overlapped() if p.plan.is_scheduled else run.sequential()


def ulysses_backward(p: PreparedPass, call: UlyssesCall, saved: Saved, grad: torch.Tensor, like: Heads) -> Heads:
    """Gradients of this rank's rows of q, k and v. grad: [S_r, B, H * D_v]; like: meta tensors of q, k and v."""
    problem = _problem_of(p)
    gradients = Heads(*(grad.new_empty(each.shape) for each in like))
    with p:
        if not problem.M:
            return gradients
        grad = grad.unflatten(-1, (problem.heads, problem.value_dim))
        if problem.group_size == 1:
            attention, heads = _attention(call, problem, _whole(problem), []), Heads(*saved.heads)
            attended = saved.attended.view(grad.shape)
            with _Marked(p, ATTEND_GROUP):
                found = attention.gradients(0, heads, attended, saved.states[0], grad.contiguous())
            return Heads(*(each.to(grad.dtype) for each in found))
        run = _Backward(p, call, saved, grad, gradients)
        (run.overlapped if p.plan.is_scheduled else run.sequential)()
        return gradients


def _attend_alone(call: UlyssesCall, heads: Heads) -> tuple[torch.Tensor, Saved]:
    problem = _problem_of(call.forward)
    heads = operands_for_kernels(heads, is_kept=bool(problem.needs))
    attended = heads.q.new_empty(problem.rows, problem.batch, problem.heads, problem.value_dim)
    with _Marked(call.forward, ATTEND_GROUP):
        state = _attention(call, problem, _whole(problem), []).forward(0, heads, attended)
    return attended.flatten(2), Saved(tuple(heads), attended, [state])


class _Pass:
    """What both passes have in common: groups of heads, numbered as in the forward pass, and their kernels."""

    def __init__(self, p: PreparedPass, call: UlyssesCall) -> None:
        self.p, self.call, self.problem = p, call, _problem_of(p)
        self.groups = self.problem.head_groups(p.plan.chunks_per_shard)
        assert isinstance(p.gather, BoundExchange)
        assert isinstance(p.scatter, BoundExchange)
        self.arriving, self.leaving = p.gather, p.scatter
        self.pieces = [run for rank in range(self.problem.group_size) for run in self.problem.kept_rows(rank)]
        self.attention = self._attention_of_groups()

    def _attention_of_groups(self) -> list[SplitAttention]:
        memo, key = self.p.memo, ("attention", self.call.scale)
        if self.call.dropout is None and key in memo:
            found: list[SplitAttention] = memo[key]
            return found
        made = []
        for number, group in enumerate(self.groups):
            dropout = self.call.dropout and apart(self.call.dropout, number)
            made.append(_attention(self.call._replace(dropout=dropout), self.problem, group, self.pieces))
        if self.call.dropout is None:
            memo[key] = made
        return made

    @property
    def own_tokens(self) -> int:
        """Positions that this rank keeps."""
        return sum(run.size for run in self.problem.kept_rows(self.p.group_rank))

    def heads_of(self, flat: torch.Tensor) -> list[Heads]:
        """q, k and v of every group in what arrived of all: views."""
        found: list[Heads] = []
        for group, tokens in zip(self.groups, self._tokens(flat, self._features_in), strict=True):
            found.append(self.heads_in(group, tokens, found[0] if found else None))
        return found

    def heads_in(self, group: HeadGroup, tokens: torch.Tensor, first: Heads | None) -> Heads:
        """Those of one group. tokens: [..., features]; first: the group that brought keys and values for all."""
        problem = self.problem
        sizes = [group.q.size * problem.head_dim]
        if group.brings_kv:
            sizes += [group.kv.size * problem.head_dim, group.kv.size * problem.value_dim]
        q, *kv = tokens.split(sizes, dim=-1)
        queries = q.unflatten(-1, (group.q.size, problem.head_dim))
        if not kv:
            assert first is not None
            return Heads(queries, first.k, first.v)
        k, v = (part.unflatten(-1, (group.kv.size, -1)) for part in kv)
        return Heads(queries, k, v)

    def attended_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """[S, B, heads, D_v] of every group in what is computed of all: views."""
        value_dim = self.problem.value_dim
        parts = self._tokens(flat, lambda group: group.q.size * value_dim)
        return [part.unflatten(-1, (-1, value_dim)) for part in parts]

    def _features_in(self, group: HeadGroup) -> int:
        problem = self.problem
        both = problem.head_dim + problem.value_dim
        return group.q.size * problem.head_dim + group.brings_kv * group.kv.size * both

    def _tokens(self, flat: torch.Tensor, features: Callable[[HeadGroup], int]) -> Iterator[torch.Tensor]:
        problem = self.problem
        parts = flat.view(-1).split([problem.M * features(group) for group in self.groups])
        return (part.view(problem.rows, problem.batch, -1) for part in parts)

    def units(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Memory for what is exchanged."""
        return like.new_empty(count, self.problem.unit)

    def pieces_at_home(self, reads: Sequence[torch.Tensor]) -> Pieces:
        """What "unpack" reads: of the other ranks, one behind the other, and this rank's own runs."""
        me, batch, size = self.p.group_rank, self.problem.batch, self.problem.group_size
        arrived, *own = reads
        others = arrived.view(size - 1, self.own_tokens, batch, -1)
        found, start = [(slice(0, me), slice(None), others[:me])], 0
        for run in own:
            rows = run.view(1, -1, batch, others.size(-1))
            found.append((slice(me, me + 1), slice(start, start + rows.size(1)), rows))
            start += rows.size(1)
        return [*found, (slice(me + 1, size), slice(None), others[me:])]

    def all_pieces(self, received: torch.Tensor) -> Pieces:
        """What `exchange` takes home of the only group."""
        problem, (width,) = self.problem, self.leaving.exchange.widths
        shape = (problem.group_size, self.own_tokens, problem.batch, width * problem.unit)
        return [(slice(None), slice(None), received.view(shape))]

    def exchange(self, exchange: BoundExchange, source: torch.Tensor) -> torch.Tensor:
        """One group's exchange by the group's own collective, from and to where the schedule has its pieces.

        Towards the heads: packed -> all tokens. Home: all tokens -> the pieces of all ranks, own ones too.
        """
        me, ranks, bound = self.p.group_rank, range(self.problem.group_size), exchange.exchange
        (width,) = bound.widths
        own = [bound.own_tokens(me) * width] * len(ranks)
        everyone = [bound.own_tokens(rank) * width for rank in ranks]
        runs = [(rank, run) for rank in ranks for run in range(exchange.num_runs)]
        places = [exchange.piece("", 0, *run) for run in runs]
        by_place = sorted(range(len(runs)), key=lambda index: places[index].start)
        if bound.goes_home and exchange.num_runs > 1:
            source = torch.cat([source[place.start : place.start + place.count] for place in places])
        sizes, target_sizes = (everyone, own) if bound.goes_home else (own, everyone)
        target = source.new_empty(sum(target_sizes), source.size(1))
        dist.all_to_all_single(target, source, target_sizes, sizes, group=self.p.context.group)
        if not bound.goes_home and exchange.num_runs > 1:
            parts = target.split([place.count for place in places])
            target = torch.cat([parts[index] for index in by_place])
        return target


class _Forward(_Pass):
    def __init__(self, call: UlyssesCall, heads: Heads) -> None:
        super().__init__(call.forward, call)
        self.heads = heads
        problem = self.problem
        self.out = heads.q.new_empty(self.own_tokens, problem.batch, problem.N)
        self.flat = self.units(heads.q, self.leaving.exchange.num_tokens * sum(self.leaving.exchange.widths))
        self.attended = self.attended_of(self.flat)
        self.found: list[Heads] = []
        self.states: list[dict[int, State]] = [{} for _ in self.groups]

    def overlapped(self) -> tuple[torch.Tensor, Saved]:
        """Groups of heads one after the other, each while the next travels."""
        p, like = self.p, self.heads.q
        keeps = bool(self.problem.needs)
        own = self.arriving.exchange.own_tokens(p.group_rank) * self.problem.group_size
        tensors = {"packed": self.units(like, own * sum(self.arriving.exchange.widths)), "a": self.flat}
        arrived: tuple[torch.Tensor, ...] = ()
        if keeps:
            arrived = (self.units(like, self.arriving.total_rows),)
            tensors |= p.context.memory_for_gathered(arrived[0])
        kernels = {PACK: self._pack, ATTEND_GROUP: self._attend_group, ATTEND: self._attend, UNPACK: self._unpack}
        p.run(Asked(keeps_gathered=keeps), tensors, kernels=kernels)
        return self.out, self._saved(arrived)

    def sequential(self) -> tuple[torch.Tensor, Saved]:
        """All-to-all, attention, all-to-all."""
        p, own = self.p, self.own_tokens * self.problem.batch
        packed = self.units(self.heads.q, own * self.problem.group_size * sum(self.arriving.exchange.widths))
        self._pack(0, [], [packed])
        arrived = self.exchange(self.arriving, packed)
        with _Marked(p, ATTEND_GROUP):
            self._attend_group(0, [arrived], [])
        _unpack(self._targets(0), [self.all_pieces(self.exchange(self.leaving, self.flat))])
        return self.out, self._saved((arrived,))

    def _pack(self, number: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        problem, group = self.problem, self.groups[number]
        shape = (problem.group_size, self.own_tokens, problem.batch, self._features_in(group))
        tokens = writes[0].view(shape)
        parts = self.heads_in(group, tokens, self.heads)
        _pack(parts.q, self.heads.q, group.q)
        if group.brings_kv:
            _pack(parts.k, self.heads.k, group.kv)
            _pack(parts.v, self.heads.v, group.kv)

    def _heads(self, number: int, rows: torch.Tensor) -> Heads:
        if number == len(self.found):
            tokens = rows.view(self.problem.rows, self.problem.batch, -1)
            self.found.append(self.heads_in(self.groups[number], tokens, self.found[0] if self.found else None))
        return self.found[number]

    def _attend_group(self, number: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        heads = self._heads(number, reads[0])
        self.states[number][0] = self.attention[number].forward(0, heads, self.attended[number])

    def _attend(self, chunk: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        runs = self.leaving.num_runs
        owner, number = divmod(chunk, len(self.groups) * runs)
        group, run = divmod(number, runs)
        index = 1 + owner * runs + run
        heads = self._heads(group, reads[0])
        self.states[group][index] = self.attention[group].forward(index, heads, self.attended[group])

    def _targets(self, number: int) -> list[tuple[torch.Tensor, RowRange]]:
        problem = self.problem
        return [(self.out.unflatten(-1, (problem.heads, problem.value_dim)), self.groups[number].q)]

    def _unpack(self, number: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        _unpack(self._targets(number), [self.pieces_at_home(reads)])

    def _saved(self, arrived: tuple[torch.Tensor, ...]) -> Saved:
        """With the states of pieces joined to what one call for a group would have left."""
        if not self.problem.needs:
            return Saved((), self.flat, [])
        heads, states = self.heads_of(arrived[0]), []
        for number, found in enumerate(self.states):
            state = found.get(0)
            if state is None:
                order = sorted(found, key=lambda index: self.pieces[index - 1].start)
                sizes = [self.pieces[index - 1].size for index in order]
                state = join_states([found[index] for index in order], sizes)
            if state is None:  # a kernel leaves nothing of some pieces: one query that sees one key is cuDNN's formula
                scratch = torch.empty_like(self.attended[number])
                state = self.attention[number].forward(0, heads[number], scratch)
            states.append(state)
        return Saved(arrived, self.flat, states)


class _Backward(_Pass):
    def __init__(self, p: PreparedPass, call: UlyssesCall, saved: Saved, grad: torch.Tensor, gradients: Heads) -> None:
        super().__init__(p, call)
        self.grad, self.gradients, self.saved = grad, gradients, saved
        self.heads, self.attended = self.heads_of(saved.heads[0]), self.attended_of(saved.attended)
        self._sums: tuple[torch.Tensor, torch.Tensor] | None = None

    def overlapped(self) -> None:
        """Groups of heads one after the other, each while the next one's gradients travel."""
        own = self.own_tokens * self.problem.batch * self.problem.group_size
        arriving, leaving = self.arriving.exchange, self.leaving.exchange
        tensors = {
            "packed": self.units(self.grad, own * sum(arriving.widths)),
            "a": self.units(self.grad, leaving.num_tokens * sum(leaving.widths)),
        }
        kernels = {PACK: self._pack, ATTEND_GROUP: self._attend_group, UNPACK: self._unpack}
        self.p.run(Asked(is_backward=True), tensors, kernels=kernels)

    def sequential(self) -> None:
        """All-to-all, attention, all-to-all."""
        own, leaving = self.own_tokens * self.problem.batch * self.problem.group_size, self.leaving.exchange
        packed = self.units(self.grad, own * sum(self.arriving.exchange.widths))
        flat = self.units(self.grad, leaving.num_tokens * sum(leaving.widths))
        self._pack(0, [], [packed])
        arrived = self.exchange(self.arriving, packed)
        with _Marked(self.p, ATTEND_GROUP):
            self._attend_group(0, [arrived], [flat])
        self._put(self.groups[0], self.all_pieces(self.exchange(self.leaving, flat)))

    def _group(self, turn: int) -> int:
        """The number of the group whose turn it is."""
        return len(self.groups) - 1 - turn

    def _pack(self, turn: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        problem, group = self.problem, self.groups[self._group(turn)]
        shape = (problem.group_size, self.own_tokens, problem.batch, group.q.size, problem.value_dim)
        _pack(writes[0].view(shape), self.grad, group.q)

    def _attend_group(self, turn: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        number, problem = self._group(turn), self.problem
        group, attended, state = self.groups[number], self.attended[number], self.saved.states[number]
        grad = reads[0].view(attended.shape)
        found = self.attention[number].gradients(0, self.heads[number], attended, state, grad)
        tokens = writes[0].view(problem.rows, problem.batch, -1)
        target = self.heads_in(group, tokens, self.heads[number])
        target.q.copy_(found.q)
        k, v = found.k, found.v
        is_shared = problem.own_kv_heads == 1 and len(self.groups) > 1
        if is_shared:  # a sum over groups, the last of which takes it home
            wide = _wide(self.grad.dtype)
            earlier = self._sums
            k, v = k.to(wide), v.to(wide)
            if earlier is not None:
                k, v = earlier[0] + k, earlier[1] + v
            self._sums = (k, v)
        if group.brings_kv:
            target.k.copy_(k)
            target.v.copy_(v)

    def _unpack(self, turn: int, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        self._put(self.groups[self._group(turn)], self.pieces_at_home(reads))

    def _put(self, group: HeadGroup, pieces: Pieces) -> None:
        parts = [(ranks, rows, self.heads_in(group, tokens, self.heads[0])) for ranks, rows, tokens in pieces]
        targets = [(self.gradients.q, group.q)]
        if group.brings_kv:
            targets += [(self.gradients.k, group.kv), (self.gradients.v, group.kv)]
        found = [[(ranks, rows, part[index]) for ranks, rows, part in parts] for index in range(len(targets))]
        _unpack(targets, found)


class _Marked:
    """For a with-block that is recorded as a computation."""

    def __init__(self, p: PreparedPass, name: str) -> None:
        self._link, self._name = p.context.link, name

    def __enter__(self) -> None:
        self._mark = self._link.mark()

    def __exit__(self, *ended: object) -> None:
        self._link.note_compute(self._name, self._mark, None)


def _pack(target: torch.Tensor, heads: torch.Tensor, chosen: RowRange) -> None:
    """Copy those heads that each rank needs into target [R, S_r, B, heads, features]. heads: [S_r, B, H, features].

    chosen: which of each rank's own heads. Of fewer heads than ranks several ranks get the same.
    """
    size, number = target.size(0), heads.size(2)
    if number % size == 0:
        target.copy_(_by_rank(heads, size)[:, :, :, chosen.start : chosen.stop])
        return
    same = target.unflatten(0, (number, size // number))
    same.copy_(heads.permute(2, 0, 1, 3)[:, None, :, :, None].expand(same.shape))


def _unpack(targets: Sequence[tuple[torch.Tensor, RowRange]], found: Sequence[Pieces]) -> None:
    """Copy pieces [ranks, rows, B, heads(, features)] into tensors [S_r, B, H, features], of which each rank has some
    heads; where several have the same, their sum, in fp32 (fp64), in the order of ranks, rounded once."""
    for (target, chosen), pieces in zip(targets, found, strict=True):
        size, number, features = _ranks_of(pieces), target.size(2), target.size(3)
        pieces = [
            (ranks, rows, piece.reshape(*piece.shape[:3], chosen.size, features)) for ranks, rows, piece in pieces
        ]
        if number % size == 0:
            for ranks, rows, piece in pieces:
                _by_rank(target, size)[ranks, rows, :, chosen.start : chosen.stop].copy_(piece)
            continue
        sums = torch.zeros_like(target, dtype=_wide(target.dtype))
        for ranks, rows, piece in pieces:
            first = ranks.start or 0
            for index in range(piece.size(0)):
                sums[rows, :, (first + index) * number // size] += piece[index, :, :, 0]
        target.copy_(sums)


def _ranks_of(pieces: Pieces) -> int:
    return pieces[-1][2].size(0) + (pieces[-1][0].start or 0)


def _by_rank(heads: torch.Tensor, group_size: int) -> torch.Tensor:
    """[S_r, B, H, features] -> [R, S_r, B, H / R, features], a view."""
    return heads.unflatten(2, (group_size, heads.size(2) // group_size)).permute(2, 0, 1, 3, 4)


def _attention(
    call: UlyssesCall, problem: UlyssesProblem, group: HeadGroup, pieces: Sequence[RowRange]
) -> SplitAttention:
    """Of a group of heads: split 0 is the whole sequence, the others are these pieces."""
    kernel = call.forward.attention
    assert kernel is not None
    splits = [RowRange(0, problem.rows), *pieces]
    return SplitAttention(problem.attention(group), kernel, splits, call.scale, None, call.dropout)


def _whole(problem: UlyssesProblem) -> HeadGroup:
    return problem.head_groups(1)[0]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _problem_of(p: PreparedPass) -> UlyssesProblem:
    assert isinstance(p.problem, UlyssesProblem)
    return p.problem
