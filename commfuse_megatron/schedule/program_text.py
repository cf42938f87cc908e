"""Programs as text: a table with a line for each op. `program` says what the operands are.

Draws broken programs as well as correct ones, since errors print them. Plain ASCII; a long program is cut to
`max_ops` lines, around the marked one if there is one.
"""

from commfuse_megatron.schedule import program as prog
from commfuse_megatron.schedule.render import LEFT_OUT, choose_visible, describe

_HEAD = ("op", "lane", "what", "rows read", "rows written", "batch")

# A sum of sixteen ranks adds fifteen ranges: more than these are cut.
_MOST_RANGES = 4


def render_program(program: prog.Program, *, mark: int | None = None, max_ops: int | None = None) -> str:
    """Return the table of a program, a line per op.

    Args:
        mark: the number of an op to point at, with >.
        max_ops: at most so many lines, the first ones and the last, or those around the mark; None shows all.
    """
    count, lane = len(program.ops), "main"
    table = []
    for number, op in enumerate(program.ops):
        read, written = (_say_ranges(rows) for rows in (prog.rows_read(op), prog.rows_written(op)))
        lane = "main" if isinstance(op, prog.Join) else lane
        if isinstance(op, prog.On):
            lane = _say_lane(op.lane)
        table.append((f"{number}", lane, _say_op(op), read, written, _say_batches(op)))
    shown = choose_visible(count, count if max_ops is None else max_ops, mark)
    lines = [_HEAD, *((LEFT_OUT, *[""] * 5) if index is None else table[index] for index in shown)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEAD))]
    texts = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    points = [" ", *(">" if mark is not None and index == mark else " " for index in shown)]
    drawn = [f"{point}{text}" for point, text in zip(points, texts, strict=True)]
    drawn.insert(1, "-" + "-+-".join("-" * width for width in widths))

    bounds = list(program.schedules.values())
    what = f"the program of rank {bounds[0].group_rank}" if bounds else "a program that sends nothing"
    head = [f"{what}: {count} op{'' if count == 1 else 's'}", *(describe(bound.schedule) for bound in bounds)]
    return "\n".join(line.rstrip() for line in [*head, "", *drawn])


def say_batch(batch: prog.Batch) -> str:
    """Return a step of a channel in words, such as `gather 3`."""
    return f"{batch[0]} {batch[1]}"


def say_rows(rows: prog.Rows) -> str:
    """Return rows as a slice of their operand."""
    return f"{rows.operand}[{rows.start}:{rows.start + rows.count}]"


def _say_ranges(ranges: tuple[prog.Rows, ...]) -> str:
    texts = [say_rows(rows) for rows in ranges if rows.count]
    if len(texts) > _MOST_RANGES:
        texts = [*texts[: _MOST_RANGES - 1], LEFT_OUT, texts[-1]]
    return " ".join(texts)


def _say_lane(lane: int | None) -> str:
    return "main" if lane is None else f"{lane}"


def _say_op(op: prog.Op) -> str:
    match op:
        case prog.Issue():
            return "issue"
        case prog.Wait():
            return "wait"
        case prog.Finish():
            return "finish"
        case prog.Copy():
            return "copy beside what follows" if op.is_beside else "copy"
        case prog.Gemm():
            chunk = f" {op.chunk}" if op.chunk >= 0 else ""
            weight = "" if op.is_forward else " backward"
            return f"multiply{chunk}{weight}" + " + added" * bool(op.adds) + " + bias" * op.has_bias
        case prog.Sum():
            return "sum" + " + bias" * op.has_bias
        case prog.WeightGrad():
            return "weight gradient" + ", added" * op.accumulates
        case prog.Compute():
            return f"{op.kind} {op.chunk}" if op.chunk >= 0 else op.kind
        case prog.Fork():
            return f"fork {op.lanes}"
        case prog.On():
            return f"on {_say_lane(op.lane)}"
        case prog.After():
            return f"after {_say_lane(op.lane)}"
        case prog.Join():
            return f"join {op.lanes}"
        case prog.Pause():
            return "pause"


def _say_batches(op: prog.Op) -> str:
    match op:
        case prog.Issue():
            ends = [say_batch((op.channel, op.step)) + ":"]
            if op.send is not None:
                ends.append(f"{op.send.chunk}->r{op.send.peer} at {op.send.at_row}")
            if op.receive is not None:
                ends.append(f"{op.receive.chunk}<-r{op.receive.peer}")
            return " ".join(ends)
        case prog.Wait():
            return ", ".join(map(say_batch, op.batches))
        case prog.Copy():
            return say_batch((prog.COPIES, op.number)) if op.is_beside else ""
    return ""
