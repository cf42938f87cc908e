"""Runs programs over the copy engine with PyTorch's kernels: for what cuBLASLt does not serve.

Copies and flags come from a tape; the computations between them are given the tensors of each call, so that a call is
never launched as a graph.
"""

from collections.abc import Mapping
from typing import override

import torch

from commfuse_megatron.runtime.tape_program import TapeBinder, TapeKernel, addresses_of
from commfuse_megatron.runtime.tensor_program import Frame, Kernel, Means, TensorKernels
from commfuse_megatron.schedule.program import Computation, Op, Program


class TensorTape:
    """A program with messages, bound to the buffers of a pass; valid until one of them grows."""

    def __init__(self, program: Program, means: Means, tensors: Mapping[str, torch.Tensor]) -> None:
        """tensors: operands like those of the calls, by name."""
        self._link = means.link
        self._kernels = TensorKernels(program, means, frozenset(tensors))
        self.generation = self._kernels.generation
        self._calls: list[Frame] = []  # the one under way
        binder = _Binder(program, means, tensors, self._kernels, self._calls)
        self._operation = binder.bind({})

    @property
    def num_parts(self) -> int:
        """As `TensorProgram.num_parts`."""
        return len(self._operation.parts)

    def begin(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> Frame:
        """As `TensorProgram.begin`."""
        return self._kernels.frame(tensors, kernels)

    def run_part(self, frame: Frame, number: int) -> None:
        """As `TensorProgram.run_part`."""
        self._calls.append(frame)
        try:
            self._link.replay_part(self._operation, addresses_of(frame.tensors), number)
        finally:
            self._calls.clear()

    def run_held(self, frame: Frame, number: int) -> None:
        """Run what was held back at a pause, behind the caller's kernel, unless it has been run."""
        self._link.replay_held(self._operation, addresses_of(frame.tensors), number)

    def run(self, tensors: Mapping[str, torch.Tensor], kernels: Mapping[str, Kernel]) -> None:
        """Run one call: inside the pass's with-block. tensors, kernels: see `TensorKernels.frame`."""
        self._calls.append(self._kernels.frame(tensors, kernels))
        try:
            self._link.replay(self._operation, addresses_of(tensors), may_launch=False)
        finally:
            self._calls.clear()


class _Binder(TapeBinder):
    def __init__(
        self,
        program: Program,
        means: Means,
        tensors: Mapping[str, torch.Tensor],
        on_tensors: TensorKernels,
        calls: list[Frame],
    ) -> None:
        super().__init__(program, means, tensors, alignment=16)  # copies ask for none
        self._on_tensors, self._calls = on_tensors, calls

    @override
    def _add(self, op: Op, kernels: Mapping[str, TapeKernel]) -> None:
        if not isinstance(op, Computation):
            super()._add(op, kernels)
            return
        run, calls, lanes, lane = self._on_tensors.step(op), self._calls, self._lanes, self.tape.lane

        def step(at: tuple[int, ...], stream: int) -> None:
            if lane is None:
                run(calls[0])
                return
            with lanes.stream(lane):
                run(calls[0])

        self.tape.compute(step)
