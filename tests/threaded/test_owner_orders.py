"""Programs bound to an order of owners run: both linears, forward and backward, give the results of the reference."""

import functools

import pytest

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import LinearConfig, PassConfig
from commfuse_megatron.runtime import prepared
from commfuse_megatron.schedule import Algorithm, Collective, causal_costs_us, choose_order
from tests.harness import run_threads
from tests.harness.linear_cases import OPS, Case, assert_equal, draw, overlapped, reference

# In the second, ranks differ in their distances: pairs exchange their shards.
ORDERS = {
    "chosen": choose_order(4, causal_costs_us(1.0, 4), 0.25).order,
    "pairs": tuple(tuple(rank ^ mask for mask in (2, 3, 1)) for rank in range(4)),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("m", [1, 2])
def test_every_result_is_exact_on_integers(op: str, name: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ORDERS[name] is not None
    bound = []
    bind = functools.partial(prepared.bind, order=ORDERS[name])

    def bind_in_order(collective: Collective, algorithm: Algorithm, *sizes: int):
        bound.append(bind(collective, algorithm, *sizes))
        return bound[-1]

    monkeypatch.setattr(prepared, "bind", bind_in_order)
    sliced = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=m)
    config = OverlapConfig(linear=LinearConfig(fprop=sliced, dgrad=sliced))

    def body(group, device):
        with OverlapContext(group, config) as context:
            for seed, rows in enumerate([8 * m, 17, 3]):
                case = Case(op=op, rows=rows, seed=seed)
                operands = draw(case, group.rank(), group.size(), device)
                assert_equal(overlapped(case, operands, context), reference(case, operands, group))

    run_threads(4, body)
    assert {each.schedule.collective for each in bound} == set(Collective)
    for each in bound:
        owners = [step.compute.chunk.owner_rank for step in each.schedule.programs[each.group_rank]][::m]
        assert tuple(owner for owner in owners if owner != each.group_rank) == ORDERS[name][each.group_rank]
