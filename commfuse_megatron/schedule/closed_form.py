"""The shortest time in which equal chunks can be sent and multiplied: a closed form, without any schedule."""

from commfuse_megatron.errors import ScheduleError


def closed_form_us(compute_us: float, transfer_us: float, group_size: int, chunks_per_shard: int = 1) -> float:
    """Return the time of an overlapped all-gather or reduce-scatter whose chunks all cost the same.

    max(T_c, T_m + T_c / (m N)): one chunk's computation cannot be overlapped, after the last arrival (all-gather) or
    before the first departure (reduce-scatter); all communication is hidden iff T_m <= T_c (1 - 1 / (m N)).

    Args:
        compute_us: T_c, the whole local GEMM, that is all group_size * chunks_per_shard chunks.
        transfer_us: T_m, all (group_size - 1) * chunks_per_shard transfers of one rank; ignored in a group of one.
    """
    if group_size < 1 or chunks_per_shard < 1 or compute_us < 0 or transfer_us < 0:
        raise ScheduleError(
            f"no lower bound for compute_us={compute_us}, transfer_us={transfer_us}, group_size={group_size}, "
            f"chunks_per_shard={chunks_per_shard}: sizes must be at least 1, times at least 0."
        )
    if group_size == 1:
        return compute_us
    return max(compute_us, transfer_us + compute_us / (group_size * chunks_per_shard))
