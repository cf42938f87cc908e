"""What is sent and multiplied, in which order, on every rank: frozen data, no torch.

Read `actions` first, then one builder; `render` prints a schedule. Then `program`, which a bound schedule becomes, and
one lowering; `program_checks` says what correct means, `simulate` what a program costs.
"""

from commfuse_megatron.schedule.actions import Algorithm, Chunk, Collective, Receive, Schedule, Send, Step
from commfuse_megatron.schedule.all_gather import build_all_gather
from commfuse_megatron.schedule.closed_form import closed_form_us
from commfuse_megatron.schedule.reduce_scatter import build_reduce_scatter
from commfuse_megatron.schedule.render import describe, render
from commfuse_megatron.schedule.simulate import Costs, Work, simulate
from commfuse_megatron.schedule.timeline import Activity, Interval, Simulation, Timeline

__all__ = [
    "Activity",
    "Algorithm",
    "Chunk",
    "Collective",
    "Costs",
    "Interval",
    "Receive",
    "Schedule",
    "Send",
    "Simulation",
    "Step",
    "Timeline",
    "Work",
    "build_all_gather",
    "build_reduce_scatter",
    "describe",
    "render",
    "closed_form_us",
    "simulate",
]
