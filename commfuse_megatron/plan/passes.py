"""Which program a plan stands for: the policies that tapes and tensors run passes by, and the lowering of each pass.

What is predicted and what runs are lowered here; a test compares what both ask.
"""

import dataclasses

from commfuse_megatron.plan.machine import Traits
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import AttentionProblem, GemmProblem, Problem, RowRange, UlyssesProblem
from commfuse_megatron.schedule import Algorithm, Collective
from commfuse_megatron.schedule.binding import BoundSchedule, bind
from commfuse_megatron.schedule.exchange import BoundExchange, Exchange, bind_exchange
from commfuse_megatron.schedule.lower_all_reduce import lower_all_reduce
from commfuse_megatron.schedule.lower_attention import (
    lower_at_once_backward,
    lower_query_split,
    lower_query_split_backward,
)
from commfuse_megatron.schedule.lower_linear import (
    Asked,
    lower_embedding,
    lower_gather_alone,
    lower_gather_pass,
    lower_scatter_pass,
)
from commfuse_megatron.schedule.lower_ulysses import lower_ulysses
from commfuse_megatron.schedule.lowering import Policy
from commfuse_megatron.schedule.pieces import doubling
from commfuse_megatron.schedule.program import Program

# Lanes for the GEMMs of a forward pass, of up to so many FLOP each. 2 x H200, two lanes against none, M 8192, over the
# larger of GEMM and transfer: 8B qkv 1.051 (1.072), proj 1.260 (1.330), 70B proj 1.063 (1.076), fc1 1.038 (1.016).
# Backward passes gained nothing, and pay for it in host time.
_NUM_LANES = 2
_MOST_FLOP = 4e11

_ANY_NUMBER = 1 << 30


def tape_policy(problem: Problem, plan: PassPlan) -> Policy:
    """Of passes that are replayed."""
    rows = -(-problem.rows // (problem.group_size * plan.chunks_per_shard)) * problem.batch
    is_small = 2.0 * rows * problem.N * problem.K <= _MOST_FLOP
    lanes = _NUM_LANES if problem.pass_name == "fprop" and is_small else 0
    return Policy(has_windows=True, most_adds=1, adds_bias_too=True, lanes=lanes, is_tape=True)


def tensor_policy(*, has_windows: bool, adds_in_epilogue: bool, keeps_own_apart: bool) -> Policy:
    """Of passes that are run step by step. adds_in_epilogue: whether a GEMM adds any number of partials."""
    return Policy(
        has_windows=has_windows, most_adds=_ANY_NUMBER if adds_in_epilogue else 0, keeps_own_apart=keeps_own_apart
    )


def is_replayed(plan: PassPlan, traits: Traits) -> bool:
    """Whether calls of `plan` are replayed, with little host time."""
    return traits.replays and plan.algorithm is Algorithm.DIRECT


def policy_of(problem: Problem, plan: PassPlan, traits: Traits) -> Policy:
    """Of a context with these traits."""
    if is_replayed(plan, traits):
        return tape_policy(problem, plan)
    has_windows = traits.transport == "copy_engine"
    return tensor_policy(has_windows=has_windows, adds_in_epilogue=traits.adds_in_epilogue, keeps_own_apart=False)


def bind_exchange_plan(problem: UlyssesProblem, plan: PassPlan, group_rank: int, *, goes_home: bool) -> BoundExchange:
    """One of the exchanges of a pass, bound to its rows: q, k and v travel together, and so do their gradients.

    Backward the groups go in the opposite order, so that the one that brought keys and values is the last that adds
    to their gradients.
    """
    groups = problem.head_groups(plan.chunks_per_shard)
    is_forward, both = problem.pass_name == "fprop", problem.head_dim + problem.value_dim
    if is_forward != goes_home:  # q, k, v or their gradients
        features = [group.q.size * problem.head_dim + group.brings_kv * group.kv.size * both for group in groups]
    else:
        features = [group.q.size * problem.value_dim for group in groups]
    shares_first = is_forward and not goes_home and not all(group.brings_kv for group in groups)
    widths = tuple(number // problem.unit for number in (features if is_forward else reversed(features)))
    kept = tuple(
        tuple(RowRange(run.start * problem.batch, run.stop * problem.batch) for run in problem.kept_rows(rank))
        for rank in range(problem.group_size)
    )
    return bind_exchange(Exchange(kept, widths, goes_home, shares_first), group_rank)


def bind_plan(problem: Problem, plan: PassPlan, collective: Collective, group_rank: int) -> BoundSchedule:
    """The schedule of a pass, bound to its rows; of an exchange, the one in the place of that collective."""
    if isinstance(problem, UlyssesProblem):
        return bind_exchange_plan(problem, plan, group_rank, goes_home=collective is Collective.REDUCE_SCATTER)
    sizes = (plan.chunks_per_shard, problem.rows, problem.batch)
    return bind(collective, plan.algorithm, problem.group_size, group_rank, *sizes)


def lower_pass(problem: Problem, plan: PassPlan, policy: Policy, asked: Asked, group_rank: int) -> Program:
    """The program of a rank for what is asked of a pass that is scheduled."""
    pieces = (plan.pieces or doubling(problem.group_size - 1)) if plan.path == "grouped" else ()
    policy = dataclasses.replace(policy, pieces=pieces, sums_on_the_way=plan.sums_on_the_way)

    def bound(collective: Collective) -> BoundSchedule:
        return bind_plan(problem, plan, collective, group_rank)

    if isinstance(problem, UlyssesProblem):
        arriving, leaving = (
            bind_exchange_plan(problem, plan, group_rank, goes_home=goes_home) for goes_home in (False, True)
        )
        splits_last = not asked.is_backward and not problem.has_dropout
        return lower_ulysses(arriving, leaving, policy, asked, splits_last=splits_last)
    gather, scatter = Collective.ALL_GATHER, Collective.REDUCE_SCATTER
    if problem.op == "embedding_reduce_scatter":
        if not asked.is_backward:
            return lower_embedding(bound(scatter), policy)
        return lower_gather_alone(bound(gather), policy, "all-gather of the output gradient", keeps_gathered=True)
    if isinstance(problem, AttentionProblem) and not asked.is_backward:
        return lower_query_split(bound(scatter), policy, has_bias=asked.has_bias)
    if isinstance(problem, AttentionProblem) and asked.has_product:
        return lower_query_split_backward(bound(gather), policy, asked)
    if isinstance(problem, GemmProblem) and problem.all_reduces:
        return lower_all_reduce(bound(scatter), bound(gather), policy, asked)
    if asked.attends:
        return lower_at_once_backward(bound(gather), policy, asked)
    if (problem.op == "all_gather_linear") != asked.is_backward:
        return lower_gather_pass(bound(gather), policy, asked)
    regathers = asked.weight_grad != "none" and not asked.has_x
    return lower_scatter_pass(bound(scatter), bound(gather) if regathers else None, policy, asked)


def lower_plan(problem: GemmProblem, plan: PassPlan, traits: Traits, group_rank: int) -> Program:
    """The program of a rank, of a pass of a linear or of the embedding that is scheduled, as calls usually ask it."""
    is_kept = problem.op == "all_gather_linear" and plan.keep_gathered_input
    asked = Asked(keeps_gathered=is_kept)
    if problem.pass_name == "backward":
        asked = Asked(
            is_backward=True,
            has_product="input" in problem.needs,
            weight_grad="now" if "weight" in problem.needs else "none",
            is_bulk=plan.path == "bulk",
            has_x=is_kept,
        )
    return lower_pass(problem, plan, policy_of(problem, plan, traits), asked, group_rank)
