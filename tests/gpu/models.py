"""GPTs on two GPUs whose ranks share weights or sequences; what a batch gives, and how far that is from an oracle."""

import importlib.util
from contextlib import contextmanager

import pytest
import torch

LENGTH, BATCH = 128, 2

HAS_TRANSFORMER_ENGINE = importlib.util.find_spec("transformer_engine") is not None
NEEDS_TWO_GPUS = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(400)]
NEEDS_TRANSFORMER_ENGINE = [
    *NEEDS_TWO_GPUS,
    pytest.mark.skipif(not HAS_TRANSFORMER_ENGINE, reason="Transformer Engine is not installed"),
]


@contextmanager
def parallel(tensor, **other_sizes):
    """Groups of these sizes; contexts on them are closed at the end."""
    from commfuse_megatron.plugin import reset_contexts
    from commfuse_megatron.testing.gpt import tensor_parallel

    with tensor_parallel(tensor, **other_sizes):
        yield
        torch.cuda.synchronize()
        reset_contexts()


def make_gpt(dtype, *, length=LENGTH, make="SmallGPT"):
    from commfuse_megatron.testing.gpt import SmallGPT

    sizes = {"hidden_size": 512, "ffn_hidden_size": 1024, "max_sequence_length": length, "dtype": dtype}
    return SmallGPT.layer_norm_and_bias(**sizes) if make == "layer_norm_and_bias" else SmallGPT(**sizes)


def build(gpt, tensor, device, *, overlap, is_te=True, **options):
    """Of Transformer Engine's layers, or of local ones."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from commfuse_megatron.plugin.spec import block_spec
    from commfuse_megatron.testing.gpt import build_gpt, transformer_config

    if is_te:
        options = {"transformer_impl": "transformer_engine", "use_cpu_initialization": False, **options}
    config, spec = transformer_config(gpt, tensor, init_method_std=0.05, **options), None
    if is_te:
        layer = get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=config.multi_latent_attention)
        spec = block_spec(layer, config)
    return build_gpt(gpt, config, overlap=overlap, device=device, spec=spec)


def tokens_of(device, step=0, length=LENGTH):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(256, (BATCH, length + 1), generator=generator).to(device)


def gradients_of(model):
    """By name, final over the ranks once `Training.backward` has returned."""
    return {name: p.main_grad.float().clone() for name, p in model.named_parameters()}


def without_extra_state(model):
    return {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}


def errors(oracle, found):
    """By name, of the largest element."""
    assert oracle.keys() == found.keys()
    return {name: ((g - found[name]).abs().max() / g.abs().max()).item() for name, g in oracle.items()}
