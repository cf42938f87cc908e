"""Checks of what closes contexts, run on every rank of one spawn. Order matters: the last ones destroy groups."""

import importlib
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import CommFuseError, TransportError
from commfuse_megatron.plugin import CommFuseColumnParallelLinear, reset_contexts
from commfuse_megatron.plugin.contexts import open_contexts
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import tensor_parallel
from tests.megatron.layers import (
    assert_equal,
    build,
    config,
    example_input,
    pair,
    run,
)


def check_reset_contexts(group_size: int) -> None:
    _, ours = pair("row", group_size)
    x = example_input("row", group_size)
    ours(x)
    context = state_of(ours).context
    reset_contexts()
    assert open_contexts() == []
    assert not context.is_usable
    ours(x)
    assert state_of(ours).context is not context


def _breakable(group_size: int, **options: bool) -> tuple[Any, Any]:
    """Stock and ours, whose context a check may break: nobody else's has this time limit."""
    stock, _ = pair("column", group_size)
    overlap = OverlapConfig(transport=TransportConfig(timeout_s=12.5), **options)
    return stock, build("column", CommFuseColumnParallelLinear, config(group_size), overlap_config=overlap)


def _end_in_call(ours: Any, x: torch.Tensor, error: Exception) -> None:
    """A call of `ours` ends by `error`, which another call may not see."""
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("commfuse_megatron.ops.all_gather_linear")  # not the function of that name
        patch.setattr(module, "cast_for_autocast", Mock(side_effect=error))
        with pytest.raises(type(error)) as raised:
            ours(x)
    assert raised.value is error
    assert any("commfuse_megatron.plugin.reset_contexts()" in note for note in error.__notes__)


def check_what_fails_in_one_call_on_all_ranks_is_tried_again(group_size: int) -> None:
    # Fails without renewal: every call afterwards raised, whatever the program did.
    for check_agreement in (True, False):
        stock, ours = _breakable(group_size, check_agreement=check_agreement)
        x = example_input("column", group_size)
        for _ in range(2):
            assert_equal(run(stock, x), run(ours, x))
            old = state_of(ours).context
            output = ours(x)[0]
            _end_in_call(ours, x, torch.OutOfMemoryError("no memory"))
            with pytest.raises(TransportError, match=r"OutOfMemoryError: no memory\n.*reset_contexts\(\)"):
                output.sum().backward()
            assert_equal(run(stock, x), run(ours, x))
            assert state_of(ours).context is not old
            assert open_contexts().count(state_of(ours).context) == 1
            assert old not in open_contexts()


def check_what_fails_on_one_rank_says_the_way_out(group_size: int) -> None:
    # Fails without: the message did not name it.
    for check_agreement in (True, False):
        stock, ours = _breakable(group_size, check_agreement=check_agreement)
        x = example_input("column", group_size)
        expected = run(stock, x)
        assert_equal(expected, run(ours, x))
        cause = "ValueError: only here"
        if dist.get_rank() == 1:
            _end_in_call(ours, x, ValueError("only here"))
        else:
            with pytest.raises(TransportError, match=rf"group rank 1.*{cause}") as raised:
                ours(x)
            assert "reset_contexts()" in raised.value.__notes__[-1]
        for _ in range(2):
            with pytest.raises(CommFuseError, match=rf"(?s){cause}.*not known to be in step.*reset_contexts\(\)"):
                ours(x)
        reset_contexts()
        assert open_contexts() == []
        assert_equal(expected, run(ours, x))


def check_decisions_are_compared_anew_after_a_reset(group_size: int) -> None:
    # Fails where what a layer remembers outlives its context: one rank was interrupted in a comparison that another
    # passed, and ever after they brought different words for the same call.
    stock, ours = _breakable(group_size, check_decisions=True)
    x = example_input("column", group_size)
    expected = run(stock, x)
    assert_equal(expected, run(ours, x))
    agreement = state_of(ours).context.consensus._agreement
    agree = agreement.agree

    def interrupt(*args: Any, **kwargs: Any) -> None:
        agree(*args, **kwargs)
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        agreement.agree = interrupt
    with pytest.raises(KeyboardInterrupt if dist.get_rank() == 1 else TransportError):
        ours(x)
    reset_contexts()
    assert_equal(expected, run(ours, x))


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
