"""What the schedule builders share: argument checks and the number of slots.

Knows nothing of any one collective. The contract that bites: slots are used round robin, transfer k in slot
k % num_slots, so a builder states the smallest number for which no slot is overwritten while readable.
"""

from commfuse_megatron.errors import ScheduleError
from commfuse_megatron.schedule.actions import Algorithm

__all__ = ["check_sizes", "count_slots"]


def check_sizes(group_size: int, algorithm: Algorithm, chunks_per_shard: int) -> Algorithm:
    """Return `algorithm` as an `Algorithm`, or raise ScheduleError when a size or the name is impossible."""
    if group_size < 1 or chunks_per_shard < 1:
        raise ScheduleError(
            f"a schedule for group_size={group_size}, chunks_per_shard={chunks_per_shard} was asked for: "
            "both must be at least 1."
        )
    try:
        return Algorithm(algorithm)
    except ValueError:
        known = ", ".join(f'"{name}"' for name in Algorithm)
        raise ScheduleError(f'unknown algorithm "{algorithm}": this build has {known}.') from None


def count_slots(name: str, num_slots: int | None, num_transfers: int, *, least: int, reason: str) -> int:
    """Return the slots that a schedule uses for `num_transfers` transfers per rank, at most one for each.

    Args:
        name: the argument that `num_slots` came from, for the message.
        num_slots: what was asked for; None means one slot per transfer, never reused.
        least: smallest number of round-robin slots that is correct when there are more transfers than slots.
        reason: why it is not smaller, as the end of a sentence.

    Raises:
        ScheduleError: fewer slots asked for than are correct.
    """
    if num_slots is None:
        return num_transfers
    least = min(least, num_transfers)
    if num_slots < least:
        raise ScheduleError(
            f"{name}={num_slots} was asked for, but {num_transfers} transfers per rank need {least} or more: {reason}. "
            f"Ask for at least {least}, or for None (no reuse)."
        )
    return min(num_slots, num_transfers)
