"""Checks of layers that take Megatron's own path, and of who is told. Each is run on every rank of one spawn."""

import logging

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import FallbackConfig
from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseRowParallelLinear,
    unsupported_reason,
)
from commfuse_megatron.plugin.decision import state_of
from tests.megatron.layers import (
    KINDS,
    assert_equal,
    assert_overlapped,
    assert_stock,
    build,
    config,
    example_input,
    pair,
    run,
)


def check_explicit_expert_comm(group_size: int) -> None:
    # Shared experts set this after construction and communicate around the layer.
    for kind in KINDS:
        stock, ours = pair(kind, group_size, skip_bias_add=True)
        x = example_input(kind, group_size)
        for layer in (stock, ours):
            layer.explicit_expert_comm = True
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "explicit_expert_comm")


def check_sequence_parallel_toggled(group_size: int) -> None:
    # Inference switches sequence parallelism off on the built model; decoding brings one token.
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)[:1]
        for layer in (stock, ours):
            layer.sequence_parallel = False
            layer.allreduce_dgrad = True
            layer.eval()
        with torch.no_grad():
            assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
        assert_stock(ours, "sequence_parallel is off")
        ours.sequence_parallel = True
        ours.allreduce_dgrad = False
        ours(example_input(kind, group_size))
        assert state_of(ours).overlapped_calls == 1


def check_evaluation(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)
        for layer in (stock, ours):
            layer.eval()
        with torch.no_grad():
            assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
        with torch.inference_mode():
            assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
        assert_overlapped(ours, calls=2)


def check_length_not_divisible(group_size: int) -> None:
    stock, ours = pair("row", group_size)
    x = example_input("row", group_size)[:-1]
    for layer in (stock, ours):
        with pytest.raises(AssertionError, match="divisible"):
            layer(x)
    assert_stock(ours, "not divisible by the")


def check_two_dimensions(group_size: int) -> None:
    for kind in KINDS:
        stock, ours = pair(kind, group_size)
        x = example_input(kind, group_size)[:, 0].contiguous()
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "2 dimensions")


def check_one_rank(group_size: int) -> None:
    groups = [dist.new_group([rank]) for rank in range(group_size)]
    for kind in KINDS:
        stock, ours = pair(kind, 1, config(group_size), tp_group=groups[dist.get_rank()])
        x = example_input(kind, 1)
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "one rank")


def check_switched_off(group_size: int) -> None:
    for kind in KINDS:
        transformer = config(group_size)
        transformer.commfuse = False
        strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
        stock, _ = pair(kind, group_size)
        cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
        ours = build(kind, cls, transformer, overlap_config=strict)
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        assert_stock(ours, "config.commfuse is False")
        transformer.commfuse = True
        ours(x)
        assert state_of(ours).overlapped_calls == 1


def check_raises_instead_of_falling_back(group_size: int) -> None:
    strict = OverlapConfig(fallback=FallbackConfig(unsupported="raise"))
    for kind in KINDS:
        cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
        ours = build(kind, cls, config(group_size), overlap_config=strict)
        ours.sequence_parallel = False
        x = example_input(kind, group_size)
        reason = unsupported_reason(ours, x)
        assert reason is not None
        with pytest.raises(UnsupportedError) as raised:
            ours(x)
        assert reason in str(raised.value)


def check_one_rank_decides_differently(group_size: int) -> None:
    # Without the comparison one rank waits in an all-reduce and the other for a transfer.
    for kind in KINDS:
        stock, _ = pair(kind, group_size)
        cls = CommFuseColumnParallelLinear if kind == "column" else CommFuseRowParallelLinear
        ours = build(kind, cls, config(group_size), overlap_config=OverlapConfig(check_decisions=True))
        x = example_input(kind, group_size)
        assert_equal(run(stock, x), run(ours, x))
        first = state_of(ours).place
        for layer in (stock, ours):
            layer.explicit_expert_comm = layer.skip_bias_add = True
        ours(x)
        assert state_of(ours).stock_calls, "what all ranks decide alike is no error"
        for layer in (stock, ours):
            layer.explicit_expert_comm = layer.skip_bias_add = False
        faults = {
            "sequence_parallel is off": (ours, "sequence_parallel"),
            "config.commfuse is False": (ours.config, "commfuse"),
        }
        numbers = [first]
        for words, (owner, name) in faults.items():
            if dist.get_rank() == 1:
                setattr(owner, name, False)
            with pytest.raises(ShapeError, match="do not agree") as raised:
                ours(x)
            lines = str(raised.value).splitlines()[1:]
            number = int(lines[0].split("compared layer call ")[1].split()[0])
            assert number > numbers[-1]
            numbers.append(number)
            for rank, decision in enumerate(("overlapped", words)):
                place = f"{type(ours).__qualname__}), compared layer call {number} (this layer's first was {first}): "
                assert lines[rank].startswith(f"  group rank {rank}: layer ({place}{decision}"), lines[rank]
            ours.sequence_parallel = ours.config.commfuse = True
            assert_equal(run(stock, x), run(ours, x))


def check_a_main_grad_of_another_shape_is_named(group_size: int) -> None:
    """Fails without its name: the error was of an argument that the user had not given, of a layer not named."""
    for kind in KINDS:
        ours = pair(kind, group_size, tp_comm_buffer_name="fc9")[1]
        ours.gradient_accumulation_fusion = True
        ours.weight.main_grad = torch.zeros(2, 2, dtype=torch.float64)
        with pytest.raises(ShapeError, match=r"main_grad of fc9 is \[2, 2\] on cpu, but the weight is"):
            ours(example_input(kind, group_size))


def check_logged_once(group_size: int) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("commfuse_megatron.plugin.decision")
    logger.addHandler(handler)
    try:
        _, ours = pair("column", group_size, tp_comm_buffer_name="fc1")
        x = example_input("column", group_size)[:, 0].contiguous()
        for _ in range(3):
            ours(x)
    finally:
        logger.removeHandler(handler)
    assert len(records) == (1 if dist.get_rank() == 0 else 0), "the first rank of a group speaks for all"
    assert state_of(ours).stock_calls == {unsupported_reason(ours, x): 3}
    for record in records:
        assert unsupported_reason(ours, x) in record.getMessage()
        assert record.getMessage().startswith("fc1 (CommFuseColumnParallelLinear)")
