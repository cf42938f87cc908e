"""Checks of layers of Transformer Engine that need its classes: what others find on ours, and the CPU's stand-in."""

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from transformer_engine import pytorch as te_pytorch

from commfuse_megatron.plugin.spec import block_spec, local_layer_spec
from commfuse_megatron.testing.gpt import build_gpt, loss_of, transformer_config
from tests.integrations import transformer_engine_on_cpu as te_on_cpu
from tests.integrations.adapters import GPTS, TOLERANCE
from tests.megatron.layers import assert_ours_pass_for, config, make_linear
from tests.megatron.models import perturb

KINDS = {
    te.TEColumnParallelLinear: "column",
    te.TELayerNormColumnParallelLinear: "column",
    te.TERowParallelLinear: "row",
}
KNOWN = (*KINDS, te.TELinear, te_pytorch.Linear, te_pytorch.LayerNormLinear, ColumnParallelLinear, RowParallelLinear)

#: Norm and linear in one module -> the two that local layers have.
LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def check_ours_pass_for_transformer_engines(group_size: int) -> None:
    for stock, kind in KINDS.items():
        for skip_bias_add in (False, True):
            for normalization in ("RMSNorm", "LayerNorm"):
                transformer = config(
                    group_size,
                    normalization=normalization,
                    layernorm_epsilon=3e-3,
                    layernorm_zero_centered_gamma=skip_bias_add,
                )
                make = make_linear(kind, transformer, is_expert=False, skip_bias_add=skip_bias_add)
                with te_on_cpu.can_be_built():
                    assert_ours_pass_for(stock, make, KNOWN, by_spec=True)


def check_what_is_written_out_computes_as_local_layers_do(group_size: int) -> None:
    """The stand-in is what adapters are compared on; here it is compared, with the norm apart and nothing of ours."""
    for gpt in GPTS:
        with te_on_cpu.can_be_built():
            transformer = transformer_config(gpt, group_size)
            fused = build_gpt(gpt, transformer, overlap=False, spec=te_on_cpu.gpt_spec(transformer))
        perturb(fused)
        transformer = transformer_config(gpt, group_size)
        spec = block_spec(local_layer_spec(), transformer, with_torch_norm=True)
        local = build_gpt(gpt, transformer, overlap=False, spec=spec, seed=99)
        local.load_state_dict({_local_name(name): value for name, value in fused.state_dict().items()}, strict=False)
        tokens = torch.randint(gpt.vocab_size, (2, 33), generator=torch.Generator().manual_seed(5))
        expected = _trained(local, tokens)
        with te_on_cpu.computes():
            found = {_local_name(name): value for name, value in _trained(fused, tokens).items()}
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            error = ((value - found[name]).abs().max() / value.abs().max()).item()
            assert error <= TOLERANCE, f"{name}: {error:.1e}"


def _local_name(name: str) -> str:
    for fused, local in LOCAL_NAMES.items():
        name = name.replace(fused, local)
    return name


def _trained(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = loss_of(model, tokens)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}
