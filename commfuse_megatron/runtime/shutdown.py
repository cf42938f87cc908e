"""What is left behind with transfers in flight: contexts are released when those are done, and the process ends.

Who gives up a context, by an exception or by forgetting it, may still want what is in flight, and so may the peers. So
the watchdog goes on, and what the transfers use is neither stopped, freed nor handed to others before they are done.

At the exit of the process a stream may wait for a rank that never comes. A wait in a stream is invisible to CUDA, and
so to the libraries that wait for the device while they are torn down: NCCL's communicators, say. A program that raised
on one rank would hang in its exit, and whoever started it would never learn of the error. Letting the stream go is no
way out, since what is behind the wait would write into the memory of ranks that go on. So the exit waits for the ranks,
as long as any wait does, and a process that then does not end by itself is killed, with nothing more sent.
"""

import atexit
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util

from commfuse_megatron.errors import TransportError
from commfuse_megatron.runtime.link import Link
from commfuse_megatron.transport.stream_memory import may_wait_for_device

logger = logging.getLogger(__name__)

# The exit of a program that has failed waits for other ranks no longer than this: the launcher is to know soon.
_AFTER_AN_ERROR_S = 10.0
# Seconds for other exit handlers and libraries; then the process is killed, if ranks are still missing.
_TO_END_S = 30
_POLL_S = 0.01


# Without a lock: garbage collection may come here while this thread is here already.
_links: set[Link] = set()
_left: dict[Link, Callable[[], None]] = {}
_of_the_parent: list[Callable[[], None]] = []
#: Links that are being released, and by which thread.
_at_work: dict[Link, int] = {}
_ending: list[bool] = []
#: Whether what a process of multiprocessing was started for ended by an exception.
_child_failed: list[bool] = []
_watched_children: set[int] = set()


def is_process_ending() -> bool:
    """Whether the exit has begun: what would wait for the device is left to the driver then."""
    return bool(_ending)


def track_until_exit(link: Link) -> None:
    """Remember a link whose transfers may be in flight when the process ends."""
    _links.add(link)
    if os.getpid() not in _watched_children and multiprocessing.parent_process() is not None:
        _watched_children.add(os.getpid())
        # Runs while the exception is on its way, which is printed and forgotten before other handlers run.
        util.Finalize(None, _note_failure_of_child, exitpriority=0)
    release_what_is_done()


def _note_failure_of_child() -> None:
    error = sys.exception()
    if error is not None and not (isinstance(error, SystemExit) and not error.code):
        _child_failed.append(True)


def release_when_done(link: Link, release: Callable[[], None]) -> None:
    """Nothing is started on the link any more: the next `release_what_is_done` may `release` it, if it is known.

    Not here: garbage collection may call this, in any thread and at any moment.
    """
    if link not in _links:  # of the process that this one was forked from: even to drop its connections would hang
        _of_the_parent.append(release)
        return
    _left[link] = release
    if _ending:
        release_what_is_done()


def release_what_is_done(own: Link | None = None) -> None:
    """Release the links with nothing in flight, unless a CUDA graph is being captured. What fails is logged.

    own: a link that is not to be in the middle of it on return, if another thread was first.
    """
    if not may_wait_for_device():
        return
    this_thread = threading.get_ident()
    for link in list(_left):
        if not link.is_in_flight and _at_work.setdefault(link, this_thread) == this_thread:
            _release_claimed(link)
    while own is not None and _at_work.get(own, this_thread) != this_thread:
        time.sleep(_POLL_S)


def _release_claimed(link: Link) -> None:
    """Release it, unless another thread has done so since it was found."""
    release = None
    try:
        release = _left.pop(link, None)
        if release is not None:
            release()
            _links.discard(link)
    except Exception:  # of a context that the caller may know nothing of
        logger.exception("a context that was given up could not be released")
        _links.discard(link)
    except BaseException:  # Ctrl-C: what is left to be done is done next time
        if release is not None:
            _left[link] = release
        raise
    finally:
        _at_work.pop(link, None)


def _limit_the_exit() -> None:
    _ending.append(True)
    began = time.monotonic()
    try:
        is_done = _wait_for_links()
    except BaseException as error:  # Ctrl-C of who has waited long enough, say: the teardown may hang all the more
        logger.error("the wait at the exit for transfers in flight ended by %s", type(error).__name__)
        is_done = False
    if is_done:
        release_what_is_done()
        return
    logger.error(
        "the process ends, but transfers have waited for other ranks for %.0f s: it is killed in %d s at the latest",
        time.monotonic() - began,
        _TO_END_S,
    )
    # By the kernel: no thread of Python runs any more while libraries are torn down.
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_TO_END_S)


def _wait_for_links() -> bool:
    """Whether nothing is in flight any more, after a limited time."""
    waiting = [link for link in list(_links) if link.is_in_flight]
    if not waiting:
        return True
    limit_s = max(link.timeout_s for link in waiting)
    has_failed = any(link.failure is not None or link.is_left_by_error for link in waiting)
    if has_failed or _child_failed or getattr(sys, "last_exc", None) is not None:  # what ended the program
        limit_s = min(limit_s, _AFTER_AN_ERROR_S)
    deadline = time.monotonic() + limit_s
    while any(link.is_in_flight for link in waiting):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _disown() -> None:
    """In a forked child, which has none of the parent's streams and connections."""
    for link in _links:
        link.failure = TransportError(
            "this OverlapContext is the parent's, which forked this process; create a new one"
        )
        link.is_disowned = True
    _of_the_parent.extend(_left.values())
    _links.clear()
    _left.clear()
    _at_work.clear()


atexit.register(_limit_the_exit)
os.register_at_fork(after_in_child=_disown)
