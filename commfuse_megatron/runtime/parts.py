"""One call of a pass that is run part by part: between the parts its caller computes, beside what travels.

A part ends at a pause of the program. Until the last one has been run, the call has the context's buffers to itself:
whatever else begins meanwhile raises (`PassContext.enter`), so a call that was given up half-way is noticed by the next
one, whose guard tells the other ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.tensor_program import Frame, Kernel


class Parts(Protocol):
    """The parts of one call."""

    @property
    def mode(self) -> Literal["stepped", "tape"]:
        """As what they run."""

    @property
    def num_parts(self) -> int:
        """Parts of the call, with a pause between any two."""

    def run_part(self, number: int) -> None:
        """Run one part, all of which are run, in their order."""

    def run_held(self, number: int) -> None:
        """Run what was held back at a pause, behind the caller's kernel, unless it has been run."""


class _Program(Protocol):
    @property
    def num_parts(self) -> int: ...

    def begin(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> Frame: ...

    def run_part(self, frame: Frame, number: int) -> None: ...

    def run_held(self, frame: Frame, number: int) -> None: ...


class PartsOnTensors:
    """Those of a call on tensors."""

    mode: Literal["stepped", "tape"] = "stepped"

    def __init__(self, program: _Program, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> None:
        self._program, self._frame = program, program.begin(tensors, kernels)
        self.num_parts = program.num_parts

    def run_part(self, number: int) -> None:
        """Run one part, all of which are run, in their order."""
        self._program.run_part(self._frame, number)

    def run_held(self, number: int) -> None:
        """Run what was held back at a pause, behind the caller's kernel, unless it has been run."""
        self._program.run_held(self._frame, number)


class _Pass(Protocol):
    problem: Problem

    def __enter__(self) -> None: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, traceback: object
    ) -> None: ...


class CallInParts:
    """A call under way.

    An exception out of a part marks the context failed, as it does for any other call.
    """

    def __init__(self, p: _Pass, make: Callable[[], Parts]) -> None:
        """Enter the pass and make the parts; none is run yet."""
        self._pass, self._next = p, 0
        p.__enter__()
        with self._noting_interruptions():
            self._parts: Parts | None = make()
        self._num_parts = self._parts.num_parts
        #: As what it runs.
        self.mode = self._parts.mode

    @property
    def is_done(self) -> bool:
        """Whether the last part has been run."""
        return self._parts is None

    @property
    def num_done(self) -> int:
        """Parts that have been run."""
        return self._next

    def submit(self) -> None:
        """Tell the device of transfers that wait for a kernel of the caller, who has just submitted one.

        With one hardware queue for all streams a transfer that is submitted before a kernel would hold it up.
        """
        if self._parts is not None and self._next:
            with self._noting_interruptions():
                self._parts.run_held(self._next - 1)

    def go_on(self) -> None:
        """Run the next part; the last one ends the call."""
        assert self._parts is not None
        with self._noting_interruptions():
            self._parts.run_part(self._next)
        self._next += 1
        if self._next == self._num_parts:
            self._parts = None
            self._pass.__exit__(None, None, None)

    def refuse_another(self) -> None:
        """Raise UnsupportedError: another call, or the end, comes while this one is not done."""
        if not self.is_done:
            raise UnsupportedError(
                f"{self._pass.problem} has come as far as part {self._next} of {self._num_parts}, and another"
                " call of its context, or its end, comes first: neither to_heads nor hooks of its weights may use the"
                " context of a ulysses_block, and nothing may follow a backward pass that was given up half-way"
            )

    @contextmanager
    def _noting_interruptions(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._pass.__exit__(type(error), error, error.__traceback__)
            raise
