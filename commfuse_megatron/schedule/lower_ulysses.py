"""The passes of attention over a split sequence as programs: see `program` and `exchange`.

A rank's heads are attended in groups, each when its rows are here from all ranks, while the next group's arrive. Groups
take turns on lanes, so that the end of one attention fills up with the next:

    main       [pack 0][pack 1][pack 2]                  [unpack 0]            [unpack 1] [unpack 2]
    arriving           [group 0 ][group 1 ][group 2 ]
    lane 0     [place 0]         [attend group 0    ]  [place 2][attend 2: rows of 1]
    lane 1     [place 1]                   [attend group 1       ]       [attend 2: own rows ]
    leaving                                         [group 0 ]    [group 1 ]  [2: rows of 1]

"place" puts this rank's own rows beside those that arrive. Of the last group the rows of one owner after the other are
attended, the own ones last, so that no transfer is left at the end. The backward pass is the same with the gradients of
what left, then of what arrived, and the groups in the opposite order; there the last group stays whole, since gradients
of keys and values are sums over all queries.

With pauses the caller computes between the parts of a call, and transfers hide under that, too:

    forward    [pack 0] pause [pack 1] pause ... [pack, last; attend all groups; unpack]
    backward   [pack 0] pause [pack 1] pause ... pause [attend all groups] pause [unpack 0] pause [unpack 1] ...
"""

from commfuse_megatron.schedule.exchange import BoundExchange
from commfuse_megatron.schedule.lower_attention import ATTEND
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.schedule.lowering import Lowering, Policy
from commfuse_megatron.schedule.program import GATHER, SCATTER, Compute, Program, Rows

#: Kinds of `Compute`, each of one group; ATTEND is of the rows of one piece of a group.
PACK, PLACE, ATTEND_GROUP, UNPACK = "pack", "place", "attend group", "unpack"


def lower_ulysses(
    arriving: BoundExchange, leaving: BoundExchange, policy: Policy, asked: Asked, *, splits_last: bool
) -> Program:
    """One pass, forward or backward, of one rank.

    splits_last: of the last group the rows of each owner are computed apart. What arrived is left to a caller that asks
    for it as "kept" where windows are the context's. Operands: packed, a; gathered or kept. "unpack" takes a group's
    rows from where they arrived, and own ones from `a`, into what the call returns.
    """
    low = Lowering(policy, arriving, leaving, "all-to-all to the heads", "all-to-all from the heads")
    keeps_gathered, pauses_home = asked.keeps_gathered, asked.pauses and asked.is_backward
    home, last = _Home(low, leaving), leaving.num_groups - 1
    if not asked.pauses:
        low.fork()
    for group in range(arriving.num_groups):
        _send_group(low, arriving, group)
        if asked.pauses and (group < last or pauses_home):
            low.pause()
    if asked.pauses:
        low.fork()
    for group in range(arriving.num_groups):
        if not pauses_home:
            home.unpack_beside(group - 1)
        low.turn()
        _place(low, arriving, group)
        if group == 0 and arriving.exchange.shares_first:
            low.follow_in_all_lanes()
        if group == last and splits_last:
            _attend_by_owner(low, arriving, home, keeps_gathered=keeps_gathered)
            continue
        _wait_for_group(low, arriving, group, keeps_gathered=keeps_gathered)
        target = leaving.all_tokens("a", group)
        if target.count:
            low.ops.append(Compute(ATTEND_GROUP, group, _attended(arriving, group), (target,)))
        home.send(leaving.steps_of(group))
        home.computed()
    low.join()
    for group in range(arriving.num_groups):
        if pauses_home:
            low.pause()
        home.unpack(group + 1)
    return low.program()


def _send_group(low: Lowering, arriving: BoundExchange, group: int) -> None:
    """Pack a group's rows for the other ranks, and send them."""
    packed = arriving.packed_for_others(group)
    if any(rows.count for rows in packed):
        low.ops.append(Compute(PACK, group, (), packed))
    for index in arriving.steps_of(group):
        low.issue(GATHER, arriving, index, None if arriving.steps[index].send is None else arriving.sent(index))


