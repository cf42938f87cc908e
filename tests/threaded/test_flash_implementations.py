"""FlashAttention-3 and -4 activated in PyTorch: their names, what is not given to them, changes of mind."""

import dataclasses
import threading

import pytest
import torch
from torch.nn import attention

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import AttentionConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import attention_choice
from commfuse_megatron.kernels.attention import SplitMask
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.kernels.attention_flash import flash_attention_unavailable_reason
from commfuse_megatron.problem import AttentionProblem, RowRange
from tests.harness import run_threads
from tests.harness.flash_implementations import register_stand_ins
from tests.threaded.test_query_split_attention import Case, check, draw

GPU = torch.device("cuda", 0)
BASE = AttentionProblem(
    pass_name="fprop", rows=512, batch=2, heads=4, kv_heads=2, head_dim=128, value_dim=128, N=64, dtype="bfloat16",
    group_size=4, right=0,
)  # fmt: skip
DROPOUT = dataclasses.replace(BASE, has_dropout=True)
WINDOW = dataclasses.replace(BASE, left=70)
WIDE = dataclasses.replace(BASE, head_dim=256, value_dim=256)


@pytest.fixture
def stand_ins(monkeypatch):
    """Of both, and of one that nobody knows; as on a Hopper GPU without cuDNN's front end."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: "no cuDNN here")
    yield register_stand_ins(monkeypatch, "FA3", "FA4", "mine")
    attention.restore_flash_attention_impl(_raise_warn=False)


@pytest.fixture
def on_the_cpu(stand_ins, monkeypatch):
    """Flash attention is chosen on the CPU as on a GPU; of every dtype."""

    def reason(problem, device):
        return flash_attention_unavailable_reason(
            dataclasses.replace(problem, dtype="float16", head_dim=8, value_dim=8), GPU
        )

    monkeypatch.setattr(attention_choice, "flash_attention_unavailable_reason", reason)
    return stand_ins


REFUSED = {  # what each refuses of what PyTorch's own takes
    None: {},
    "FA3": {"dropout": DROPOUT},
    "FA4": {"dropout": DROPOUT, "windows": WINDOW, "up to 128": WIDE},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_implementation_is_not_given_what_it_refuses(stand_ins, name):
    if name is not None:
        attention.activate_flash_attention_impl(name)
    kernels = AttentionKernels(GPU)
    for problem in (BASE, DROPOUT, WINDOW, WIDE, dataclasses.replace(BASE, right=None)):
        words = [word for word, refused in REFUSED[name].items() if problem is refused]
        if not words:
            expected = "flash" if name is None else f"flash ({name})"
            assert kernels.choose(problem, "auto").name == kernels.choose(problem, "flash").name == expected
            continue
        assert kernels.choose(problem, "auto").name == "math"
        assert words[0] in kernels.passed_over_reason(problem, "auto")
        with pytest.raises(UnsupportedError, match=rf"'flash', but flash attention \({name}\).*{words[0]}"):
            kernels.choose(problem, "flash")


@pytest.mark.parametrize(
    ("name", "capabilities"),
    [(None, {8: True, 9: True, 10: True}), ("FA3", {8: False, 9: True, 10: False, 12: False}),
     ("FA4", {8: False, 9: True, 10: True, 12: False})],
)  # fmt: skip
def test_each_runs_on_its_gpus(stand_ins, monkeypatch, name, capabilities):
    if name is not None:
        attention.activate_flash_attention_impl(name)
    for major, is_taken in capabilities.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, major=major: (major, 0))
        reason = flash_attention_unavailable_reason(BASE, GPU)
        assert (reason is None) == is_taken, (major, reason)
        assert is_taken or "needs compute capability 9.x" in reason


def test_one_that_nobody_knows_is_not_used(stand_ins):
    attention.activate_flash_attention_impl("mine")
    assert "(mine) is active, and what that takes is not known" in flash_attention_unavailable_reason(BASE, GPU)


def test_activating_and_restoring_makes_no_choice_stale(stand_ins):
    """Fails with choices kept by problem alone."""
    kernels = AttentionKernels(GPU)
    found = []
    for name in (None, "FA3", "FA4", None):
        attention.restore_flash_attention_impl(_raise_warn=False)
        if name is not None:
            attention.activate_flash_attention_impl(name)
        found.append([kernels.choose(problem, "auto").name for problem in (BASE, DROPOUT, WINDOW)])
    assert found == [
        ["flash"] * 3,
        ["flash (FA3)", "math", "flash (FA3)"],
        ["flash (FA4)", "math", "math"],
        ["flash"] * 3,
    ]


# -- the operation ----------------------------------------------------------------------------------------------------


def config(kernel="auto", path="query_split") -> OverlapConfig:
    return OverlapConfig(attention=AttentionConfig(path=path, kernel=kernel))


@pytest.mark.parametrize("path", ["query_split", "row_parallel"])
@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_operators_are_called_as_the_implementation_takes_them(on_the_cpu, name, path):
    """Fails with windows given to FA4: even -1, "no limit" elsewhere, is one to it."""
    attention.activate_flash_attention_impl(name)

    def body(group, device):
        with OverlapContext(group, config(path=path)) as context:
            for keywords in ({}, {"causal": False}, {"window": (3, 0)}, {"causal": False, "window": (2, 4)}):
                check(Case(kv_heads=2, keywords=keywords), group, context)
            return [(r.pass_name, r.attention, r.attention_reason) for r in context.report() if r.attention]

    taken = ["FA3"] * 4 if name == "FA3" else ["FA4", "FA4", None, None]
    for records in run_threads(2, body):
        kernels = [kernel for _, kernel, _ in records]
        assert kernels == [f"flash ({each})" if each else "math" for each in taken for _ in ("fprop", "backward")]
        for _, kernel, reason in records:
            assert reason == "no cuDNN here" + (
                "; flash attention (FA4) takes no windows in its backward pass" if kernel == "math" else ""
            )
    assert on_the_cpu[name].calls


@pytest.mark.parametrize("then", ["the call again", "another call of the problem", "its backward pass"])
def test_a_kernel_that_is_no_longer_active_is_not_called(on_the_cpu, then):
    """Before anything is sent. Fails with another call's choice put in the place of the earlier one, whose backward
    pass is still to come."""
    attention.activate_flash_attention_impl("FA3")
    barrier = threading.Barrier(2)
    words = r"planned with flash attention \(FA3\), and flash attention \(FA4\) is active now: make a new"

    def body(group, device):
        operands, grad_y = draw(Case(), group.rank(), group.size())
        leaves = [tensor.requires_grad_() for tensor in operands.values()]
        context = OverlapContext(group, config())
        y = ops.query_split_attention(*leaves, context=context)
        if barrier.wait() == 0:
            attention.activate_flash_attention_impl("FA4")
            on_the_cpu["FA3"].calls.clear()
        barrier.wait()
        if then == "its backward pass":
            with pytest.raises(UnsupportedError, match=words):
                y.backward(grad_y)
        else:
            scale = None if then == "the call again" else 0.5
            with pytest.raises(UnsupportedError, match=words):
                ops.query_split_attention(*leaves, scale=scale, context=context)
        assert context.is_usable  # nothing was sent, and all ranks have said so
        context.close()
        assert not on_the_cpu["FA4"].calls
        barrier.wait()
        with OverlapContext(group, config()) as context:
            check(Case(), group, context)
            return {record.attention for record in context.report() if record.attention}

    assert run_threads(2, body) == [{"flash (FA4)"}] * 2
    assert not on_the_cpu["FA3"].calls


def test_a_report_says_what_was_chosen_whatever_is_active_since(on_the_cpu):
    """Fails with reasons looked up when reports are made: the plain kernel would have none, or the report raise."""

    def body(group, device):
        attention.activate_flash_attention_impl("FA3")
        with OverlapContext(group, config()) as context:
            operands, _ = draw(Case(dtype=torch.float32), group.rank(), group.size())
            ops.query_split_attention(*operands.values(), dropout=0.5, context=context)
            attention.restore_flash_attention_impl()
            again = ops.query_split_attention(*operands.values(), dropout=0.5, context=context)
            assert again.isfinite().all()
            (record,) = (record for record in context.report() if record.calls and record.attention)
            return record.attention, record.attention_reason, record.calls

    (found,) = run_threads(1, body)
    assert found == ("math", "no cuDNN here; flash attention (FA3) takes no dropout", 2)


def test_the_kernel_itself_calls_nothing_but_what_it_was_made_for(on_the_cpu):
    attention.activate_flash_attention_impl("FA3")
    kernel = AttentionKernels(GPU).choose(BASE, "flash")
    attention.activate_flash_attention_impl("FA4")
    one, mask = torch.ones(1, 1, 1, 8), SplitMask(BASE.visible_keys(RowRange(0, 1)))
    with pytest.raises(UnsupportedError, match="make a new OverlapContext"):
        kernel.forward(one, one, one, one, mask, 1.0, None)
    with pytest.raises(UnsupportedError, match="make a new OverlapContext"):
        kernel.backward(one, (one,) * 4, (one[..., 0],), mask, 1.0, None)
    assert not on_the_cpu["FA4"].calls


def test_a_forced_kernel_is_refused_with_the_implementations_reason(on_the_cpu):
    attention.activate_flash_attention_impl("FA3")
    words = r"is 'flash', but flash attention \(FA3\) takes no dropout"

    def body(group, device):
        operands, _ = draw(Case(), group.rank(), group.size())
        with OverlapContext(group, config("flash")) as context:
            check(Case(), group, context)
        with pytest.raises(UnsupportedError, match=words), OverlapContext(group, config("flash")) as context:
            ops.query_split_attention(*operands.values(), dropout=0.5, context=context)

    run_threads(2, body)
    assert on_the_cpu["FA3"].calls
