"""What PyTorch's flash attention is not given. `gpu/test_query_split.py` runs it."""

import dataclasses

import pytest
import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import attention_choice, attention_flash
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.problem import AttentionProblem

GPU = torch.device("cuda", 0)
BASE = AttentionProblem(
    pass_name="fprop", rows=512, batch=2, heads=4, kv_heads=2, head_dim=128, value_dim=128, N=64, dtype="bfloat16",
    group_size=4, right=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def gpu_without_cudnn(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(attention_choice, "cudnn_attention_unavailable_reason", lambda problem, device: "no cuDNN here")


@pytest.mark.parametrize("change", [{}, {"has_dropout": True}, {"left": 70}, {"head_dim": 256, "value_dim": 256}])
def test_what_it_takes(change):
    problem, kernels = dataclasses.replace(BASE, **change), AttentionKernels(GPU)
    assert kernels.choose(problem, "auto").name == kernels.choose(problem, "flash").name == "flash"
    assert kernels.passed_over_reason(problem, "auto") == "no cuDNN here"


@pytest.mark.parametrize(("change", "words"), [
    ({"dtype": "float32"}, "takes bfloat16 and float16, this is float32"),
    ({"value_dim": 64}, "these have 128 and 64"), ({"head_dim": 260, "value_dim": 260}, "up to 256"),
    ({"has_mask": True, "right": None}, "no mask tensor"),
])  # fmt: skip
def test_what_it_does_not_take(change, words):
    problem, kernels = dataclasses.replace(BASE, **change), AttentionKernels(GPU)
    assert kernels.choose(problem, "auto").name == "math"
    assert words in kernels.passed_over_reason(problem, "auto")
    with pytest.raises(UnsupportedError, match=f"'flash', but .*{words}"):
        kernels.choose(problem, "flash")


def test_what_a_program_has_put_in_its_place_is_not_used(monkeypatch):
    """Others behind the same operators take less, and none of them was ever run here."""
    monkeypatch.setattr(attention_flash, "current_flash_attention_impl", lambda: "mine")
    assert AttentionKernels(GPU).choose(BASE, "auto").name == "math"


def test_an_old_gpu_has_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "capability 8.0" in AttentionKernels(GPU).passed_over_reason(BASE, "auto")
