"""For tests of schedules: which ones to try."""

from hypothesis import strategies as st

from commfuse_megatron.schedule import Algorithm, Schedule, build_all_gather, build_reduce_scatter


def build(collective: str, algorithm: str, group_size: int, chunks_per_shard: int = 1) -> Schedule:
    builder = {"all_gather": build_all_gather, "reduce_scatter": build_reduce_scatter}[collective]
    return builder(group_size, Algorithm(algorithm), chunks_per_shard)


@st.composite
def schedules(draw: st.DrawFn, max_group_size: int = 16, max_chunks: int = 4, min_group_size: int = 1) -> Schedule:
    """Any schedule that can be built: both collectives and algorithms."""
    return build(
        draw(st.sampled_from(["all_gather", "reduce_scatter"])),
        draw(st.sampled_from(["ring", "direct"])),
        draw(st.integers(min_group_size, max_group_size)),
        draw(st.integers(1, max_chunks)),
    )
