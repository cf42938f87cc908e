"""What the ranks of one context ask each other, so that all do the same: agree, raise, or give up together.

Collective, each: every rank must ask the same, in the same order. Where ranks may have stopped at different calls, the
context fails, for its next call could meet another rank's present one and give wrong numbers.
"""

from collections.abc import Callable, Hashable

import torch

from commfuse_megatron.runtime.agreement import Agreement
from commfuse_megatron.runtime.link import Link

# Sequence lengths that vary from call to call must not fill the memory.
_MOST_REASONS = 1024


class Consensus:
    """Rounds of questions among the ranks of one context.

    Args:
        link: fails where ranks may be out of step; nobody is asked once it has failed or is closed.
        compares_every_call: every call is compared, so ranks that raise in one go on together. Else new problems only.
        is_capturing: whether a CUDA graph is being captured, when nobody can be asked.
    """

    def __init__(
        self,
        agreement: Agreement,
        link: Link,
        *,
        compares_every_call: bool,
        is_capturing: Callable[[], bool],
    ) -> None:
        self.compares_every_call = compares_every_call
        self._agreement, self._link = agreement, link
        self.is_capturing = is_capturing
        self._first_reasons: dict[Hashable, str] = {}
        self._num_places = 0

    def agree(self, statement: str, *, topic: str, is_place: bool = False) -> None:
        """Return if all ranks bring the same `statement`; else raise ShapeError on all of them.

        topic: the call that this belongs to. is_place: no other call has this topic: ranks that share it are in step.
        """
        self._in_step(statement, lambda: self._agreement.agree(statement, topic=topic, is_place=is_place))

    def exchange(self, text: str, *, topic: str) -> list[str]:
        """What every rank brings, by rank. topic: the question, equal on all ranks."""
        return self._in_step(topic, lambda: self._agreement.exchange(text, topic=topic))

    def first_reason(self, key: Hashable, reason: str | None) -> str | None:
        """`reason`, or that of the first rank that has one; None if none has. Collective the first time of each key.

        While a graph is captured nobody can be asked: then this rank's own, of a new key.
        """
        known = self._first_reasons.get(key)
        if known is None:
            if self.is_capturing():
                return reason
            if len(self._first_reasons) >= _MOST_REASONS:
                self._first_reasons.clear()
            everyone = enumerate(self.exchange(reason or "", topic=f"the reason for {key}"))
            found = next(((rank, text) for rank, text in everyone if text), (self._agreement.group_rank, ""))
            elsewhere = f"group rank {found[0]}: " if found[1] and not reason else ""
            known = self._first_reasons[key] = elsewhere + found[1]
        return known or None

    def make_together[T](self, make: Callable[[], T], topic: str) -> T | str:
        """What `make` makes, if no rank runs out of memory; else, on all ranks, which one did."""
        made: T | None = None
        complaint = ""
        try:
            made = make()
        except torch.OutOfMemoryError as error:
            complaint = f"group rank {self._agreement.group_rank}: {str(error).partition('.')[0]}"
        except Exception as error:
            self.refuse(error, topic=topic)
        complaints = [text for text in self.exchange(complaint, topic=topic) if text]
        if complaints:
            return "; ".join(complaints)
        assert made is not None
        return made

    def next_place(self) -> int:
        """A number that no other place of the program has been given on this rank; equal on ranks that come to the same
        places in the same order."""
        self._num_places += 1
        return self._num_places

    def refuse(self, error: Exception, *, topic: str) -> None:
        """Raise `error` here, and on the other ranks where they look: at every call, or at a new problem.

        topic: the call, or the question, that this rank cannot go on with.
        """
        self._link.require_usable()
        if self._agreement.group_size == 1:
            raise self._link.mark_raised_on_all_ranks(error)
        self._in_step(f"{error}", lambda: self._agreement.refuse(error, topic=topic, wait=self.compares_every_call))

    def _in_step[T](self, statement: str, meet: Callable[[], T]) -> T:
        """What `meet` gives; if it raises, the context fails unless all ranks are known to have stopped at one call.

        Else this rank's next call could meet another one's present call, and give wrong numbers.
        """
        self._link.require_usable()
        try:
            return meet()
        except BaseException as error:  # Ctrl-C while waiting: the others may yet go on with this call
            if isinstance(error, Exception) and self.compares_every_call and self._agreement.is_in_step:
                self._link.mark_raised_on_all_ranks(error)
            self._link.note_interruption(statement, error)
            raise


class Guard:
    """Surrounds what all ranks do: leaving it by an exception fails the context, unless all ranks are known to.

    what: in words, or what gives them.
    """

    __slots__ = ("_link", "_what")

    def __init__(self, link: Link, what: object) -> None:
        self._link, self._what = link, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if error is not None and not self._link.is_closed:  # what was refused for that has interrupted nothing
            self._link.note_interruption(self._what, error)
