"""Checks of layers of Transformer Engine that need its classes: what others find on ours, and the CPU's stand-in."""

from megatron.core.extensions import transformer_engine as te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from transformer_engine import pytorch as te_pytorch

from commfuse_megatron.testing.gpt import build_gpt, transformer_config
from commfuse_megatron.testing.models import name_with_separate_norm
from tests.integrations import transformer_engine_on_cpu as te_on_cpu
from tests.integrations.adapters import GPTS, TOLERANCE, local_spec
from tests.megatron.layers import assert_equal, assert_ours_pass_for, config, make_linear
from tests.megatron.models import draw_tokens, loss_and_gradients, perturb

KINDS = {
    te.TEColumnParallelLinear: "column",
    te.TELayerNormColumnParallelLinear: "column",
    te.TERowParallelLinear: "row",
}
KNOWN = (*KINDS, te.TELinear, te_pytorch.Linear, te_pytorch.LayerNormLinear, ColumnParallelLinear, RowParallelLinear)


def check_ours_pass_for_transformer_engines(group_size: int) -> None:
    for stock, kind in KINDS.items():
        for skip_bias_add in (False, True):
            for normalization in ("RMSNorm", "LayerNorm"):
                options = {"normalization": normalization, "layernorm_zero_centered_gamma": skip_bias_add}
                transformer = config(group_size, layernorm_epsilon=3e-3, **options)
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
        local = build_gpt(gpt, transformer, overlap=False, spec=local_spec(transformer), seed=99)
        local.load_state_dict(
            {name_with_separate_norm(name): value for name, value in fused.state_dict().items()}, strict=False
        )
        tokens = draw_tokens(2, 32, seed=5)
        expected = loss_and_gradients(local, tokens, with_mask=True)
        with te_on_cpu.computes():
            found = loss_and_gradients(fused, tokens, with_mask=True)
        assert_equal(expected, {name_with_separate_norm(name): value for name, value in found.items()}, TOLERANCE)
