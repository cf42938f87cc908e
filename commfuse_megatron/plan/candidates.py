"""Which plans there are for one problem: what the sizes, the configuration and the memory allow.

Knows nothing of costs, but for one hint. It depends on what all ranks share only, so ranks that bring the same problem
get the same list in the same order.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace

from commfuse_megatron.config import AttentionConfig, OverlapConfig, PassConfig, UlyssesConfig
from commfuse_megatron.plan.attention import list_attention_plans
from commfuse_megatron.plan.pass_plan import PassPlan, parts_of
from commfuse_megatron.plan.ulysses import list_ulysses_plans, ulysses_buffer_needs
from commfuse_megatron.problem import DTYPE_BYTES, AttentionProblem, GemmProblem, Problem, UlyssesProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.transport.base import MOST_CHUNKS

# Chunks per shard worth considering. Every further slice costs 35 us of host time (2 x H200, November 2026).
_CHUNKS = (1, 2, 4)
# On slow links, where the first chunk is what cannot be hidden: m=8 won over m=4 through host memory by 0.2 ms of 2.8.
_CHUNKS_ON_SLOW_LINKS = (1, 2, 4, 8)
# Programs have group_size * m steps: with more ranks than this, m beyond 2 only makes slices small.
_MOST_RANKS_FOR_MANY_CHUNKS = 16

# One pass over own partials, P others and the result moves P + 2 rows of 16 bits each, the last pass of several the
# running sum, of 32 bits, one and the result: four.
_LEAST_PARTIALS = 3

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Candidates:
    """plans: at least one, the simplest first. note: what the configuration asked for and cannot have; often empty."""

    plans: tuple[PassPlan, ...]
    note: str = ""


def settings_of(problem: Problem, config: OverlapConfig) -> PassConfig | AttentionConfig | UlyssesConfig:
    """What the configuration says of a pass of this kind."""
    if isinstance(problem, GemmProblem):
        return config.linear.fprop if problem.pass_name == "fprop" else config.linear.dgrad
    return config.attention if isinstance(problem, AttentionProblem) else config.ulysses


def list_candidates(
    problem: Problem,
    config: OverlapConfig,
    *,
    held: Mapping[str, int] | None = None,
    is_link_slow: bool = False,
    with_rings: bool = True,
) -> Candidates:
    """All plans for `problem` that `config` leaves open, with an empty reason; at least one.

    Args:
        held: bytes of the buffers that the context has already, by name: they count towards `max_buffer_mib`.
        is_link_slow: transfers take longer than GEMMs, so finer chunks are worth considering.
        with_rings: whether rings are worth considering where the configuration leaves the algorithm open.
    """
    if isinstance(problem, AttentionProblem):
        plans = list_attention_plans(problem, config)
        note = _say_empty_chunks(problem, plans, "splits_per_shard")
    elif isinstance(problem, UlyssesProblem):
        plans, note = list_ulysses_plans(problem, config), ""
    else:
        plans, note = _list_linear_plans(problem, config, is_link_slow=is_link_slow, with_rings=with_rings)
        note = _join(note, _say_empty_chunks(problem, plans, "chunks_per_shard"))
    plans, note = _without_too_many_chunks(problem, plans, note)
    limit = config.transport.max_buffer_mib * _MIB
    sizes = {plan: sum(merge_needs(held or {}, buffer_needs(problem, plan)).values()) for plan in plans}
    fitting = [plan for plan in plans if not buffer_needs(problem, plan) or sizes[plan] <= limit]
    if len(fitting) < len(plans):
        smallest = min(sizes[plan] for plan in plans if plan not in fitting)
        mib = f"{-(-smallest // _MIB)} MiB of buffers, more than transport.max_buffer_mib = {limit // _MIB}"
        left_out = dict.fromkeys(plan.path for plan in plans if plan not in fitting)
        note = _join(note, f"{' and '.join(left_out)} would take {mib}")
    if not fitting:
        fitting = [PassPlan("sequential", keep_gathered_input=config.linear.wgrad.keep_gathered_input)]
    return Candidates(tuple(fitting), note)


def _without_too_many_chunks(problem: Problem, plans: list[PassPlan], note: str) -> tuple[list[PassPlan], str]:
    if isinstance(problem, UlyssesProblem):
        setting, per_shard = "ulysses.head_groups", len(problem.kept_rows(0))  # each group goes in so many runs of rows
    else:
        is_attention, per_shard = isinstance(problem, AttentionProblem), 1
        setting = "attention.splits_per_shard" if is_attention else "chunks_per_shard"
    numbers = {plan: problem.group_size * plan.chunks_per_shard * per_shard for plan in plans if plan.overlaps}
    left_out = {plan.path: number for plan, number in numbers.items() if number > MOST_CHUNKS}
    for path, number in left_out.items():
        note = _join(note, f"{path} would send {number} chunks, more than {MOST_CHUNKS}: lower {setting}")
    return [plan for plan in plans if numbers.get(plan, 0) <= MOST_CHUNKS], note


def _list_linear_plans(
    problem: GemmProblem, config: OverlapConfig, *, is_link_slow: bool, with_rings: bool
) -> tuple[list[PassPlan], str]:
    chosen, keeps = settings_of(problem, config), config.linear.wgrad.keep_gathered_input
    assert isinstance(chosen, PassConfig)
    paths, note = _paths(problem, chosen)
    if problem.all_reduces:
        if chosen.algorithm == "ring" and "sliced" in paths:
            note = _join(note, '"ring" is not for all-reduces: direct instead')
        chosen = dataclasses.replace(chosen, algorithm="direct")
    plans = [
        PassPlan(path, "", algorithm, chunks, keeps)
        for path in paths
        for algorithm, chunks in _variants(problem, chosen, path, is_link_slow=is_link_slow, with_rings=with_rings)
    ]
    return [replace(plan, sums_on_the_way=_may_sum_on_the_way(problem, plan)) for plan in plans], note


def _may_sum_on_the_way(problem: GemmProblem, plan: PassPlan) -> bool:
    """Of fewer than three partials the last pass is no shorter for the one before it."""
    is_direct = plan.is_scheduled and plan.algorithm is Algorithm.DIRECT
    return is_direct and parts_of(problem, plan).scatters and problem.group_size - 1 >= _LEAST_PARTIALS


def buffer_needs(problem: Problem, plan: PassPlan) -> dict[str, int]:
    """Bytes that `plan` needs of each of the context's buffers, at most and on any rank.

    gather: [M, features]; receive: the largest shard from every other rank; send: all partials for others; own: this
    rank's partial before the sum, in fp32 where the GEMM keeps it un-rounded. Of an attention forward and backward;
    its paths without split queries need what the projection's own plans do.
    """
    if isinstance(problem, UlyssesProblem):
        return ulysses_buffer_needs(problem, plan)
    if plan.path not in ("sliced", "grouped", "bulk", "query_split"):
        return {}
    if isinstance(problem, AttentionProblem):
        gathers, scatters = bool(problem.needs) and plan.backward_path is None, True
    else:
        gathers, _, scatters, _ = parts_of(problem, plan)
    others, itemsize = problem.group_size - 1, DTYPE_BYTES[problem.dtype]
    shard_rows = -(-problem.rows // problem.group_size)
    chunk_rows = -(-shard_rows // plan.chunks_per_shard)
    row_bytes = problem.shard_bytes // max(1, shard_rows)
    needs: dict[str, int] = {}
    if gathers:
        needs["gather"] = problem.rows * row_bytes
    if scatters:
        needs["receive"] = others * plan.chunks_per_shard * chunk_rows * row_bytes
        needs["send"] = min(problem.rows, others * shard_rows) * row_bytes
        own_rows = chunk_rows if plan.algorithm is Algorithm.RING else shard_rows
        needs["own"] = own_rows * row_bytes // itemsize * max(4, itemsize)
    return needs


def merge_needs(held: Mapping[str, int], needs: Mapping[str, int]) -> dict[str, int]:
    """Buffers that serve both: each as large as the larger of the two."""
    return {name: max(held.get(name, 0), needs.get(name, 0)) for name in sorted({*held, *needs})}


def _paths(problem: GemmProblem, chosen: PassConfig) -> tuple[list[str], str]:
    """Paths in the order in which ties are decided, and what became of a forced one.

    From the simplest on, except that Megatron's comes last: a collective beside cuBLAS shares SMs as the moment has
    it, and where it came within a percent of bulk in trials it was up to 6 % slower later (2 x H200, 160 passes).
    """
    is_backward = problem.pass_name == "backward"
    needs_both = {"input", "weight"} <= set(problem.needs.split("+"))
    gathers_again = problem.op == "all_gather_linear" and is_backward
    hides_whole_gemms = (gathers_again or (problem.all_reduces and is_backward)) and needs_both
    if chosen.path in ("bulk", "grouped") and problem.all_reduces:
        return ["sliced"], f'"{chosen.path}" is not for all-reduces: sliced instead'
    if chosen.path == "bulk" and not is_backward:
        return ["sliced"], '"bulk" is for backward passes: sliced instead'
    if chosen.path == "async" and not hides_whole_gemms:
        return ["sequential"], f'"async" finds no GEMM that does not wait for the transfer ({_say_pass(problem)})'
    if chosen.path != "auto":
        return [chosen.path], ""
    paths = ["sequential"]
    if problem.all_reduces:
        return [*paths, "sliced", *(["async"] if hides_whole_gemms else [])], ""
    # With two ranks the bulk gather of a reduce-scatter linear is the sliced one with one chunk per shard.
    is_bulk_of_its_own = hides_whole_gemms or (
        problem.op == "linear_reduce_scatter" and "input" in problem.needs and problem.group_size > 2
    )
    if is_backward and is_bulk_of_its_own:
        paths.append("bulk")
    paths.append("sliced")
    if problem.group_size > 2 and (not is_backward or "input" in problem.needs):
        paths.append("grouped")
    if hides_whole_gemms:
        paths.append("async")
    return paths, ""


def _variants(
    problem: GemmProblem, chosen: PassConfig, path: str, *, is_link_slow: bool, with_rings: bool
) -> list[tuple[Algorithm, int]]:
    """(algorithm, chunks per shard) of one path, from the simplest on."""
    if path != "sliced":
        return [(Algorithm.DIRECT, 1)]
    # The ring equals direct-to-owner with two ranks. Without dgrad nothing is sliced, however many chunks travel.
    is_sliced = problem.pass_name == "fprop" or "input" in problem.needs
    if chosen.algorithm != "auto":
        algorithms = [Algorithm(chosen.algorithm)]
    else:
        has_rings = with_rings and problem.group_size > 2 and is_sliced
        algorithms = [Algorithm.DIRECT, *([Algorithm.RING] if has_rings else [])]
    if chosen.chunks_per_shard is not None:
        chunks: tuple[int, ...] = (chosen.chunks_per_shard,)
    elif not is_sliced:
        chunks = (1,)
    else:
        offered = _CHUNKS_ON_SLOW_LINKS if is_link_slow else _CHUNKS
        most = problem.rows // problem.group_size
        if problem.group_size > _MOST_RANKS_FOR_MANY_CHUNKS:
            most = min(most, 2)
        chunks = tuple(m for m in offered if m == 1 or m <= most)
    return [(algorithm, m) for m in chunks for algorithm in algorithms]


def _say_pass(problem: GemmProblem) -> str:
    needs = f" for {problem.needs.replace('+', ' and ')}" if problem.needs else ""
    return f"{problem.op} {problem.pass_name}{needs}"


def _say_empty_chunks(problem: Problem, plans: list[PassPlan], option: str) -> str:
    """That `option` asks for more chunks than a shard has rows, if it does; what is offered otherwise never does."""
    most, shard_rows = max(plan.chunks_per_shard for plan in plans), -(-problem.rows // problem.group_size)
    if most <= max(1, shard_rows):
        return ""
    return f"{option}: {most} chunks are more than the {shard_rows} rows of a shard, so some are empty"


def _join(first: str, second: str) -> str:
    return "; ".join(filter(None, (first, second)))
