"""Which `OverlapContext` serves which tensor-parallel group: made once per group and configuration, shared by layers.

Owns the only module-level object of the package. Making a context is collective over its group, so whether one exists
must not depend on garbage collection, which differs between ranks: a context lives as long as its group. It is closed
when the group is gone, at the latest when the next context is made: torch.distributed destroyed the group, or it was in
Megatron's `parallel_state` and is there no more. One that has failed is renewed where all ranks are known to be in
step; else every use raises, and says that `reset_contexts` is the way out.
"""

import logging
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.plugin import compat

logger = logging.getLogger(__name__)

_ADVICE = (
    "To go on, all ranks call commfuse_megatron.plugin.reset_contexts() at the same point and begin with a forward "
    "pass."
)


@dataclass(slots=True)
class _Entry:
    context: OverlapContext
    was_registered: bool
    was_megatrons: bool


_CONTEXTS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[OverlapConfig, _Entry]]" = weakref.WeakKeyDictionary()


def context_for(group: dist.ProcessGroup, config: OverlapConfig) -> OverlapContext:
    """The context of `group` under `config`; on first use it is made, collectively over the group.

    Raises what made it fail, with what to do, if it has failed and cannot be renewed (`OverlapContext.renew`).
    """
    entries = _CONTEXTS.get(group)
    if entries is None or config not in entries:
        _close_stale_contexts()
        context = OverlapContext(group, config)
        context.link.advice = _ADVICE
        entry = _Entry(context, _is_registered(group), group in compat.megatron_groups())
        entries = _CONTEXTS.setdefault(group, {})
        entries[config] = entry
    entry = entries[config]
    if not entry.context.is_usable:
        entry.context = entry.context.renew()
    return entry.context


def existing_context(group: dist.ProcessGroup, config: OverlapConfig) -> OverlapContext | None:
    """The same, if it is made; makes none."""
    entry = _CONTEXTS.get(group, {}).get(config)
    return None if entry is None else entry.context


def open_contexts() -> list[OverlapContext]:
    """All contexts that layers may be using, oldest first."""
    return [entry.context for entries in list(_CONTEXTS.values()) for entry in entries.values()]


def reset_contexts() -> None:
    """Close all contexts of Megatron's layers, failed or not; layers that are called again make new ones.

    The way out after an exception in a layer's call (out of memory, Ctrl-C, a peer that did not come), and what comes
    before `destroy_process_group`; a process that just ends releases them by itself. Every rank must call it at the
    same point; it waits for transfers in flight, but sends nothing. What was computed before has no backward pass
    afterwards, so begin with a forward pass:

        try:
            loss = train_step(batch)
        except (torch.OutOfMemoryError, CommFuseError):  # the latter where it was another rank that had no memory
            failed.fill_(1)
        dist.all_reduce(failed)
        if failed.item():  # the same on all ranks
            reset_contexts()
            optimizer.zero_grad()
            batch = smaller(batch)  # and once more

    Where the same kind of exception ends the same call on all ranks, layers go on without it. Graphs that were captured
    with the old contexts are of no use any more.

    Raises the first error of closing them, when all are closed; contexts that failed before, here or on another rank,
    raise none.
    """
    _close(*_CONTEXTS.keys())


def _close_stale_contexts() -> None:
    known = compat.megatron_groups()
    for group, entries in list(_CONTEXTS.items()):
        entry = next(iter(entries.values()))
        if (entry.was_registered and not _is_registered(group)) or (entry.was_megatrons and group not in known):
            _close(group)


def _close(*groups: dist.ProcessGroup) -> None:
    errors: list[Exception] = []
    for context in [entry.context for group in groups for entry in _CONTEXTS.pop(group, {}).values()]:
        was_usable = context.is_usable
        try:
            context.close()
        except Exception as error:
            if was_usable and not context.link.is_left_by_peer:  # else whoever used it has been told why
                errors.append(error)
    for other in errors[1:]:
        logger.error("another context could not be closed: %s", other)
    if errors:
        raise errors[0]


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed knows `group`."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):  # destroyed alone; or with everything else
        return False
    return True
