"""Finds transfers that sit in a stream for too long, where nothing can raise.

One thread per context looks at the oldest transfer in flight; transfers of one communicator complete in order. When it
has been the oldest for `timeout_s`, `on_overdue` is called once (it logs, aborts and marks the context failed) and the
thread ends. Entries hold no tensors, so watching keeps no memory alive.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport.base import Transfer
from commfuse_megatron.transport.stream_memory import allow_calls_during_capture

logger = logging.getLogger(__name__)

_LONGEST_POLL_S = 1.0


class Watchdog:
    """Watches transfers handed to `watch` together with a description that `on_overdue` receives.

    on_broken: called, by whoever asks, with what is raised where a device has failed: nothing will complete any more.
    """

    def __init__(
        self, timeout_s: float, on_overdue: Callable[[Any], None], on_broken: Callable[[TransportError], object]
    ) -> None:
        self._timeout_s = timeout_s
        self._on_overdue = on_overdue
        self._on_broken = on_broken
        self._in_flight: deque[tuple[Transfer, Any]] = deque()
        self._stop = threading.Event()
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="commfuse-watchdog", daemon=True)
        self._thread.start()

    def watch(self, transfer: Transfer, description: Any) -> None:
        """Expect `transfer` to complete; cheap, for the hot path."""
        self._in_flight.append((transfer, description))

    @property
    def is_idle(self) -> bool:
        """Whether every transfer handed over has been seen to complete."""
        self._drop_completed()
        return not self._in_flight

    def stop(self) -> None:
        """End the thread; local and quick."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        allow_calls_during_capture()
        poll_s = min(_LONGEST_POLL_S, self._timeout_s / 4)
        oldest: Any = None
        oldest_since = time.monotonic()
        while not self._stop.wait(poll_s):
            self._drop_completed()
            if self._is_broken:
                return
            head = self._in_flight[0] if self._in_flight else None
            if head is None or head is not oldest:
                oldest, oldest_since = head, time.monotonic()
            elif time.monotonic() - oldest_since > self._timeout_s:
                # Several transfers may end together; say which one is missing.
                missing = next((entry for entry in list(self._in_flight) if not entry[0].has_arrived()), head)
                self._on_overdue(missing[1])
                return

    def _drop_completed(self) -> None:
        try:
            while self._in_flight:
                head = self._in_flight[0]
                if not head[0].is_complete():
                    return
                self._in_flight.remove(head)  # this one and no other: the program's threads drop entries, too
        except TransportError as error:
            self._is_broken = True
            self._on_broken(error)
        except (IndexError, ValueError, RuntimeError):
            # The former two: another thread was faster. RuntimeError: an aborted communicator cannot be asked any more.
            logger.debug("watchdog: a transfer could not be queried", exc_info=True)
