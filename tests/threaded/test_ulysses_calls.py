"""Calls of attention over a split sequence that look like others but are not: results, scales, gradients, modes."""

import pytest

from commfuse_megatron import OverlapContext, ops
from tests.harness import on_ranks, run_threads
from tests.threaded import test_query_split_attention as query_split
from tests.threaded.test_query_split_attention import attention_config
from tests.threaded.test_ulysses import Case, draw, ulysses_config


@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_the_result_is_no_view_and_may_be_changed_in_place(group_size, path):
    """Fails without the fix: of one rank it was a view of what is saved."""

    def body(group, device):
        operands, _ = draw(Case(), group.rank(), group_size)
        with OverlapContext(group, ulysses_config(path)) as context:
            for rows in (slice(None), slice(0, 0)):
                leaves = [each[rows].clone().requires_grad_() for each in operands]
                y = ops.ulysses_attention(*leaves, context=context)
                assert not y._is_view()
                assert y.is_contiguous()
                assert y.untyped_storage().nbytes() == y.nbytes
                y += 1

    run_threads(group_size, body)


@pytest.mark.parametrize("op", ["ulysses", "query split"])
@on_ranks(2)
def test_a_scale_that_varies_does_not_fill_the_memory(group, device, op):
    """Fails without a bound on what a pass works out. Of few scales, which layers may have, each is worked out once."""
    if op == "ulysses":
        config, call, operands = (
            ulysses_config(),
            ops.ulysses_attention,
            draw(Case(rows=2, batch=1), group.rank(), 2)[0],
        )
    else:
        config, call = attention_config(), ops.query_split_attention
        operands = list(query_split.draw(query_split.Case(rows=2), group.rank(), 2)[0].values())
    with OverlapContext(group, config) as context:

        def known(scale):
            leaves = [each.detach().clone().requires_grad_() for each in operands]
            call(*leaves, scale=scale, context=context).sum().backward()
            return [dict(p._worked_out) for p in context._prepared.values()]

        first = known(0.5)
        assert all(first)
        known(0.25)
        again = known(0.5)
        assert all(again[at][key] is value for at, each in enumerate(first) for key, value in each.items())
        for number in range(150):
            assert all(0 < len(each) <= 65 for each in known(0.5 + number * 1e-4))
