"""Calls of attention over a split sequence that look like others but are not: results, scales, gradients, modes."""

import pytest

from commfuse_megatron import OverlapContext, ops
from tests.harness import run_threads
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
