"""Schedules as text: the step-by-rank grid, with a legend of the signs that occur in it.

Plain ASCII. A big group is cut (never wrapped) to `max_width` and `max_steps`, around the marked cell if there is one.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Schedule, Step

#: Stands for what is not shown.
LEFT_OUT = "..."


def render(
    schedule: Schedule, *, mark: tuple[int, int] | None = None, max_width: int = 120, max_steps: int | None = None
) -> str:
    """Return the grid of a schedule, a row per step and a column per rank, and below it what its signs mean.

    Args:
        mark: (group rank, step) of a cell to point at, with > and <.
        max_width: ranks that do not fit into so many characters are left out: all but the first few and the last,
            or all but those around the mark.
        max_steps: at most so many rows, chosen likewise; None shows all.
    """
    num_ranks, num_steps = schedule.group_size, len(schedule.steps[0])
    marked_rank, marked_step = mark if mark is not None else (None, None)
    steps = choose_visible(num_steps, num_steps if max_steps is None else max_steps, marked_step)
    cells = _draw_cells(schedule, [step for step in steps if step is not None])

    width = max(map(len, [*cells.values(), f"rank {num_ranks - 1}"]))
    # 5 characters for the step, 6 for each "..." that stands for ranks left out (on both sides of a mark).
    num_fitting = num_ranks
    if 5 + num_ranks * (width + 3) > max_width:
        num_fitting = (max_width - 5 - (6 if mark is None else 12)) // (width + 3)
    ranks = choose_visible(num_ranks, num_fitting, marked_rank)

    lines = ["step" + "".join(f" | {LEFT_OUT if rank is None else f'rank {rank}'.ljust(width)}" for rank in ranks)]
    lines.append("-----" + "-".join("+-" + "-" * (len(LEFT_OUT) if rank is None else width) for rank in ranks))
    for step in steps:
        line = f"{LEFT_OUT if step is None else step:>4} "
        for rank in ranks:
            if rank is None or step is None:
                line += f"| {LEFT_OUT.ljust(0 if rank is None else width)} "
            elif (rank, step) == mark:
                line += f"|>{cells[rank, step].ljust(width)}<"
            else:
                line += f"| {cells[rank, step].ljust(width)} "
        lines.append(line)
    legend = _explain_signs(schedule, has_mark=mark is not None)
    return "\n".join(line.rstrip() for line in [describe(schedule), "", *lines, "", *legend])


def describe(schedule: Schedule) -> str:
    """Return one line that says which schedule this is."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    sizes = f"{count(schedule.group_size, 'rank')}, {count(schedule.chunks_per_shard, 'chunk')} per shard"
    return f"{schedule.algorithm} {schedule.collective.replace('_', '-')}: {sizes}"


def choose_visible(count: int, limit: int, focus: int | None) -> list[int | None]:
    """Return the indices to show of 0 .. count-1, None where some are left out: around `focus`, else at both ends."""
    if count <= max(limit, 1):
        return list(range(count))
    if focus is None:
        return [*range(max(limit - 1, 1)), None, *([count - 1] if limit > 1 else [])]
    limit = max(limit, 1)
    first = min(max(focus - limit // 2, 0), count - limit)
    before: list[int | None] = [None] if first > 0 else []
    after: list[int | None] = [None] if first + limit < count else []
    return [*before, *range(first, first + limit), *after]


def _draw_cells(schedule: Schedule, shown: list[int]) -> dict[tuple[int, int], str]:
    """Texts by (rank, step), with what is multiplied, sent and received in columns of their own."""
    parts = {
        (rank, step): _draw_step(schedule, rank, steps[step])
        for rank, steps in enumerate(schedule.steps)
        for step in shown
    }
    widths = [max(len(part[column]) for part in parts.values()) for column in range(3)]
    return {
        cell: "  ".join(text.ljust(width) for text, width in zip(part, widths, strict=True) if width).rstrip()
        for cell, part in parts.items()
    }


def _draw_step(schedule: Schedule, rank: int, step: Step) -> tuple[str, str, str]:
    """Texts for what one step multiplies, sends and receives."""

    def name(chunk: Chunk) -> str:
        return f"{chunk.owner_rank}" if schedule.chunks_per_shard == 1 else f"{chunk.owner_rank}.{chunk.index}"

    is_adding = schedule.collective is Collective.REDUCE_SCATTER and step.needs is not None
    star = "*" if step.chunk.owner_rank == rank else ""
    computed = f"[{'+' if is_adding else ''}{name(step.chunk)}{star}]"
    return (
        "" if schedule.collective is Collective.ALL_TO_ALL else computed,
        "" if step.send is None else f"{name(step.send.chunk)}->r{step.send.to_rank}",
        "" if step.receive is None else f"{name(step.receive.chunk)}<-r{step.receive.from_rank}",
    )


def _explain_signs(schedule: Schedule, *, has_mark: bool) -> list[str]:
    """The legend: one line for each sign that can occur in this schedule."""
    is_gather = schedule.collective is Collective.ALL_GATHER
    is_ring = schedule.algorithm is Algorithm.RING
    has_transfers = schedule.group_size > 1
    if schedule.collective is Collective.ALL_TO_ALL:
        signs = {"2.1->r3": "send piece 1 of rank 2 to rank 3", "2.1<-r1": "receive piece 1 of rank 2 from rank 1"}
        return [f"  {sign}  {text}" for sign, text in signs.items() if has_transfers]
    example, meaning = ("2", "shard 2") if schedule.chunks_per_shard == 1 else ("2.1", "chunk 1 of shard 2")
    signs = {f"[{example}]": f"multiply {meaning}" if is_gather else f"compute this rank's partial of {meaning}"}
    if not is_gather and is_ring and has_transfers:
        signs[f"[+{example}]"] = "the same, added to the running sum that arrived"
    signs[f"[{example}*]"] = "the rank's own shard" + has_transfers * (", first" if is_gather else ", last")
    if has_transfers:
        sent = meaning if is_gather else f"the {'running sum' if is_ring else 'partial'} of {meaning}"
        signs[f"{example}->r3"] = f"send {sent} to rank 3"
        signs[f"{example}<-r1"] = f"receive {sent} from rank 1"
    if has_mark:
        signs[">  <"] = "the step in question"
    width = max(map(len, signs))
    lines = [f"  {sign.ljust(width)}  {text}" for sign, text in signs.items()]
    if has_transfers:
        lines.append("Transfers of a step are issued together, before its computation, and run beside it.")
        if not is_gather and not is_ring:
            lines.append("After the last step every rank adds the partials that arrived to those of its own shard.")
    return lines
