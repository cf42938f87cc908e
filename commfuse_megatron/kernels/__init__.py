"""GEMMs that live beside communication, and the sum that ends a reduce-scatter.

Knows tensors and streams; must not know process groups, schedules or transports. Importing it loads neither Triton nor
CUDA.
"""

from commfuse_megatron.kernels.persistent_matmul import TileShare, persistent_matmul
from commfuse_megatron.kernels.sum_partials import sum_partials
from commfuse_megatron.kernels.support import persistent_matmul_unavailable_reason

__all__ = ["TileShare", "persistent_matmul", "persistent_matmul_unavailable_reason", "sum_partials"]