def _place(low: Lowering, arriving: BoundExchange, group: int) -> None:
    """Put this rank's own rows of a group where the others' arrive."""
    own = tuple(arriving.piece("gathered", group, arriving.group_rank, run) for run in range(arriving.num_runs))
    if any(rows.count for rows in own):
        low.ops.append(Compute(PLACE, group, (), own))


def _attended(arriving: BoundExchange, group: int) -> tuple[Rows, ...]:
    """What the attention of a group reads."""
    return tuple(arriving.all_tokens("gathered", number) for number in arriving.groups_for(group))


def _wait_for_group(low: Lowering, arriving: BoundExchange, group: int, *, keeps_gathered: bool) -> None:
    low.wait((GATHER, index) for number in arriving.groups_for(group) for index in arriving.steps_of(number))
    if keeps_gathered and low.policy.has_windows:
        low.copy(arriving.all_tokens("kept", group), arriving.all_tokens("gathered", group), is_beside=True)


def _attend_by_owner(low: Lowering, arriving: BoundExchange, home: "_Home", *, keeps_gathered: bool) -> None:
    """The last group, the rows of one owner after the other, which take turns, too."""
    leaving, group = home.leaving, home.leaving.num_groups - 1
    me, size = leaving.group_rank, leaving.schedule.group_size
    low.follow_in_all_lanes()
    _wait_for_group(low, arriving, group, keeps_gathered=keeps_gathered)
    is_first = True
    for distance in (*range(1, size), 0):
        owner = (me + distance) % size
        if not distance:
            home.unpack_beside(group)
        for run in range(leaving.num_runs):
            target = leaving.piece("a", group, owner, run)
            if target.count:
                if not is_first:
                    low.turn()
                is_first = False
                _wait_for_group(low, arriving, group, keeps_gathered=False)
                chunk = leaving.chunk(group, owner, run)
                low.ops.append(Compute(ATTEND, chunk, _attended(arriving, group), (target,)))
            if distance:
                home.send(leaving.steps_of(group, distance)[run : run + 1])


class _Home:
    """What goes home, and what has come: unpacked on the main lane beside attention, if that has lanes, else at the
    end.

    With one hardware queue a wait holds up the attention that is submitted behind it. So what is unpacked left the
    peers before an attention that has been submitted here.
    """

    def __init__(self, low: Lowering, leaving: BoundExchange) -> None:
        self._low, self.leaving = low, leaving
        self._lanes: list[int | None] = []  # by group, where it was computed
        self._num_unpacked = 0

    def send(self, steps: range) -> None:
        """Issue these steps, whose pieces are computed on the lane in use."""
        for index in steps:
            source = None if self.leaving.steps[index].send is None else self.leaving.sent(index)
            self._low.issue(SCATTER, self.leaving, index, source)

    def computed(self) -> None:
        """The next group is, on the lane in use."""
        self._lanes.append(self._low.lane)

    def unpack_beside(self, stop: int) -> None:
        """Unpack all groups below `stop` beside what follows."""
        low, lane = self._low, self._low.lane
        if low.num_lanes and self._num_unpacked < stop:
            low.on(None)
            for group in range(self._num_unpacked, stop):
                low.after(self._lanes[group])  # where own rows are computed
                self._unpack(group)
            low.on(lane)
            self._num_unpacked = stop

    def unpack(self, stop: int) -> None:
        """Unpack all below `stop` that are left."""
        for group in range(self._num_unpacked, stop):
            self._unpack(group)
        self._num_unpacked = max(self._num_unpacked, stop)

    def _unpack(self, group: int) -> None:
        leaving = self.leaving
        self._low.wait((SCATTER, index) for index in leaving.steps_of(group))
        own = tuple(leaving.piece("a", group, leaving.group_rank, run) for run in range(leaving.num_runs))
        if any(rows.count for rows in own):
            self._low.ops.append(Compute(UNPACK, group, (leaving.arrived_group(group), *own), ()))
