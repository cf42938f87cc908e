"""The passes of attention over a split sequence as programs: see `program` and `exchange`.

A rank's heads are attended in groups, each when its rows are here from all ranks, while the next group's arrive:

    arriving   [group 0 ][group 1 ][group 2 ]
    compute    [pack 0][pack 1][pack 2][attend group 0][attend group 1][attend 2: rows of 1][.. of own]
    leaving                                            [group 0       ][group 1            ][2: rows of 1]

Of the last group the rows of one owner after the other are attended, the own ones last, so that no transfer is left at
the end. The backward pass is the same with the gradients of what left, then of what arrived, and the groups in the
opposite order; there the last group stays whole, since gradients of keys and values are sums over all queries.
"""

from commfuse_megatron.schedule.exchange import BoundExchange
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lowering import Lowering, Policy
from commfuse_megatron.schedule.program import GATHER, SCATTER, Batch, Compute, Program

__all__ = ["ATTEND_GROUP", "PACK", "UNPACK", "lower_ulysses"]

#: Kinds of `Compute`, each of one group; ATTEND is of the rows of one piece of a group.
PACK, ATTEND_GROUP, UNPACK = "pack", "attend group", "unpack"


def lower_ulysses(
    arriving: BoundExchange, leaving: BoundExchange, policy: Policy, *, splits_last: bool, keeps_gathered: bool
) -> Program:
    """One pass, forward or backward, of one rank. Attention has a lane, where there are lanes: kernels keep a handle
    for each stream, and a lane is the same stream in every call.

    splits_last: of the last group the rows of each owner are computed apart. keeps_gathered: what arrived is left to
    the caller, as "kept" where windows are the context's. Operands: packed, a; gathered or kept. "unpack" takes a
    group's rows from where they arrived, and own ones from `a`, into what the call returns.
    """
    low = Lowering(policy, arriving, leaving, "all-to-all to the heads", "all-to-all from the heads")
    here = [_send_group(low, arriving, group) for group in range(arriving.num_groups)]
    home, last = _Home(low, leaving), leaving.num_groups - 1
    low.fork(min(1, policy.lanes))
    low.turn(0)
    for group, batches in enumerate(here):
        low.wait(batches)
        if keeps_gathered and policy.has_windows:
            low.copy(arriving.all_tokens("kept", group), arriving.all_tokens("gathered", group), is_beside=True)
        if group == last and splits_last:
            _attend_by_owner(low, arriving, home)
            continue
        home.unpack_beside(group - 1, computed=group)
        target = leaving.all_tokens("a", group)
        if target.count:
            low.ops.append(Compute(ATTEND_GROUP, group, (arriving.all_tokens("gathered", group),), (target,)))
        home.send(leaving.steps_of(group))
    low.join()
    home.unpack(last + 1)
    return low.program()


def _send_group(low: Lowering, arriving: BoundExchange, group: int) -> list[Batch]:
    """Pack a group, send it, and put this rank's own rows where the others' arrive; returns what brings the group."""
    packed, me = arriving.packed_group(group), arriving.group_rank
    if packed.count:
        low.ops.append(Compute(PACK, group, (), (packed,)))
    steps = arriving.steps_of(group)
    for index in steps:
        low.issue(GATHER, arriving, index, None if arriving.steps[index].send is None else arriving.sent(index))
    copies = [
        low.copy(
            arriving.piece("gathered", group, me, run),
            arriving.packed(group, me, run),
            is_beside=low.policy.has_windows,
        )
        for run in range(arriving.num_runs)
    ]
    return [*((GATHER, index) for index in steps), *copies]


def _attend_by_owner(low: Lowering, arriving: BoundExchange, home: "_Home") -> None:
    """The last group, the rows of one owner after the other."""
    leaving, group = home.leaving, home.leaving.num_groups - 1
    me, size = leaving.group_rank, leaving.schedule.group_size
    for distance in (*range(1, size), 0):
        owner = (me + distance) % size
        if not distance:
            home.unpack_beside(group, computed=group)
        for run in range(leaving.num_runs):
            target = leaving.piece("a", group, owner, run)
            if target.count:
                chunk = leaving.chunk(group, owner, run)
                low.ops.append(Compute(ATTEND, chunk, (arriving.all_tokens("gathered", group),), (target,)))
        if distance:
            home.send(leaving.steps_of(group, distance))


class _Home:
    """What goes home, and what has come: unpacked on the main lane beside attention, if that has one, else at the end.

    With one hardware queue a wait holds up the attention that is submitted behind it. So what is unpacked left the
    peers before an attention that has been submitted here.
    """

    def __init__(self, low: Lowering, leaving: BoundExchange) -> None:
        self._low, self.leaving = low, leaving
        self._num_unpacked = self._num_followed = 0

    def send(self, steps: range) -> None:
        """Issue these steps, whose pieces are computed."""
        for index in steps:
            source = None if self.leaving.steps[index].send is None else self.leaving.sent(index)
            self._low.issue(SCATTER, self.leaving, index, source)

    def unpack_beside(self, stop: int, *, computed: int) -> None:
        """Unpack all groups below `stop` beside what follows. computed: so many groups are, on the lane in use."""
        low = self._low
        if low.num_lanes and self._num_unpacked < stop:
            low.on(None)
            if stop > self._num_followed:
                low.after(0)  # where own rows are computed
                self._num_followed = computed
            for group in range(self._num_unpacked, stop):
                self._unpack(group)
            low.on(0)
            self._num_unpacked = stop

    def unpack(self, stop: int) -> None:
        """Unpack all that are left."""
        for group in range(self._num_unpacked, stop):
            self._unpack(group)

    def _unpack(self, group: int) -> None:
        leaving = self.leaving
        self._low.wait((SCATTER, index) for index in leaving.steps_of(group))
        own = tuple(leaving.piece("a", group, leaving.group_rank, run) for run in range(leaving.num_runs))
        if any(rows.count for rows in own):
            self._low.ops.append(Compute(UNPACK, group, (leaving.arrived_group(group), *own), ()))
