"""Attention over a split sequence beside what its caller has for it: trials with made-up times, and what is left."""

import functools
import importlib
import threading
import weakref
from collections import defaultdict
from contextlib import contextmanager, nullcontext

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import PlanConfig, UlyssesConfig
from commfuse_megatron.ops.ulysses_attention import Stock, UlyssesInputs, attend_prepared, prepare_exchange
from tests.harness import run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.threaded.test_planning import TRIAL, MadeUpTimes, machine
from tests.threaded.test_query_split_attention import assert_close
from tests.threaded.test_ulysses import Case, draw, run

ulysses_attention = importlib.import_module("commfuse_megatron.ops.ulysses_attention")  # the name is the function's

CASE = Case(rows=16, heads=8, kv_heads=4, keywords={"order": "zigzag"})
OURS = ("sequential", "overlapped m=1", "overlapped m=2")
WAYS = ("stock", *OURS)


class Theirs:
    """An exchange of somebody else's, which draws random numbers; how often it was called, by whom."""

    def __init__(self, group, *, trains=True, name="theirs 1.0"):
        self.attend = functools.partial(ops.reference.ulysses_attention, group=group, order="zigzag")
        self.with_gradients = []
        self.stock = Stock(name, self.call, trains, self.apart)

    def call(self, *heads):
        torch.rand(1)
        self.with_gradients.append(torch.is_grad_enabled())
        return self.attend(*heads)

    @staticmethod
    @contextmanager
    def apart():
        with torch.random.fork_rng([]):
            yield


def inputs_of(heads):
    return UlyssesInputs(*heads, True, "zigzag", None, None, 0.0, None)


def call(heads, theirs, context):
    """As a layer calls it."""
    inputs, forward = prepare_exchange(inputs_of(heads), context, theirs.stock)
    return theirs.attend(*heads) if forward.plan.path == "stock" else attend_prepared(inputs, forward, context)


def by_cost(context):
    context.planner.default_reason = None
    context.planner.machines["float64"] = machine()
    return context


def on_two(monkeypatch, times, body, config=None):
    """What `body(group, context)` gives on both ranks, where plans are chosen by cost and these are the times."""
    stopwatch = MadeUpTimes(lambda rank, name: times[rank][name])
    monkeypatch.setattr(TRIAL, lambda device: stopwatch)

    def on_rank(group, device):
        with take_part(group), OverlapContext(group, config or OverlapConfig()) as context:
            return body(group, by_cost(context))

    first, second = run_threads(2, on_rank)
    assert first == second
    return first, stopwatch.names


def where(best, us=50.0, others=90.0):
    return [{name: us if name == best else others for name in WAYS} for _ in range(2)]


def planned(group, context):
    """The report after a forward and a backward pass, whose results are compared, and the mode of all calls."""
    theirs = Theirs(group)
    operands, grad_y = draw(CASE, group.rank(), 2)
    before = torch.get_rng_state()
    found = run(operands, grad_y, lambda *heads: call(heads, theirs, context))
    assert torch.equal(torch.get_rng_state(), before)
    expected = run(operands, grad_y, ops.reference.ulysses_attention, group=group, order="zigzag")
    assert_close(found, expected)
    assert theirs.with_gradients, "never tried"
    assert all(theirs.with_gradients), "backward passes are part of the trial"
    return [(record.path, record.reason, record.calls, record.attention) for record in context.report()]


@pytest.mark.parametrize("best", WAYS)
def test_the_fastest_on_the_slowest_rank_is_taken(monkeypatch, best):
    times = where(best)
    times[0].update({name: 10.0 for name in WAYS if name != best})  # fast here, slow on the other rank
    records, timed = on_two(monkeypatch, times, planned)
    assert set(timed[0]) == set(WAYS)
    others = [] if best == "stock" else ["stock 0.090"]
    path, reason, calls, attention = records[0]
    assert (path, attention) == (best.partition(" ")[0], "math" if others else None)
    assert reason.startswith(f"measured: {best} 0.050 ms")
    assert all(text in reason for text in others)
    # What is the caller's is run and counted by the caller.
    assert (len(records), calls) == ((2, 1) if others else (1, 0))


