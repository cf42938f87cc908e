"""Which `OverlapContext` serves which tensor-parallel group: made once per group and configuration, shared by layers.

Owns the only module-level object of the package. Making a context is collective over its group, so whether one exists
must not depend on garbage collection, which differs between ranks: a context lives as long as its group. It is closed
when the group is gone, at the latest when the next context is made: torch.distributed destroyed the group, or it was in
Megatron's `parallel_state` and is there no more.
"""

import logging
import weakref
from dataclasses import dataclass

import torch.distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.plugin import compat

__all__ = ["close_contexts", "context_for", "existing_context", "open_contexts"]


logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Entry:
    context: OverlapContext
    was_registered: bool
    was_megatrons: bool


_CONTEXTS: "weakref.WeakKeyDictionary[dist.ProcessGroup, dict[OverlapConfig, _Entry]]" = weakref.WeakKeyDictionary()


def context_for(group: dist.ProcessGroup, config: OverlapConfig) -> OverlapContext:
    """The context of `group` under `config`; on first use it is made, collectively over the group."""
    entries = _CONTEXTS.get(group)
    if entries is None or config not in entries:
        _close_stale_contexts()
        context = OverlapContext(group, config)
        entry = _Entry(context, _is_registered(group), group in compat.megatron_groups())
        entries = _CONTEXTS.setdefault(group, {})
        entries[config] = entry
    return entries[config].context


def existing_context(group: dist.ProcessGroup, config: OverlapConfig) -> OverlapContext | None:
    """The same, if it is made; makes none."""
    entry = _CONTEXTS.get(group, {}).get(config)
    return None if entry is None else entry.context


def open_contexts() -> list[OverlapContext]:
    """All contexts that layers may be using, oldest first."""
    return [entry.context for entries in list(_CONTEXTS.values()) for entry in entries.values()]


def close_contexts() -> None:
    """Close all contexts now; layers that are called again make new ones. Every rank must do so at the same point.

    Raises the first error of closing them, when all are closed; contexts that had failed before raise none.
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
            if was_usable:  # else whoever used it has been told why
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
