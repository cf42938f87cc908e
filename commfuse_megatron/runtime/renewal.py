"""Where the members of one context meet, and whether they may make another one in its place after it has failed.

They may where all are known to be in step: on each rank the same kind of exception ended the same operation, by its
number and its problem, when the transfers of all operations before were complete. Then the program has come to one
place on all ranks, and nothing but the result of that operation is lost. Everything else is in doubt - another
exception, which another handler may catch; a transfer that broke; a rank that does not come - and stays a failure.
"""

from typing import NamedTuple, Self

from torch import distributed as dist

from commfuse_megatron.errors import CommFuseError, TransportError
from commfuse_megatron.runtime.agreement import Agreement
from commfuse_megatron.runtime.link import Link

# How long a rank waits for the others to come back, whatever the time limit of transfers is. Not measured.
_LONGEST_WAIT_S = 10.0
_TOPIC = "going on with a new context"


class MeetingPlace(NamedTuple):
    """A part of a group's store that only one context uses, and those made in its place: the `renewals`-th here."""

    base: dist.Store
    renewals: int

    @classmethod
    def of_next_context(cls, group: dist.ProcessGroup) -> Self:
        """All members make their n-th context together."""
        store = group.get_group_store()
        ordinal = store.add(f"commfuse/contexts/{group.rank()}", 1)
        return cls(dist.PrefixStore(f"commfuse/context-{ordinal}", store), 0)

    @property
    def store(self) -> dist.Store:
        """For this context alone."""
        return dist.PrefixStore(f"renewal-{self.renewals}", self.base)

    @property
    def successor(self) -> "MeetingPlace":
        """For what is made in this context's place. No counter is moved: who is left alone stays in step with it."""
        return self._replace(renewals=self.renewals + 1)


def reason_not_in_step(
    place: MeetingPlace, group: dist.ProcessGroup, link: Link, begun: str, *, is_captured: bool
) -> str | None:
    """Why a failed context may not be replaced; None where all ranks may. Collective, takes some seconds at most.

    begun: how many operations and which last, in words. is_captured: CUDA graphs use the context; nobody counts their
    replays.
    """
    interruption = link.interruption
    if link.is_disowned:
        return "a forked process has none of its parent's connections"
    if is_captured:
        interruption = None
    store = dist.PrefixStore("renewal", place.store)
    agreement = Agreement(store, group, min(link.timeout_s, _LONGEST_WAIT_S))
    try:
        if interruption is None:
            # Not the failure itself, which is kept: frames of what is raised hold the context.
            agreement.refuse(TransportError(f"{link.failure}"), topic=_TOPIC, wait=False)
        else:
            what, error_type = interruption
            agreement.agree(f"{error_type} in {what}; {begun}", topic=_TOPIC)
    except CommFuseError as error:
        return "The ranks are not known to be in step" + ("." if interruption is None else f": {error}")
    return None
