"""Ranks compare what they are about to do, through the group's store, before anything is sent.

A mismatch raises the same ShapeError on every rank instead of hanging the group or corrupting a result. Costs a host
round trip, so it runs when a problem is new and, if asked for, at every call.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import NamedTuple

from torch import distributed as dist

from commfuse_megatron.errors import ShapeError, TransportError, TransportTimeoutError

# Ranks that are at different things must not take each other's words for answers: what a rank posts says what it is,
# and of which call or question.
_STATEMENT, _ANSWER, _ERROR, _LATE, _LEFT = "statement", "answer", "error", "too late", "left"
_SEPARATOR = "\x1f"

# How long a rank that has failed already asks the store, which another thread may be waiting at.
_PATIENCE_S = 2.0
_POLL_S = 0.01


class _Post(NamedTuple):
    kind: str
    topic: str
    text: str

    def __str__(self) -> str:
        if self.kind == _STATEMENT:
            return self.text
        return f"{self.kind if self.kind == _ERROR else self.topic}: {self.text}"


class Agreement:
    """Numbered rounds of comparison among the ranks of one group; every rank must take part in every round.

    topic, everywhere: which call or question this is, as far as the program's place can be told by it.

    is_in_step: whether the latest round is known to have been of the same thing on all ranks: each brought the same, or
    said that it cannot go on with it. Where ranks state different things, one may be a call ahead of another.
    """

    def __init__(self, store: dist.Store, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.is_in_step = True
        self._store, self._timeout_s = store, timeout_s
        self.group_rank: int = group.rank()
        self.group_size: int = group.size()
        self._round = 0
        self._posted_round = -1

    def agree(self, statement: str, *, topic: str, is_place: bool = False) -> None:
        """Return if all ranks bring the same `statement`; else raise ShapeError on all of them.

        is_place: no other call has this topic, so ranks that share it are in step whatever they state.
        Raises TransportTimeoutError when a rank says nothing in time, this one included, TransportError when a rank has
        left or the store is gone: no further round may follow, since nobody knows which call the others are at.
        """
        found = self._round_of(_Post(_STATEMENT, topic, statement), statement)
        is_one_topic = len({post.topic for post in found}) == 1
        is_stated = is_one_topic and all(post.kind != _ANSWER for post in found)
        going_on = {post for post in found if post.kind != _ERROR}
        self.is_in_step = is_stated and (is_place or len(going_on) <= 1)
        if len(set(found)) > 1:
            raise ShapeError(f"the ranks of the group do not agree on the next operation:\n{_list_posts(found)}")

    def exchange(self, text: str, *, topic: str) -> list[str]:
        """What every rank brings, by rank; raises like `agree`, ShapeError where a rank refused or asks otherwise."""
        found = self._round_of(_Post(_ANSWER, topic, text), topic)
        self.is_in_step = all(post.topic == topic and post.kind != _STATEMENT for post in found)
        if not all(post.topic == topic and post.kind == _ANSWER for post in found):
            raise ShapeError(f"a rank of the group cannot go on:\n{_list_posts(found)}")
        return [post.text for post in found]

    def refuse(self, error: Exception, *, topic: str, wait: bool) -> None:
        """Tell the other ranks that this one cannot go on because of `error`, then raise it here.

        wait: the other ranks are known to take part in this round, so keep the rounds in step. Without it, nobody knows
        which call they are at afterwards: there must be no further round.
        """
        self.is_in_step = False
        post = _Post(_ERROR, topic, f"{error}")
        if wait:
            try:
                found = self._round_of(post, f"{error}")
            except (TransportError, TransportTimeoutError) as late:  # this rank's own cause comes first
                error.add_note(f"{late}")
                raise error from late
            statements = {post for post in found if post.kind == _STATEMENT}
            self.is_in_step = len(statements) <= 1 and all(post.topic == topic for post in found)
        else:
            self._post(post)
        raise error

    def leave(self, why: str) -> None:
        """Tell the other ranks why this one goes no further, where they wait for it. No further round may follow."""

        def tell() -> None:
            self._store.set(self._reason_key(self.group_rank), why)
            if self._posted_round != self._round:
                self._store.set(self._key(self._round, self.group_rank), _SEPARATOR.join(_Post(_LEFT, "", why)))

        _ask_briefly(tell)

    def reasons_of_leaving(self, wait_s: float = 0.0) -> dict[int, str]:
        """Why other ranks have left, by rank; empty if none has within `wait_s`, or nobody can be asked."""
        found: dict[int, str] = {}
        deadline = time.monotonic() + wait_s

        def ask() -> None:
            while True:
                for rank in range(self.group_size):
                    key = self._reason_key(rank)
                    if rank != self.group_rank and self._store.check([key]):
                        found[rank] = self._store.get(key).decode()
                if found or time.monotonic() >= deadline:
                    return
                time.sleep(_POLL_S)

        _ask_briefly(ask)
        return dict(found)

    def _round_of(self, post: _Post, what: str) -> list[_Post]:
        """What every rank posts in this round, by rank."""
        self.is_in_step = False
        self._post(post)
        found = self._collect(what)
        self._require_awaited(found, what)
        return found

    def _post(self, post: _Post) -> None:
        self._posted_round = self._round
        try:
            self._store.set(self._key(self._round, self.group_rank), _SEPARATOR.join(post))
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _collect(self, statement: str) -> list[_Post]:
        keys = [self._key(self._round, rank) for rank in range(self.group_size)]
        try:
            self._store.wait(keys, timedelta(seconds=self._timeout_s))
        except RuntimeError as error:  # DistStoreError and, with some stores, a plain RuntimeError
            raise self._missing(keys, statement) from error
        try:
            found = [_Post(*self._store.get(key).decode().split(_SEPARATOR, 2)) for key in keys]
            # All ranks have entered this round, so all have read the one before: nobody needs its key any more.
            if self._round > 0:
                self._store.delete_key(self._key(self._round - 1, self.group_rank))
        except RuntimeError as error:
            raise self._unreachable(error) from error
        self._round += 1
        return found

    def _missing(self, keys: list[str], statement: str) -> Exception:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError as error:
            return self._unreachable(error)
        complaint = f"group rank {self.group_rank} waited {self._timeout_s} s for group ranks {missing}"
        # Who comes late must not take this rank's word for being there still.
        self._post(_Post(_LATE, "", complaint))
        return TransportTimeoutError(
            f"{statement}: {complaint} to announce the same operation. Either they died, or they are doing something "
            "else."
        )

    def _require_awaited(self, found: list[_Post], what: str) -> None:
        """Raise TransportTimeoutError where the others no longer waited for this rank, TransportError if one left."""
        late = [f"  {post.text}" for post in found if post.kind == _LATE]
        if late:
            raise TransportTimeoutError(
                "\n".join([f"{what}: group rank {self.group_rank} came too late, the others have given up:", *late])
            )
        left = [f"  group rank {rank}: {post.text}" for rank, post in enumerate(found) if post.kind == _LEFT]
        if left:
            raise TransportError("\n".join(["a rank of the group goes no further:", *left]))

    def _unreachable(self, error: Exception) -> TransportError:
        return TransportError(
            f"group rank {self.group_rank} cannot reach the group's store: its host, mostly global rank 0, has ended "
            f"({error})"
        )

    @staticmethod
    def _key(round_number: int, rank: int) -> str:
        return f"agreement/{round_number}/{rank}"

    @staticmethod
    def _reason_key(rank: int) -> str:
        return f"left/{rank}"


def _list_posts(found: list[_Post]) -> str:
    return "\n".join(f"  group rank {rank}: {post}" for rank, post in enumerate(found))


def _ask_briefly(ask: Callable[[], None]) -> None:
    """Run `ask`, for some seconds at most: a thread that waits at the store keeps others from it."""

    def run() -> None:
        with suppress(RuntimeError):  # the store is gone, and with it who would look
            ask()

    with suppress(RuntimeError):  # the interpreter ends, and starts no thread any more
        thread = threading.Thread(target=run, name="commfuse-store", daemon=True)
        thread.start()
        thread.join(_PATIENCE_S)
