"""Self-attention whose exchanges hide under its projections: whose hooks run, what keeps it from that, what gets lost.

Two context-parallel ranks of one tensor-parallel rank each, float64 on the CPU. `test_context_parallel.py` compares
models with stock's.
"""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.plugin import model_report, ulysses_block
from commfuse_megatron.plugin.attention import _QuerySplit
from commfuse_megatron.plugin.ulysses_block import find_block
from tests.megatron.harness import make_cpu_test
from tests.megatron.models import loss_and_gradients, sharing_sequences, tiny_gpt

RANKS = 2
TOKENS = torch.arange(2 * 17).view(2, 17)


def build(**options: Any) -> Any:
    overlap = OverlapConfig.from_dict({"ulysses": {"with_projections": "on"}})
    return tiny_gpt(1, overlap, context_parallel_size=RANKS, cp_comm_type="a2a", **options)


def attention_of(model: Any) -> Any:
    return model.decoder.layers[0].self_attention


def why_alone(attention: Any, **given: Any) -> str:
    """In words; "" where exchanges hide under the projections."""
    hidden = torch.ones(8, 2, 64, dtype=torch.float64)
    found = find_block(attention, super(_QuerySplit, attention).forward, {"hidden_states": hidden, **given})
    return found if isinstance(found, str) else ""


def hook(*_: Any) -> None:
    """Does nothing."""


def check_what_keeps_it_alone(_: int) -> None:
    model = build()
    attention = attention_of(model)
    core, qkv, projection = attention.core_attention, attention.linear_qkv, attention.linear_proj
    assert why_alone(attention) == ""
    hooks = [
        (module.register_forward_hook, f"{name} has forward hooks")
        for module, name in ((core, "core attention"), (qkv, "linear_qkv"), (projection, "linear_proj"))
    ]
    hooks += [(qkv.register_forward_pre_hook, "linear_qkv has forward pre-hooks"),
              (projection.register_full_backward_hook, "linear_proj has backward hooks"),
              (torch.nn.modules.module.register_module_forward_hook, "hooks of all modules")]  # fmt: skip
    for register, words in hooks:
        handle = register(hook)
        assert words in why_alone(attention), words
        handle.remove()
    main_grad = "gradient_accumulation_fusion is on but the weight has no main_grad"
    for holder, name, value, words in (
        (core, "forward", core.forward, "core attention has a forward of its own"),
        (attention, "get_query_key_value_tensors", attention.get_query_key_value_tensors, "only SelfAttention itself"),
        (attention, "checkpoint_core_attention", True, "core attention is recomputed"),
        (attention, "offload_attn_proj", True, "the projection's activations are offloaded"),
        (attention, "offload_qkv_linear", True, "the activations of linear_qkv are offloaded"),
        (attention.config, "attention_output_gate", True, "attention_output_gate is on"),
        (attention.config, "cuda_graph_impl", "local", "config.cuda_graph_impl is local"),
        (qkv, "return_layernorm_output", True, "linear_qkv returns its norm's output"),
        (qkv, "is_expert", True, "linear_qkv: the layer belongs to an expert"),
        (projection, "input_is_parallel", False, "linear_proj: input_is_parallel is False"),
        (qkv, "gradient_accumulation_fusion", True, f"linear_qkv: {main_grad}"),
    ):
        with mock.patch.dict(vars(holder), {name: value}):
            assert words in why_alone(attention), words
    with mock.patch.dict(attention._modules, {"linear_qkv": torch.nn.Linear(1, 1)}):
        assert "linear_qkv is a Linear: it must be our linear itself" in why_alone(attention)
    assert "the attention is given inference_context" in why_alone(attention, inference_context=SimpleNamespace())
    with mock.patch.object(type(core), "forward"):  # core attention has its own reason then
        assert why_alone(attention) == ""
    assert why_alone(attention) == ""


def check_hooks_that_wait_for_parameters_run(_: int) -> None:
    """As the data-parallel wrapper registers on every module; norms of queries and keys are called for each group."""
    model = build(qk_layernorm=True)
    attention, called = attention_of(model), []
    for name in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm"):
        wait = lambda module, args, name=name: called.append(name)  # noqa: E731
        wait.__module__ = "megatron.core.distributed.distributed_data_parallel"
        getattr(attention, name).register_forward_pre_hook(wait)
    before = {name: list(vars(module)) for name, module in attention.named_modules()}
    loss_and_gradients(model, TOKENS)
    assert called == ["linear_qkv", "linear_proj", *["q_layernorm", "k_layernorm"] * 2]
    paths = {layer.name.rpartition(".")[2]: layer.path for layer in model_report(model).layers}
    assert [paths[name] for name in ("core_attention", "linear_qkv", "linear_proj")] == ["overlapped"] * 3
    assert {
        name: [key for key in vars(module) if "commfuse" not in key] for name, module in attention.named_modules()
    } == {name: [key for key in keys if "commfuse" not in key] for name, keys in before.items()}


def check_what_gets_lost_is_an_error(_: int) -> None:
    model = build()
    stock = ulysses_block._Core.forward
    lost = mock.patch.object(ulysses_block._Core, "forward", lambda *given, **more: stock(*given, **more) + 0)
    with lost, pytest.raises(UnsupportedError, match=r"something else.*set ulysses.with_projections: off"):
        loss_and_gradients(model, TOKENS)


def in_context_parallel_groups(_: int, check: str) -> None:
    with sharing_sequences(RANKS):
        globals()[check](RANKS)


CHECKS = ("check_what_keeps_it_alone", "check_hooks_that_wait_for_parameters_run", "check_what_gets_lost_is_an_error")
test_self_attention = make_cpu_test(
    RANKS, {name: (0, __name__, in_context_parallel_groups.__name__, (name,)) for name in CHECKS}
)
