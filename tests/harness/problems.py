"""Problems as models pose them, for tests of the planner."""

from commfuse_megatron.problem import GemmProblem

# (op, N, K) of the whole layer; the parallel feature is divided by the ranks.
LAYERS = {
    "8b.qkv": ("all_gather_linear", 6144, 4096), "8b.proj": ("linear_reduce_scatter", 4096, 4096),
    "70b.qkv": ("all_gather_linear", 10240, 8192), "70b.fc1": ("all_gather_linear", 57344, 8192),
    "70b.proj": ("linear_reduce_scatter", 8192, 8192), "70b.fc2": ("linear_reduce_scatter", 8192, 28672),
}  # fmt: skip


def layer_problem(layer: str, tokens: int, group_size: int = 2, needs: str = "", dtype: str = "bfloat16"):
    """One pass of a layer: forward, or backward if `needs` says which gradients are due."""
    op, N, K = LAYERS[layer]
    gathers = op == "all_gather_linear"
    return GemmProblem(
        op=op,
        pass_name="backward" if needs else "fprop",
        rows=tokens,
        batch=1,
        N=N // group_size if gathers else N,
        K=K if gathers else K // group_size,
        dtype=dtype,
        group_size=group_size,
        needs=needs,
    )
