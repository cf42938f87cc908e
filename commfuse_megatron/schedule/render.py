"""Schedules as text: the step-by-rank grid, with a legend of the signs that occur in it.

Draws broken schedules as well as correct ones, since errors print them. The contract that bites: plain ASCII, and a
big group is cut (never wrapped) to `max_width` and `max_steps`, around the marked cell if there is one.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Compute, Receive, Schedule, Send, Step

__all__ = ["LEFT_OUT", "choose_visible", "describe", "name_chunk", "render"]

#: Stands for what is not shown.
LEFT_OUT = "..."


def render(
    schedule: Schedule,
    *,
    mark: tuple[int, int] | None = None,
    show_slots: bool = False,
    max_width: int = 120,
    max_steps: int | None = None,
) -> str:
    """Return the grid of a schedule, a row per step and a column per rank, and below it what its signs mean.

    Args:
        mark: (group rank, step) of a cell to point at, with > and <.
        show_slots: write @k beside everything that lies in slot k.
        max_width: ranks that do not fit into so many characters are left out: all but the first few and the last,
            or all but those around the mark.
        max_steps: at most so many rows, chosen likewise; None shows all.
    """
    num_ranks = len(schedule.programs)
    num_steps = max(map(len, schedule.programs), default=0)
    marked_rank, marked_step = mark if mark is not None else (None, None)
    steps = choose_visible(num_steps, num_steps if max_steps is None else max_steps, marked_step)
    cells = _draw_cells(schedule, [step for step in steps if step is not None], show_slots)

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
                line += f"|>{cells.get((rank, step), '').ljust(width)}<"
            else:
                line += f"| {cells.get((rank, step), '').ljust(width)} "
        lines.append(line)
    legend = _explain_signs(schedule, mark is not None, show_slots)
    return "\n".join(line.rstrip() for line in [describe(schedule), "", *lines, "", *legend])


def describe(schedule: Schedule) -> str:
    """Return one line that says which schedule this is."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}{'' if number == 1 else 's'}"

    parts = [count(schedule.group_size, "rank"), count(schedule.chunks_per_shard, "chunk") + " per shard"]
    if schedule.num_receive_slots:
        parts.append(count(schedule.num_receive_slots, "receive slot"))
    if schedule.num_send_slots:
        parts.append(count(schedule.num_send_slots, "send slot"))
    return f"{schedule.algorithm.value} {schedule.collective.value.replace('_', '-')}: {', '.join(parts)}"


def name_chunk(schedule: Schedule, chunk: Chunk) -> str:
    """Return `owner` or, where shards have several chunks, `owner.index`."""
    return str(chunk.owner_rank) if schedule.chunks_per_shard == 1 else f"{chunk.owner_rank}.{chunk.index}"


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


def _draw_cells(schedule: Schedule, steps: list[int], show_slots: bool) -> dict[tuple[int, int], str]:
    """Texts by (rank, step), with what is multiplied, sent and received in columns of their own."""
    parts = {
        (rank, step): _draw_step(schedule, rank, program[step], show_slots)
        for rank, program in enumerate(schedule.programs)
        for step in steps
        if step < len(program)
    }
    widths = [max((len(part[column]) for part in parts.values()), default=0) for column in range(3)]
    return {
        cell: "  ".join(text.ljust(width) for text, width in zip(part, widths, strict=True) if width).rstrip()
        for cell, part in parts.items()
    }


def _draw_step(schedule: Schedule, rank: int, step: Step, show_slots: bool) -> tuple[str, str, str]:
    """Texts for what one step multiplies, sends and receives."""

    def slot(number: int | None) -> str:
        return f"@{number}" if show_slots and number is not None else ""

    def chunk(action: Compute | Send | Receive) -> str:
        return name_chunk(schedule, action.chunk)

    compute = step.compute
    plus = "+" if _is_adding(schedule, compute) else ""
    star = "*" if compute.chunk.owner_rank == rank else ""
    sends = [f"{chunk(t)}{slot(t.slot)}->r{t.to_rank}" for t in step.transfers if isinstance(t, Send)]
    receives = [f"{chunk(t)}{slot(t.slot)}<-r{t.from_rank}" for t in step.transfers if isinstance(t, Receive)]
    return (
        f"{slot(compute.receive_slot)}[{plus}{chunk(compute)}{star}]{slot(compute.send_slot)}",
        " ".join(sends),
        " ".join(receives),
    )


def _is_adding(schedule: Schedule, compute: Compute) -> bool:
    return schedule.collective is Collective.REDUCE_SCATTER and compute.receive_slot is not None


def _explain_signs(schedule: Schedule, has_mark: bool, show_slots: bool) -> list[str]:
    """The legend: one line for each sign that can occur in this schedule."""
    is_gather = schedule.collective is Collective.ALL_GATHER
    is_ring = schedule.algorithm is Algorithm.RING
    has_transfers = schedule.group_size > 1
    if schedule.chunks_per_shard == 1:
        example, meaning = "2", "shard 2"
    else:
        example, meaning = "2.1", "chunk 1 of shard 2"
    signs: list[tuple[str, str]] = []
    if is_gather:
        signs.append((f"[{example}]", f"multiply {meaning}"))
        sent, received = meaning, meaning
    else:
        signs.append((f"[{example}]", f"compute this rank's partial of {meaning}"))
        if is_ring and has_transfers:
            signs.append((f"[+{example}]", "the same, added to the running sum that arrived"))
        sent = f"the {'running sum' if is_ring else 'partial'} of {meaning}"
        received = sent
    signs.append((f"[{example}*]", "the rank's own shard" + has_transfers * (", first" if is_gather else ", last")))
    if has_transfers:
        signs.append((f"{example}->r3", f"send {sent} to rank 3"))
        signs.append((f"{example}<-r1", f"receive {received} from rank 1"))
    if show_slots:
        signs.append(("@0", "what stands before it lies in slot 0; before a bracket: read from receive slot 0"))
    if has_mark:
        signs.append((">  <", "the step in question"))
    width = max(len(sign) for sign, _ in signs)
    lines = [f"  {sign.ljust(width)}  {text}" for sign, text in signs]
    if has_transfers:
        lines.append("Transfers of a step are issued together, before its computation, and run beside it.")
        if not is_gather and not is_ring:
            lines.append("After the last step every rank adds the partials that arrived to those of its own shard.")
    return lines
