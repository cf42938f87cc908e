"""Megatron-Core with overlapped tensor-parallel linears: modules, specs, conversion, flags, report.

The only part of the package that layers above may use to reach Megatron; see `linear` for what is overlapped and
`support` for what is not.
"""

from commfuse_megatron.plugin.arguments import add_arguments
from commfuse_megatron.plugin.attention import (
    CommFuseFusedMLASelfAttention,
    CommFuseMLASelfAttention,
    CommFuseSelfAttention,
)
from commfuse_megatron.plugin.contexts import reset_contexts
from commfuse_megatron.plugin.convert import convert_model
from commfuse_megatron.plugin.embedding import CommFuseVocabParallelEmbedding
from commfuse_megatron.plugin.linear import CommFuseColumnParallelLinear, CommFuseRowParallelLinear
from commfuse_megatron.plugin.norm import CommFuseNorm
from commfuse_megatron.plugin.norm_linear import CommFuseLayerNormColumnParallelLinear
from commfuse_megatron.plugin.report import model_report
from commfuse_megatron.plugin.spec import CommFuseSpecProvider, apply_to_spec
from commfuse_megatron.plugin.support import unsupported_reason
from commfuse_megatron.plugin.te_linear import (
    CommFuseTEColumnParallelLinear,
    CommFuseTELayerNormColumnParallelLinear,
    CommFuseTERowParallelLinear,
)
from commfuse_megatron.plugin.ulysses import CommFuseDotProductAttention, CommFuseTEDotProductAttention

__all__ = [
    "CommFuseColumnParallelLinear",
    "CommFuseDotProductAttention",
    "CommFuseFusedMLASelfAttention",
    "CommFuseLayerNormColumnParallelLinear",
    "CommFuseMLASelfAttention",
    "CommFuseNorm",
    "CommFuseRowParallelLinear",
    "CommFuseSelfAttention",
    "CommFuseSpecProvider",
    "CommFuseTEColumnParallelLinear",
    "CommFuseTEDotProductAttention",
    "CommFuseTELayerNormColumnParallelLinear",
    "CommFuseTERowParallelLinear",
    "CommFuseVocabParallelEmbedding",
    "add_arguments",
    "apply_to_spec",
    "convert_model",
    "model_report",
    "reset_contexts",
    "unsupported_reason",
]