@pytest.mark.parametrize(("ours", "taken"), [(100.5, "stock"), (100.0, "stock"), (99.9, "stock"), (99.7, "overlapped")])
def test_what_is_as_fast_stays_the_callers(monkeypatch, ours, taken):
    times = where("stock", 100.0, 200.0)
    for of_rank in times:
        of_rank["overlapped m=2"] = ours
    (record, *_), _ = on_two(monkeypatch, times, planned)
    assert record[0] == taken


@pytest.mark.parametrize(("submitted", "ahead", "taken"), [
    ({"stock": 900.0}, {"stock": 550.0, "overlapped m=2": 600.0}, "stock"),  # ours is but submitted sooner
    ({"stock": 600.0, "overlapped m=2": 700.0}, {"stock": 600.0, "overlapped m=2": 500.0}, "stock"),  # or later
    ({"stock": 900.0}, {"stock": 650.0, "overlapped m=2": 600.0}, "overlapped m=2"),
])  # fmt: skip
def test_ours_must_be_faster_for_a_slow_host_and_a_fast_one(monkeypatch, submitted, ahead, taken):
    """Fails without the second look: how soon the host is done decided, which it does not where it is ahead."""

    class TwoWays(MadeUpTimes):
        def burst_us(self, call, calls, lead=None):
            name = call.args[0].plan.name
            self.of_rank = lambda rank, _: (submitted if lead is None else ahead).get(name, 1000.0)
            return super().burst_us(call, calls)

    submitted = {"overlapped m=2": 600.0, **submitted}
    monkeypatch.setattr(TRIAL, lambda device: TwoWays(None))

    def on_rank(group, device):
        with OverlapContext(group, OverlapConfig()) as context:
            return planned(group, by_cost(context))[0]

    path, reason, *_ = run_threads(2, on_rank)[0]
    assert path == taken.partition(" ")[0], reason
    assert f"stock {ahead['stock'] / 1e3:.3f}" in reason


@pytest.mark.parametrize("best", ["stock", "overlapped m=2"])
def test_stored_plans_come_back_and_nothing_is_timed(monkeypatch, tmp_path, best):
    config = OverlapConfig(plan=PlanConfig(file=str(tmp_path / "plans.json")))
    first, timed = on_two(monkeypatch, where(best), planned, config)
    assert timed

    def again(group, context, name="theirs 1.0"):
        theirs = Theirs(group, name=name)
        heads, _ = draw(CASE, group.rank(), 2)
        _, forward = prepare_exchange(inputs_of([each.requires_grad_() for each in heads]), context, theirs.stock)
        return forward.plan.name, forward.plan.reason

    (name, reason), timed = on_two(monkeypatch, where("sequential"), again, config)
    assert (name, timed) == (best, {})
    assert reason.startswith("stored in plans.json 20")
    assert reason.endswith(first[0][1])
    # Another version of what the caller has may be faster.
    (name, _), timed = on_two(monkeypatch, where("sequential"), functools.partial(again, name="theirs 2.0"), config)
    assert name == "sequential"
    assert timed


@pytest.mark.parametrize("best", ["stock", "overlapped m=2"])
def test_recomputed_and_evaluated_calls_are_decided_once(monkeypatch, best):
    def body(group, context):
        theirs = Theirs(group)
        heads, grad_y = draw(CASE, group.rank(), 2)
        heads = [each.requires_grad_() for each in heads]
        found = []
        for mode in (torch.no_grad(), nullcontext(), torch.inference_mode(), nullcontext()):
            with mode:
                inputs = inputs_of([each * 1 for each in heads])
                found.append(prepare_exchange(inputs, context, theirs.stock)[1].plan.name)
                y = call(inputs[:3], theirs, context)
            if y.requires_grad:
                y.backward(grad_y)
        assert all(theirs.with_gradients)
        return found

    found, timed = on_two(monkeypatch, where(best), body)
    assert found == [best] * 4
    assert {timed[0].count(name) for name in WAYS} <= {10, 26}, "one trial: twice 5 rounds, and 8 more of the leaders"


