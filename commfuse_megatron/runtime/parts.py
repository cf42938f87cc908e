"""One call of a pass that is run part by part: between the parts its caller computes, beside what travels.

A part ends at a pause of the program. Until the last one has been run, the call has the context's buffers to itself:
whatever else begins meanwhile raises (`PassContext.enter`), so a call that was given up half-way is noticed by the next
one, whose guard tells the other ranks.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.tensor_program import Frame, Kernel


class _Program(Protocol):
    @property
    def num_parts(self) -> int: ...

    def begin(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> Frame: ...

    def run_part(self, frame: Frame, number: int) -> None: ...

    def run_held(self, frame: Frame, number: int) -> None: ...


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

    def __init__(
        self, p: _Pass, program: _Program, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]
    ) -> None:
        """Begin; no part is run yet. The pass has been entered."""
        self._pass, self._program = p, program
        self._next = 0
        with self._noting_interruptions():
            self._frame: Frame | None = program.begin(tensors, kernels)

    @property
    def is_done(self) -> bool:
        """Whether the last part has been run."""
        return self._frame is None

    @property
    def num_done(self) -> int:
        """Parts that have been run."""
        return self._next

    def submit(self) -> None:
        """Tell the device of transfers that wait for a kernel of the caller, who has just submitted one.

        With one hardware queue for all streams a transfer that is submitted before a kernel would hold it up.
        """
        if self._frame is not None and self._next:
            with self._noting_interruptions():
                self._program.run_held(self._frame, self._next - 1)

    def go_on(self) -> None:
        """Run the next part; the last one ends the call."""
        assert self._frame is not None
        with self._noting_interruptions():
            self._program.run_part(self._frame, self._next)
        self._next += 1
        if self._next == self._program.num_parts:
            self._frame = None
            self._pass.__exit__(None, None, None)

    def refuse_another(self) -> None:
        """Raise UnsupportedError: another call begins while this one is not done."""
        if not self.is_done:
            raise UnsupportedError(
                f"{self._pass.problem} has come as far as part {self._next} of {self._program.num_parts}, and another"
                " call of its context begins: to_heads must not use the context of its ulysses_block, and no call may"
                " follow a backward pass that was given up half-way"
            )

    @contextmanager
    def _noting_interruptions(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._pass.__exit__(type(error), error, error.__traceback__)
            raise
