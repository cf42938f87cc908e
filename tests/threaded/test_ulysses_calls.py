"""Calls of attention over a split sequence that look like others but are not: results, scales, gradients, modes."""

import threading

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.errors import CommFuseError, ShapeError, TransportError
from commfuse_megatron.runtime import prepared
from tests.harness import on_ranks, run_threads
from tests.threaded import test_query_split_attention as query_split
from tests.threaded.test_query_split_attention import attention_config
from tests.threaded.test_ulysses import Case, check, draw, run, ulysses_config


@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_the_result_is_no_view_and_may_be_changed_in_place(group_size, path):
    """Fails without the fix: of one rank it was a view of what is saved. Backward follows all the same."""

    def body(group, device):
        operands, _ = draw(Case(), group.rank(), group_size)
        with OverlapContext(group, ulysses_config(path)) as context:
            for rows in (slice(None), slice(0, 0)):
                leaves = [each[rows].clone().requires_grad_() for each in operands]
                y = ops.ulysses_attention(*leaves, context=context)
                assert not y._is_view()
                assert y.is_contiguous()
                assert y.untyped_storage().nbytes() == y.nbytes
                (grad_v,) = torch.autograd.grad(y, leaves[2], torch.ones_like(y), retain_graph=True)
                y += 1
                y.backward(torch.ones_like(y))
                assert torch.equal(leaves[2].grad, grad_v)
                with torch.no_grad():
                    assert not ops.ulysses_attention(*leaves, context=context)._is_view()

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


@pytest.mark.parametrize("check_agreement", [None, False], ids=["every call", "new calls"])
@pytest.mark.parametrize("is_known", [False, True], ids=["new problem", "known problem"])
@pytest.mark.parametrize(("name", "numbers"), [("scale", (1.0, 3.0)), ("dropout", (1e-9, 0.9)), ("scale", (None, 3.0))])
def test_numbers_that_differ_between_ranks_raise_on_all(name, numbers, is_known, check_agreement):
    """Fails without the fix: each rank attended heads of all with a number of its own, and nothing said so."""

    def body(group, device):
        operands, _ = draw(Case(), group.rank(), 2)
        context = OverlapContext(group, ulysses_config(check_agreement=check_agreement))
        if is_known:
            usual = {"dropout": 0.5} if name == "dropout" else {"scale": 0.5}
            ops.ulysses_attention(*operands, **usual, context=context)
        with pytest.raises(ShapeError, match=rf"{name} ") as caught:
            ops.ulysses_attention(*operands, **{name: numbers[group.rank()]}, context=context)
        assert "group rank 1" in str(caught.value)
        assert not context.is_usable  # as after different problems: one rank may be a call ahead
        with pytest.raises(ShapeError):
            context.close()

    run_threads(2, body)


def test_numbers_seen_before_are_not_compared_again(monkeypatch):
    """Those of layers, say; of numbers that vary without end few are kept."""
    monkeypatch.setattr(prepared, "_MOST_AGREED", 4)

    def body(group, device):
        operands, _ = draw(Case(rows=2, batch=1), group.rank(), 2)
        with OverlapContext(group, ulysses_config(check_agreement=False)) as context:
            agree, stated = context.consensus.agree, []
            context.consensus.agree = lambda statement, **more: (stated.append(statement), agree(statement, **more))
            for scale in (1, 2, 3, 1, 2, 3.0, 4, 5, 1):
                ops.ulysses_attention(*operands, scale=scale, context=context)
            (p,) = context._prepared.values()
            assert len(p.agreed) <= 4
            assert context.has_run(p.problem)
            return [statement.rpartition("scale ")[2] for statement in stated]

    expected = [f"{scale}, dropout 0.0" for scale in (1.0, 2.0, 3.0, 4.0, 5.0, 1.0)]
    assert run_threads(2, body) == [expected] * 2


