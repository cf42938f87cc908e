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
    """One pass, forward or backward, of one rank.

    splits_last: of the last group the rows of each owner are computed apart. keeps_gathered: what arrived is left to
    the caller, as "kept" where windows are the context's. Operands: packed, a; gathered or kept. "unpack" takes a
    group's rows from where they arrived, and own ones from `a`, into what the call returns.
    """
    low = Lowering(policy, arriving, leaving, "all-to-all to the heads", "all-to-all from the heads")
    here = [_send_group(low, arriving, group) for group in range(arriving.num_groups)]
    last = leaving.num_groups - 1
    for group, batches in enumerate(here):
        low.wait(batches)
        if keeps_gathered and policy.has_windows:
            low.copy(arriving.all_tokens("kept", group), arriving.all_tokens("gathered", group), is_beside=True)
        if group == last and splits_last:
            _attend_by_owner(low, arriving, leaving, group)
            continue
        target = leaving.all_tokens("a", group)
        if target.count:
            low.ops.append(Compute(ATTEND_GROUP, group, (arriving.all_tokens("gathered", group),), (target,)))
        for index in leaving.steps_of(group):
            _issue_home(low, leaving, index)
    for group in range(leaving.num_groups):
        low.wait((SCATTER, index) for index in leaving.steps_of(group))
        own = tuple(leaving.piece("a", group, leaving.group_rank, run) for run in range(leaving.num_runs))
        if any(rows.count for rows in own):
            low.ops.append(Compute(UNPACK, group, (leaving.arrived_group(group), *own), ()))
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


def _attend_by_owner(low: Lowering, arriving: BoundExchange, leaving: BoundExchange, group: int) -> None:
    me, size = leaving.group_rank, leaving.schedule.group_size
    for distance in (*range(1, size), 0):
        owner = (me + distance) % size
        for run in range(leaving.num_runs):
            target = leaving.piece("a", group, owner, run)
            if target.count:
                chunk = leaving.chunk(group, owner, run)
                low.ops.append(Compute(ATTEND, chunk, (arriving.all_tokens("gathered", group),), (target,)))
        for index in leaving.steps_of(group, distance) if distance else ():
            _issue_home(low, leaving, index)


def _issue_home(low: Lowering, leaving: BoundExchange, index: int) -> None:
    low.issue(SCATTER, leaving, index, None if leaving.steps[index].send is None else leaving.sent(index))
