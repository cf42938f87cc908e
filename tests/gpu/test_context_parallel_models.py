"""A GPT whose sequences two GPUs share, its exchange ours, against Transformer Engine's own and a model without either.

All get the same weights and the same tokens. The judge is the model without context parallelism in fp32, which each
rank runs on whole sequences.
"""

import re
from contextlib import contextmanager

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from tests.gpu import models
from tests.gpu.models import errors, gradients_of, parallel
from tests.harness.checks import make_test

OVERLAP = OverlapConfig.from_dict({"ulysses": {"path": "overlapped", "head_groups": 2, "with_projections": "on"}})
TIMED = OverlapConfig.from_dict({"plan": {"measure": "always"}})
ALONE = OverlapConfig.from_dict({"ulysses": {"path": "overlapped"}})
LENGTH = 256
LATENT = {
    "multi_latent_attention": True, "num_query_groups": None, "q_lora_rank": 128, "kv_lora_rank": 128,
    "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "rope_type": "rope",
}  # fmt: skip

pytestmark = models.NEEDS_TRANSFORMER_ENGINE


def _model(device, weights, *, dtype=torch.bfloat16, overlap=False, is_local=False, **options):
    from commfuse_megatron.testing.models import name_with_separate_norm

    options = {"use_cpu_initialization": False, **options}
    gpt = models.make_gpt(dtype, length=LENGTH)
    model = models.build(gpt, 1, device, overlap=overlap, is_te=not is_local, **options)
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
    loss = torch.tensor(run.backward(models.tokens_of(device, length=LENGTH)), device=device)
    dist.all_reduce(loss)
    gradients = gradients_of(run.wrapped.module)
    return loss.item() / 2, {name_with_separate_norm(name): gradient for name, gradient in gradients.items()}


def _compare(_, device, **options):
    from commfuse_megatron.plugin import convert_model, model_report
    from tests.megatron.models import perturb

    with parallel(1):
        first = _model(device, None, **options)
        perturb(first)
        weights = models.without_extra_state(first)
        oracle_loss, oracle = _loss_and_gradients(_model(device, weights, dtype=torch.float32, **options), device)
    shared = {"context_parallel_size": 2, "cp_comm_type": "a2a", **options}
    with parallel(1, context_parallel_size=2):
        stock_loss, stock = _loss_and_gradients(_model(device, weights, **shared), device)
        stock_errors = errors(oracle, stock)
        ours = {
            "by spec": _model(device, weights, overlap=OVERLAP, **shared),
            "converted": convert_model(_model(device, weights, **shared), OVERLAP),
        }
        ours["auto"] = _model(device, weights, overlap=TIMED, **shared)
        if not options:  # fused and separate norms of latent attention have other names
            ours["core attention alone"] = _model(device, weights, overlap=ALONE, **shared)
            ours["local"] = _model(device, weights, overlap=OVERLAP, is_local=True, **shared)
        for kind, model in ours.items():
            loss, gradients = _loss_and_gradients(model, device)
            assert abs(loss - oracle_loss) <= 2 * abs(stock_loss - oracle_loss) + 2e-2, kind
            # In bf16 ours may be twice as far from the fp32 model as stock is, and one unit (3.9e-3) more.
            for name, error in errors(oracle, gradients).items():
                assert error <= 2 * stock_errors[name] + 2**-8, f"{kind}, {name}: {error:.1e}"
            layers = [each for each in model_report(model).layers if each.name.endswith("core_attention")]
            found = [(each.path, each.overlapped_calls, each.reasons) for each in layers]
            if kind == "auto" and layers[0].path != "overlapped":  # as was timed, of both layers and on all ranks
                assert found == [found[0]] * 2
                (reason,) = layers[0].reasons or layers[0].sequential_reasons
                assert "measured: " in reason
                assert re.search(r"(stock \d+\.\d+.*overlapped m=|sequential \d+\.\d+.*stock )", reason), reason
                everyone = [None, None]
                dist.all_gather_object(everyone, reason)
                assert everyone[0] == everyone[1]
            else:
                assert found == [("overlapped", 1, ())] * 2, kind
            qkv = [each.path for each in model_report(model).layers if each.name.endswith("linear_qkv")]
            is_alone = kind == "core attention alone" or layers[0].path != "overlapped"
            # Of latent attention there is none.
            assert qkv == ([] if options else ["stock" if is_alone else "overlapped"] * 2), f"{kind}: {layers}"


CHECKS = {"grouped queries": {}, "latent attention": LATENT}


@contextmanager
def _enter(group, device):
    yield lambda name: _compare(group, device, **CHECKS[name])


test_context_parallel_models = make_test(2, _enter, CHECKS, backend="nccl")
