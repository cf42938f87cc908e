"""Ends the process at its exit though a stream waits for a rank that never comes.

A wait in a stream is invisible to CUDA, and so to the libraries that wait for the device while they are torn down:
NCCL's communicators, say. A program that raised on one rank would hang in its exit, and whoever started it would never
learn of the error. Letting the stream go is no way out, since what is behind the wait would write into the memory of
ranks that go on. So the process is given some time to end by itself; then it is killed, and nothing more is sent.
"""

import atexit
import logging
import math
import signal
import sys
import threading
from typing import Protocol

__all__ = ["forget_at_exit", "look_at_exit"]

logger = logging.getLogger(__name__)

# After an error the launcher is to know soon, but others' exit handlers may still have something to save.
_AFTER_AN_ERROR_S = 30.0
_LONGEST_S = 1_000_000


class _Link(Protocol):
    timeout_s: float

    @property
    def is_idle(self) -> bool: ...


_lock = threading.Lock()
_open: list[_Link] = []
_left: list[_Link] = []


def look_at_exit(link: _Link) -> None:
    """Remember a link whose transfers may be in flight when the process ends."""
    with _lock:
        _forget_idle_ones()
        _open.append(link)


def forget_at_exit(link: _Link) -> None:
    """Nothing is started on the link any more: it is forgotten once nothing is in flight."""
    with _lock:
        _open.remove(link)
        _left.append(link)
        _forget_idle_ones()


def _forget_idle_ones() -> None:
    _left[:] = [link for link in _left if not link.is_idle]


def _limit_the_exit() -> None:
    waiting = [link for link in (*_open, *_left) if not link.is_idle]
    if not waiting:
        return
    limit_s = max(link.timeout_s for link in waiting)
    if getattr(sys, "last_exc", None) is not None:  # what ended the program
        limit_s = min(limit_s, _AFTER_AN_ERROR_S)
    limit_s = math.ceil(min(limit_s, _LONGEST_S))
    logger.error(
        "the process ends while transfers wait for other ranks; if they stay away it is killed in %d s", limit_s
    )
    # By the kernel: no thread of Python runs any more while libraries are torn down.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(limit_s)


atexit.register(_limit_the_exit)
