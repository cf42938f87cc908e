"""Launches compiled Triton kernels with little host time.

Owns every use of Triton's launcher; must not know what it launches. A launcher is given addresses and keeps numbers
only, so it keeps no memory alive. It caches the TMA descriptor (128 bytes that say address, shape, strides) of each
address it saw; nothing in there goes stale, since shape and strides are the launcher's own.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_DESCRIPTORS = 256  # per operand and plan

Launcher = Callable[..., None]
"""`launcher(stream_handle, *addresses)`, on the current device."""


class View(NamedTuple):
    """A matrix as a TMA descriptor has it, contiguous dim last."""

    shape: tuple[int, int]
    strides: tuple[int, int]


def complete_signature(names: list[str], types: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """Types of a kernel's arguments, in the order of `names`: Triton's launcher goes by position.

    Arguments that are neither in `types` nor constant are integers: strides of 64 bits, sizes of 32.
    """
    return {
        name: "constexpr" if name in constants else types.get(name, "i64" if "stride" in name else "i32")
        for name in names
    }


def make_launcher(compiled: Any, num_blocks: int, views: tuple[View | None, ...], tail: tuple[Any, ...]) -> Launcher:
    """A launcher of `compiled` on `num_blocks` blocks.

    views: for each leading argument of the kernel, how its descriptor sees it; None where it is a plain pointer (or
    None). tail: the kernel's other arguments, constexprs included.
    """
    flat = _flat_launch(compiled)
    if flat is None:
        return _PublicLauncher(compiled, num_blocks, views, tail)
    return _FlatLauncher(flat, compiled, num_blocks, views, tail)


class _Descriptor:
    """What Triton's launcher reads of a `TensorDescriptor`, without that class's checks; also its own base tensor."""

    __slots__ = ("_address", "shape", "strides")
    padding = "zero"

    def __init__(self, address: int, view: View) -> None:
        self._address = address
        self.shape, self.strides = view

    @property
    def base(self) -> "_Descriptor":
        return self

    def data_ptr(self) -> int:
        return self._address


class _PublicLauncher:
    """Through the documented `compiled[grid](*arguments, stream=)`."""

    def __init__(self, compiled: Any, num_blocks: int, views: tuple[View | None, ...], tail: tuple[Any, ...]) -> None:
        self._runner = compiled[(num_blocks, 1, 1)]
        self._views = views
        self._tail = tail

    def __call__(self, stream: int, *addresses: int | None) -> None:
        arguments = [
            address if view is None or address is None else _Descriptor(address, view)
            for view, address in zip(self._views, addresses, strict=True)
        ]
        self._runner(*arguments, *self._tail, stream=stream)


class _Pointers:
    """A pointer argument: itself."""

    def __getitem__(self, address: int | None) -> tuple[int | None]:
        return (address,)


class _Descriptors(dict[int, tuple[Any, ...]]):
    """Address to what a descriptor becomes in the launcher's argument list: encoded map, shape, strides."""

    def __init__(self, view: View, encode: Callable[[_Descriptor], list[Any]]) -> None:
        super().__init__()
        self._view = view
        self._encode = encode

    def __missing__(self, address: int) -> tuple[Any, ...]:
        if len(self) >= MAX_DESCRIPTORS:
            self.clear()
        arguments = self[address] = tuple(self._encode(_Descriptor(address, self._view)))
        return arguments


class _FlatLauncher:
    """Straight to the C function that Triton generates for a signature: half the host time, since nothing is encoded
    again.

    Triton's launch hooks (of its own profiler) do not see these launches; CUDA's profilers do.
    """

    def __init__(
        self,
        launch: Callable[..., None],
        compiled: Any,
        num_blocks: int,
        views: tuple[View | None, ...],
        tail: tuple[Any, ...],
    ) -> None:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        run = compiled.run
        metadata = iter(compiled.metadata.tensordesc_meta or ())
        self._launch = launch
        self._grid = (num_blocks, 1, 1)
        # function; cooperative and dependent launch; global and profiling scratch; packed metadata; launch metadata,
        # two hooks
        self._fixed = (compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
                       compiled.packed_metadata, None, None, None)  # fmt: skip
        self._operands: list[Any] = [
            _Pointers()
            if view is None
            else _Descriptors(view, functools.partial(make_tensordesc_arg, metadata=next(metadata)))
            for view in views
        ]
        self._tail = tail

    def __call__(self, stream: int, *addresses: int | None) -> None:
        arguments: list[Any] = [*self._grid, stream, *self._fixed]
        for operand, address in zip(self._operands, addresses, strict=True):
            arguments += operand[address]
        self._launch(*arguments, *self._tail)


def _flat_launch(compiled: Any) -> Callable[..., None] | None:
    """The generated C function of a kernel; None where Triton differs from 3.6, or the kernel needs scratch memory."""
    import triton

    run = compiled.run
    if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
        return None
    launch = run.launch
    if inspect.isbuiltin(launch):
        return launch
    launch = inspect.getclosurevars(launch).nonlocals.get("launcher")
    return launch if inspect.isbuiltin(launch) else None
