"""The plugin's contexts: all are closed, whatever closing one of them raises."""

from types import SimpleNamespace

import pytest

from commfuse_megatron.errors import TransportError, TransportTimeoutError
from commfuse_megatron.plugin import contexts


class Group:
    """Something that can be referred to weakly."""


def test_all_contexts_are_closed_though_one_cannot_be(monkeypatch):
    closed = []

    def entry(name, error=None, *, is_usable=True, is_left=False):
        def close():
            closed.append(name)
            if error is not None:
                raise error

        return contexts._Entry(
            SimpleNamespace(is_usable=is_usable, close=close, link=SimpleNamespace(is_left_by_peer=is_left)),
            False,
            False,
        )

    groups = Group(), Group()
    late, failed = TransportTimeoutError("a rank did not come"), TransportError("failed before")
    known = {
        groups[0]: {1: entry("first", late), 2: entry("second")},
        groups[1]: {1: entry("third", failed, is_usable=False), 2: entry("fourth", failed, is_left=True)},
    }
    monkeypatch.setattr(contexts, "_CONTEXTS", known)
    with pytest.raises(TransportTimeoutError, match="did not come"):
        contexts.reset_contexts()
    assert sorted(closed) == ["first", "fourth", "second", "third"]
    contexts.reset_contexts()
    assert len(closed) == 4
