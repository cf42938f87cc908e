"""Differentiable operations on plain tensors and a process group; usable without Megatron."""

from commfuse_megatron.ops import reference
from commfuse_megatron.ops.all_gather_linear import all_gather_linear
from commfuse_megatron.ops.embedding_reduce_scatter import embedding_reduce_scatter
from commfuse_megatron.ops.linear_all_reduce import linear_all_reduce, linear_grad_all_reduce
from commfuse_megatron.ops.linear_reduce_scatter import linear_reduce_scatter
from commfuse_megatron.ops.query_split_attention import query_split_attention
from commfuse_megatron.ops.ulysses_attention import ulysses_attention
from commfuse_megatron.ops.ulysses_block import ProjectedHeads, ulysses_block
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGradQueue, WeightGradTarget

__all__ = [
    "DeferredWeightGrad",
    "ProjectedHeads",
    "WeightGradQueue",
    "WeightGradTarget",
    "all_gather_linear",
    "embedding_reduce_scatter",
    "linear_all_reduce",
    "linear_grad_all_reduce",
    "linear_reduce_scatter",
    "query_split_attention",
    "reference",
    "ulysses_attention",
    "ulysses_block",
]
