"""A GPT whose sequences two GPUs share, its exchange ours, against Transformer Engine's own and a model without either.

All get the same weights and the same tokens. The judge is the model without context parallelism in fp32, which each
rank runs on whole sequences.
"""

import importlib.util
from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from tests.harness.checks import make_test

OVERLAP = OverlapConfig.from_dict({"ulysses": {"path": "overlapped"}})
LENGTH, BATCH = 256, 2
LATENT = {
    "multi_latent_attention": True, "num_query_groups": None, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "rope",
}  # fmt: skip

pytestmark = [
    pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None,
     reason="Transformer Engine is not installed"),
]  # fmt: skip


@contextmanager
def _parallel(context):
    from commfuse_megatron.plugin import reset_contexts
    from commfuse_megatron.testing.gpt import tensor_parallel

    with tensor_parallel(1, context_parallel_size=context):
        yield
        torch.cuda.synchronize()
        reset_contexts()


def _model(device, weights, *, dtype=torch.bfloat16, overlap=False, is_local=False, **options):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from commfuse_megatron.plugin.spec import block_spec
    from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
    from commfuse_megatron.testing.models import name_with_separate_norm

    gpt = SmallGPT(hidden_size=512, ffn_hidden_size=1024, max_sequence_length=LENGTH, dtype=dtype)
    implementation = "local" if is_local else "transformer_engine"
    config = transformer_config(
        gpt, 1, transformer_impl=implementation, use_cpu_initialization=False, init_method_std=0.05, **options
    )
    layer = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=config.multi_latent_attention)
    spec = None if is_local else block_spec(layer, config)
    model = build_gpt(gpt, config, overlap=overlap, device=device, spec=spec)
    if weights is not None:
        names = {name: name_with_separate_norm(name) if is_local else name for name in weights}
        found = model.load_state_dict({names[name]: weights[name].to(dtype) for name in weights}, strict=False)
        assert not found.unexpected_keys
        assert all(name.endswith("_extra_state") for name in found.missing_keys)
    return model


def _loss_and_gradients(model, device):
    from commfuse_megatron.testing.models import name_with_separate_norm
    from commfuse_megatron.testing.training import Training

    run = Training(model, with_mask=False)
    tokens = torch.randint(256, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(100)).to(device)
    loss = torch.tensor(run.backward(tokens), device=device)
    dist.all_reduce(loss)
    named = run.wrapped.module.named_parameters()
    return loss.item() / 2, {name_with_separate_norm(name): p.main_grad.float().clone() for name, p in named}


def _errors(oracle, found):
    assert oracle.keys() == found.keys()
    return {name: ((g - found[name]).abs().max() / g.abs().max()).item() for name, g in oracle.items()}


def _compare(_, device, **options):
    from commfuse_megatron.plugin import convert_model, model_report
    from tests.megatron.models import perturb

    with _parallel(1):
        first = _model(device, None, **options)
        perturb(first)
        weights = {name: value for name, value in first.state_dict().items() if not name.endswith("_extra_state")}
        oracle_loss, oracle = _loss_and_gradients(_model(device, weights, dtype=torch.float32, **options), device)
    shared = {"context_parallel_size": 2, "cp_comm_type": "a2a", **options}
    with _parallel(2):
        stock_loss, stock = _loss_and_gradients(_model(device, weights, **shared), device)
        stock_errors = _errors(oracle, stock)
        models = {
            "by spec": _model(device, weights, overlap=OVERLAP, **shared),
            "converted": convert_model(_model(device, weights, **shared), OVERLAP),
        }
        if not options:  # fused and separate norms of latent attention have other names
            models["local"] = _model(device, weights, overlap=OVERLAP, is_local=True, **shared)
        for kind, model in models.items():
            loss, gradients = _loss_and_gradients(model, device)
            assert abs(loss - oracle_loss) <= 2 * abs(stock_loss - oracle_loss) + 2e-2, kind
            # In bf16 ours may be twice as far from the fp32 model as stock is, and one unit (3.9e-3) more.
            for name, error in _errors(oracle, gradients).items():
                assert error <= 2 * stock_errors[name] + 2**-8, f"{kind}, {name}: {error:.1e}"
            layers = [each for each in model_report(model).layers if each.name.endswith("core_attention")]
            assert [(each.path, each.overlapped_calls, each.reasons) for each in layers] == [("overlapped", 1, ())] * 2


CHECKS = {"grouped queries": {}, "latent attention": LATENT}


@contextmanager
def _enter(group, device):
    yield lambda name: _compare(group, device, **CHECKS[name])


test_context_parallel_models = make_test(2, _enter, CHECKS, backend="nccl")
