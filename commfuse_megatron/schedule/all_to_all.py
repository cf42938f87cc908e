"""All-to-all of pieces: every rank sends every other one its own pieces, group after group.

Knows who sends which piece when, not what a piece is. All of a group's pieces leave before the next group's first.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Receive, Schedule, Send, Step


def build_all_to_all(group_size: int, groups: int, runs: int, *, is_numbered_by_receiver: bool) -> Schedule:
    """Return the all-to-all in which rank r sends to ranks r+1, r+2, ... (mod group_size), `runs` pieces to each, for
    each of `groups` groups.

    is_numbered_by_receiver: a piece is chunk (receiver, number), as partials are in a reduce-scatter; else (sender,
    number), as in an all-gather. No step computes: what is computed beside it the lowering says.

    Raises:
        ScheduleError: a size below 1.

    Source: the order of Flash-All-to-All, CommFuse Alg. 5 (arXiv 2604.24013, 2026), with pieces sent at once.
    """

    def build_steps(rank: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        for group in range(groups):
            for distance in range(1, group_size):
                to_rank, from_rank = (rank + distance) % group_size, (rank - distance) % group_size
                for number in range(group * runs, (group + 1) * runs):
                    sent = Chunk(to_rank if is_numbered_by_receiver else rank, number)
                    received = Chunk(rank if is_numbered_by_receiver else from_rank, number)
                    steps.append(Step(len(steps), Send(sent, to_rank), Receive(received, from_rank), sent, None))
        return tuple(steps)

    every = tuple(map(build_steps, range(group_size)))
    return Schedule(Collective.ALL_TO_ALL, Algorithm.DIRECT, group_size, groups * runs, every)
