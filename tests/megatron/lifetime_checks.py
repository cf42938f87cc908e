"""Checks of what closes contexts, run on every rank of one spawn. Order matters: the last ones destroy groups."""

from contextlib import suppress

import pytest
from torch import distributed as dist

from commfuse_megatron.plugin.contexts import close_contexts, open_contexts
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import tensor_parallel
from tests.megatron.layers import (
    assert_equal,
    example_input,
    pair,
    run,
)


def check_close_contexts(group_size: int) -> None:
    _, ours = pair("row", group_size)
    x = example_input("row", group_size)
    ours(x)
    context = state_of(ours).context
    close_contexts()
    assert open_contexts() == []
    assert not context.is_usable
    ours(x)
    assert state_of(ours).context is not context


def check_groups_destroyed_and_made_again(group_size: int) -> None:
    from megatron.core import parallel_state

    from commfuse_megatron.testing.gpt import tensor_parallel

    x = example_input("row", group_size)
    stock, ours = pair("row", group_size)
    expected = run(stock, x)
    assert_equal(expected, run(ours, x))
    old = state_of(ours).context
    parallel_state.destroy_model_parallel()
    with tensor_parallel(group_size):
        stock, ours = pair("row", group_size)
        assert_equal(expected, run(ours, x))
        new = state_of(ours).context
        assert new is not old
        assert not old.is_usable, "a context whose group Megatron has dropped is closed"
        assert open_contexts() == [new]
        assert new.group is parallel_state.get_tensor_model_parallel_group()


def check_groups_are_destroyed_in_one_order(group_size: int) -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()  # the fixture's, if it is still there
    destroyed: list[str] = []

    def destroy(group: dist.ProcessGroup) -> None:
        destroyed.append(group.group_name)
        destroy_process_group(group)

    destroy_process_group = dist.destroy_process_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "destroy_process_group", destroy)
        with tensor_parallel(group_size):
            pass
        orders: list[list[str]] = [[] for _ in range(group_size)]
        dist.all_gather_object(orders, destroyed)
        shared = set.intersection(*map(set, orders))  # ranks have groups of their own, too
        assert len(shared) > 3, orders
        assert len({tuple(name for name in order if name in shared) for order in orders}) == 1, orders
        del destroyed[:]
        with suppress(KeyError), tensor_parallel(group_size):
            name = parallel_state.get_tensor_model_parallel_group().group_name
            raise KeyError("what went wrong")
        assert name not in destroyed, "with NCCL this would wait for ranks that wait elsewhere"


def check_group_destroyed_in_torch(group_size: int) -> None:
    # The fixture's parallel state is gone by now; explicit groups do without it.
    with tensor_parallel(group_size):
        x = example_input("row", group_size)
        groups = [dist.new_group(list(range(group_size))) for _ in range(2)]
        _, ours = pair("row", group_size, tp_group=groups[0])
        ours(x)
        first = state_of(ours).context
        dist.destroy_process_group(groups[0])
        _, ours = pair("row", group_size, tp_group=groups[1])
        ours(x)
        assert not first.is_usable
        assert state_of(ours).context.is_usable