@on_ranks(2)
def test_each_rank_of_query_split_attention_has_its_own_scale(group, device):
    operands, grad_y = query_split.draw(query_split.Case(), group.rank(), 2)
    with OverlapContext(group, attention_config()) as context:
        where = {"scale": (0.5, 2.0)[group.rank()]}
        found = query_split.run(operands, grad_y, ops.query_split_attention, context=context, **where)
        expected = query_split.run(operands, grad_y, ops.reference.query_split_attention, group=group, **where)
        query_split.assert_close(found, expected)


@on_ranks(4)
def test_more_pieces_than_there_are_flags_are_not_sent_so(group, device):
    """Fails without the fix: the call raised ConfigError, and the context had failed."""
    config = ulysses_config("overlapped", 520)
    sizes = {"heads": 2080, "kv_heads": 2080, "head_dim": 1, "value_dim": 1}
    with OverlapContext(group, config) as context:
        check(Case(rows=8, batch=1, keywords={"order": "zigzag"}, **sizes), group, context)
        check(Case(), group, context)
        many, _, few, _ = context.report()
    assert many.path == "sequential"
    assert "overlapped would send 4160 chunks, more than 4096: lower ulysses.head_groups" in many.reason
    assert few.path == "overlapped"


@pytest.mark.parametrize("path", ["overlapped", "sequential"])
@pytest.mark.parametrize("group_size", [1, 2])
def test_autocast_rounds_operands_and_nothing_else(group_size, path):
    """Fails with the cast inside `autocast(enabled=False)`, where there is none."""

    def body(group, device):
        case = Case(kv_heads=2, dtype=torch.float32, keywords={"scale": 2.0})
        operands, grad_y = draw(case, group.rank(), group_size)
        grad_y = grad_y.bfloat16()

        def attend(*given, **where):
            with torch.autocast("cpu", torch.bfloat16):
                return ops.ulysses_attention(*given, **where)

        with OverlapContext(group, ulysses_config(path)) as context:
            rounded = [each.bfloat16() for each in operands]
            expected = run(rounded, grad_y, ops.ulysses_attention, context=context, scale=2.0)
            found = run(operands, grad_y, attend, context=context, scale=2.0)
            leaves = [each.clone().requires_grad_() for each in operands]
            y = attend(*leaves, context=context, scale=2.0)
            with torch.autocast("cpu", torch.bfloat16):
                y.backward(grad_y)
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                mixed = ops.ulysses_attention(operands[0], rounded[1], operands[2], context=context, scale=2.0)
        assert found["y"].dtype == torch.bfloat16
        assert torch.equal(mixed, expected["y"])
        for (name, value), leaf in zip(expected.items(), (y, *leaves), strict=True):
            assert torch.equal(found[name], value.to(found[name].dtype)), name
            assert name == "y" or torch.equal(found[name], leaf.grad), name

    run_threads(group_size, body)


@pytest.mark.parametrize("op", ["ulysses_attention", "linear_reduce_scatter"])
def test_who_does_not_come_sequentially_ends_the_groups_timeout(op):
    """As the docstrings of all operations say: that of the group, not `transport.timeout_s`."""
    both = threading.Barrier(2)
    config = OverlapConfig.from_dict({
        "linear": {"fprop": {"path": "sequential"}}, "ulysses": {"path": "sequential"},
        "transport": {"timeout_s": 30.0}, "check_agreement": False,
    })  # fmt: skip

    def body(group, device):
        operands = draw(Case(), group.rank(), 2)[0] if op == "ulysses_attention" else [torch.ones(4, 4)] * 2
        context = OverlapContext(group, config)
        getattr(ops, op)(*operands, context=context)
        if group.rank() == 0:
            with pytest.raises(RuntimeError, match="Timed out") as caught:
                getattr(ops, op)(*operands, context=context)
            assert not isinstance(caught.value, CommFuseError)
            with pytest.raises(TransportError, match="Timed out"):
                getattr(ops, op)(*operands, context=context)
        both.wait()

    run_threads(2, body, timeout_s=2.0)
