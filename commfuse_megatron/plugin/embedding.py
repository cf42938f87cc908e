"""Megatron's embedding with the reduce-scatter of its output hidden under the look-ups.

Specs do not reach it, since Megatron names its class in the models; `convert_model` re-classes it. So no constructor
state may be relied upon.
"""

import torch

from commfuse_megatron import ops
from commfuse_megatron.ops.problems import embedding_problems
from commfuse_megatron.plugin.compat import VocabParallelEmbedding
from commfuse_megatron.plugin.decision import computing_weight_once, count_call, overlap_context
from commfuse_megatron.plugin.stand_in import stands_for


@stands_for(VocabParallelEmbedding)
class CommFuseVocabParallelEmbedding(VocabParallelEmbedding):
    """`VocabParallelEmbedding` under sequence parallelism: the rows of one owner travel while the next are looked up.

    ids [B, S] -> y [S/R, B, H]. Backward: all-gather of dy, then the weight's gradient, as in Megatron; nothing is left
    there to hide under. Without sequence parallelism, or with learned positions, the embedding all-reduces: stock.
    """

    @torch.compiler.disable  # what is decided and counted per call is Python, not a graph
    @computing_weight_once
    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """The vectors of this rank's rows of the sequence."""
        weight = self.weight
        context = overlap_context(self, input_, weight, lambda context: embedding_problems(input_, weight, context))
        if context is None:
            return super().forward(input_)
        output = ops.embedding_reduce_scatter(
            input_, weight, self.vocab_start_index, context=context, is_deterministic=bool(self.deterministic_mode)
        )
        count_call(self, context)
        return output