def test_inference_alone_times_forward_passes(monkeypatch):
    def body(group, context):
        theirs = Theirs(group, trains=False)
        heads, _ = draw(CASE, group.rank(), 2)
        with torch.inference_mode():
            call(heads, theirs, context)
        assert not any(theirs.with_gradients)
        # The first call that asks for gradients has a trial of its own, with both passes.
        theirs.with_gradients.clear()
        call([each.requires_grad_() for each in heads], theirs, context)
        assert all(theirs.with_gradients)
        return [record.path for record in context.report()]

    assert on_two(monkeypatch, where("stock"), body)[0] == ["stock", "stock"]


@pytest.mark.parametrize("over_copies", [False, True])
def test_a_trial_that_is_lost_leaves_no_memory(monkeypatch, over_copies):
    """Fails without the release: windows of the losing candidates stayed."""
    if over_copies:
        emulate_copy_engine(monkeypatch)

    def body(group, context):
        planned(group, context)
        held = context.buffer_bytes
        # Whoever has nothing of his own gets ours, by a plan of its own, and its buffers anew.
        operands, grad_y = draw(CASE, group.rank(), 2)
        found = run(operands, grad_y, ops.ulysses_attention, context=context, order="zigzag")
        assert_close(found, run(operands, grad_y, ops.reference.ulysses_attention, group=group, order="zigzag"))
        return held, context.buffer_bytes > 0, [record.path for record in context.report()]

    assert on_two(monkeypatch, where("stock", 50.0), body)[0] == (0, True, ["stock", "sequential", "sequential"])


def test_a_trial_holds_one_call_at_a_time_and_nothing_afterwards(monkeypatch):
    """Fails without: what the last backward pass of ours had saved was there while the caller's own was timed."""
    made, drawn, of_rank = defaultdict(list), defaultdict(list), threading.get_ident
    forward = ulysses_attention.ulysses_forward

    def noting(call, heads):
        y, saved = forward(call, heads)
        made[of_rank()] += map(weakref.ref, (y, saved.attended))
        drawn[of_rank()] += map(weakref.ref, heads)
        return y, saved

    monkeypatch.setattr(ulysses_attention, "ulysses_forward", noting)

    def body(group, context):
        theirs = Theirs(group)
        attend, alive = theirs.attend, []

        def watch(*heads):
            alive.extend(each for each in made[of_rank()] if each() is not None)
            return attend(*heads)

        theirs.attend = watch
        heads, _ = draw(CASE, group.rank(), 2)
        prepare_exchange(inputs_of([each.requires_grad_() for each in heads]), context, theirs.stock)
        assert len(drawn[of_rank()]) > 3
        alive += [each for each in drawn[of_rank()] if each() is not None]
        return len(alive)

    assert on_two(monkeypatch, where("stock"), body)[0] == 0


def test_what_is_tried_meets_no_hooks_of_the_program(monkeypatch):
    """Fails without: `torch.utils.checkpoint` counts what is saved, and found more than when it recomputed."""
    packed = []

    def body(group, context):
        def pack(tensor):
            packed.append(tensor)
            return tensor

        heads, _ = draw(CASE, group.rank(), 2)
        heads = [each.requires_grad_() for each in heads]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            prepare_exchange(inputs_of(heads), context, Theirs(group).stock)
        return len(packed)

    assert on_two(monkeypatch, where("stock"), body)[0] == 0


def test_where_nothing_is_timed_it_is_the_callers(monkeypatch):
    config = OverlapConfig(plan=PlanConfig(measure="never"))

    def body(group, context):
        heads, _ = draw(CASE, group.rank(), 2)
        return prepare_exchange(inputs_of(heads), context, Theirs(group).stock)[1].plan

    plan, timed = on_two(monkeypatch, where("stock"), body, config)
    assert (plan.path, timed) == ("stock", {})
    assert plan.reason == "as with all gradients: default for attention where nothing is measured"


def test_a_forced_path_has_no_trial(monkeypatch):
    config = OverlapConfig(ulysses=UlyssesConfig(path="overlapped", head_groups=2))

    def body(group, context):
        heads, _ = draw(CASE, group.rank(), 2)
        return prepare_exchange(inputs_of(heads), context, Theirs(group).stock)[1].plan.name

    assert on_two(monkeypatch, where("stock"), body, config) == ("overlapped m=2", {})
