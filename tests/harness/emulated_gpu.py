"""The copy engine, cuBLASLt and streams on the CPU: everything happens at once, in the order of submission.

CUDA graphs are what streams and events make of them, run in another of all orders that they leave open at every launch,
one node after the other, as with a single hardware queue. So transports, tapes and flags run on every machine, ranks as
threads. What this cannot show: two kernels at a time, and whether the driver takes the calls. A wait that nothing
fulfils raises after some seconds.
"""

import contextlib
import ctypes
import functools
import inspect
import itertools
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.kernels.attention import AttentionKernel, BoundAttention, MathAttention, Operands, SplitMask
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.kernels.blas import Matrix
from commfuse_megatron.kernels.sum_partials import sum_partials
from commfuse_megatron.runtime import hardware
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.hardware import Hardware
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.copy_steps import BoundOperation
from commfuse_megatron.transport.stream_memory import Driver
from tests.harness.threads import on_ranks

_LONGEST_WAIT_S = 10.0
_CPU = torch.device("cpu")
_CURRENT = 0
_LANES = (2, 3, 4, 5)
_local = threading.local()
_handles = itertools.count(10)


@contextlib.contextmanager
def take_part(group: dist.ProcessGroup) -> Iterator[None]:
    """This thread is a rank of `group` when windows are mapped."""
    _local.group = group
    yield


def emulate_copy_engine(monkeypatch: pytest.MonkeyPatch) -> Hardware:
    """Let contexts of CPU groups use the copy engine and replay tapes; returns what they run on."""
    found = _Hardware()
    monkeypatch.setattr(hardware, "current", found)
    return found


def on_copy_engine(group_size: int | str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """As `on_ranks`, but contexts use the copy engine, and every thread is a rank when windows are mapped."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @on_ranks(group_size)
        @functools.wraps(test)
        def on_all(group: dist.ProcessGroup, device: torch.device, **given: Any) -> None:
            with take_part(group):
                test(group, device, **given)

        @functools.wraps(test)
        def run(monkeypatch: pytest.MonkeyPatch, **given: Any) -> None:
            emulate_copy_engine(monkeypatch)
            on_all(**given)

        fixture = inspect.Parameter("monkeypatch", inspect.Parameter.KEYWORD_ONLY)
        others = inspect.signature(on_all).parameters.values()
        run.__signature__ = inspect.Signature([*others, fixture])  # type: ignore[attr-defined]
        return run

    return decorate


def tapes_of(context: OverlapContext) -> list[BoundOperation | None]:
    """The tapes of all passes of a context; None for layouts that none serves."""
    return [tape for p in context._prepared.values() for tape in p.tapes]


def capture_call[T](call: Callable[[], T]) -> tuple[T, Callable[[], None]]:
    """What `call` gives, and how to launch its driver calls as a graph that the program captured on the current stream.

    What PyTorch computes in `call` is computed at once: only what tapes do is in the graph.
    """
    results: list[T] = []
    graph = _Graph(SimpleNamespace(handle=_CURRENT), lambda: results.append(call()))
    return results[0], lambda: graph.launch(_CURRENT)


# What windows that are being mapped lie in, by address.
_unmapped: dict[int, bytearray] = {}


def _aligned(size: int, device: torch.device = _CPU) -> torch.Tensor:
    memory = bytearray(size + 256)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % 256
    window = whole[start : start + size]
    _unmapped[window.data_ptr()] = memory
    return window


class _Mapping:
    """Ranks are threads: every address is valid everywhere. A mapping keeps all ranks' memory, as the driver does."""

    def __init__(self, tensor: torch.Tensor, _: dist.ProcessGroup) -> None:
        group = _local.group
        addresses = [[torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]]
        group.allgather(addresses, [torch.tensor([tensor.data_ptr()])]).wait()
        self.buffer_ptrs = [int(address) for address in addresses[0]]
        self._memory = [_unmapped[address] for address in self.buffer_ptrs]
        group.barrier().wait()
        del _unmapped[tensor.data_ptr()]


class _Memory:
    def wait_for(self, address: int, value: int) -> tuple[str, int, int]:
        return "wait", address, value

    def write_value(self, address: int, value: int) -> tuple[str, int, int]:
        return "write", address, value

    def run(self, stream: int, ops: tuple[tuple[str, int, int], ...]) -> None:
        for op in ops:
            _submit(stream, functools.partial(_write_or_wait, *op))

    def copy(self, stream: int, target_at: int, source_at: int, size_bytes: int) -> None:
        _submit(stream, functools.partial(ctypes.memmove, target_at, source_at, size_bytes))


def _write_or_wait(kind: str, address: int, value: int) -> None:
    flag = ctypes.c_int32.from_address(address)
    if kind == "write":
        flag.value = value
        return
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while flag.value != value:
        assert time.monotonic() < deadline, "waited in vain for a flag"
        time.sleep(1e-4)


class _Stream:
    def __init__(self, device: torch.device = _CPU, *, is_high_priority: bool = False) -> None:
        self.torch, self.handle = self, next(_handles)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def destroy(self) -> None:
        pass


class _Event:
    def __init__(self) -> None:
        self._mark: tuple[_Capture, frozenset[int]] | None = None
        self._unawaited: int | None = None  # the stream of a mark that nobody has waited for

    def record(self, stream: int) -> None:
        assert self._unawaited in (None, stream), "another stream's mark is overwritten before anybody waited for it"
        self._unawaited = stream
        capture = _capture()
        self._mark = None if capture is None else (capture, capture.latest[stream])

    def wait(self, stream: int) -> None:
        self._unawaited = None
        capture = _capture()
        if capture is None:
            assert self._mark is None, "waits outside of a graph for what is in it"
            return
        assert self._mark is not None, "waits in a graph for what is outside of it"
        origin, nodes = self._mark
        assert origin is capture, "waits for what is in another graph"
        capture.latest[stream] = capture.latest.get(stream, frozenset()) | nodes

    def query(self) -> bool:
        return True


class _Capture:
    """What streams are told while one of them is captured. latest: by stream, what its next node comes after."""

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.nodes: list[tuple[Callable[[], object], frozenset[int]]] = []
        self.latest: dict[int, frozenset[int]] = {origin: frozenset()}

    def add(self, stream: int, action: Callable[[], object]) -> None:
        assert stream in self.latest, "a stream that is not captured"
        self.nodes.append((action, self.latest[stream]))
        self.latest[stream] = frozenset([len(self.nodes) - 1])


def _capture() -> _Capture | None:
    return getattr(_local, "capture", None)


def _submit(stream: int, action: Callable[[], object]) -> None:
    capture = _capture()
    if capture is None:
        action()
    else:
        capture.add(stream, action)


class _Graph:
    def __init__(self, stream: _Stream, tell: Callable[[], None]) -> None:
        capture = _local.capture = _Capture(stream.handle)
        try:
            tell()
        finally:
            _local.capture = None
        self._nodes = capture.nodes
        reached, left = set[int](), list(capture.latest[stream.handle])
        while left:
            node = left.pop()
            if node not in reached:
                reached.add(node)
                left += capture.nodes[node][1]
        assert len(reached) == len(capture.nodes), "a stream that was forked has not joined"
        self._behind: list[list[int]] = [[] for _ in self._nodes]
        for number, (_, after) in enumerate(self._nodes):
            for earlier in after:
                self._behind[earlier].append(number)

    def launch(self, stream: int) -> None:
        _local.launches = getattr(_local, "launches", 0) + 1  # of all graphs: most are launched once
        draw = random.Random(f"{_local.group.rank()} {_local.launches}")
        left = [len(after) for _, after in self._nodes]
        ready = [number for number, count in enumerate(left) if not count]
        while ready:
            place = draw.randrange(len(ready))
            ready[place], ready[-1] = ready[-1], ready[place]
            number = ready.pop()
            self._nodes[number][0]()
            for later in self._behind[number]:
                left[later] -= 1
                if not left[later]:
                    ready.append(later)


class _Page:
    def __init__(self, flags: torch.Tensor) -> None:
        self._flags = flags

    def read(self) -> torch.Tensor:
        return self._flags.clone()

    def set_all(self) -> None:
        self._flags.fill_(1)

    def destroy(self) -> None:
        pass


#: Shape, strides and dtype.
_Layout = tuple[Sequence[int], Sequence[int], torch.dtype]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride(), tensor.dtype


def _rows(*shape: int, dtype: torch.dtype) -> _Layout:
    return _layout(torch.empty(shape, dtype=dtype, device="meta"))


def _view(layout: _Layout, address: int) -> torch.Tensor:
    shape, strides, dtype = layout
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    count = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class _Matmul:
    """Leaves its product in the workspace, in fp64, then rounds it: who shares the workspace meanwhile would show."""

    def __init__(self, a: Matrix, b: Matrix, out: Matrix, *, has_addend: bool, has_bias: bool) -> None:
        rows, cols = out.shape
        self._matrices = a[:3], b[:3], out[:3]
        self._product, self._bias = _rows(rows, cols, dtype=torch.float64), _rows(1, cols, dtype=out.dtype)
        self._has_addend, self._has_bias = has_addend, has_bias
        self.workspace_bytes = rows * cols * torch.float64.itemsize

    def __call__(
        self, stream: int, workspace_at: int, a_at: int, b_at: int, out_at: int, addend_at: int, bias_at: int
    ) -> None:
        a, b, out = self._matrices

        def multiply() -> None:
            result = _view(a, a_at).double() @ _view(b, b_at).double()
            if self._has_addend:
                result += _view(out, addend_at)
            if self._has_bias:
                result += _view(self._bias, bias_at)
            _view(self._product, workspace_at).copy_(result)

        _submit(stream, multiply)
        _submit(stream, lambda: _view(out, out_at).copy_(_view(self._product, workspace_at)))


def _bind_through_scratch(
    results: Sequence[tuple[torch.Size, torch.dtype]],
    first: int,
    compute: Callable[..., Sequence[torch.Tensor]],
    strides: Sequence[tuple[int, ...]] | None = None,
) -> BoundAttention:
    """What `compute` gives for the addresses lies in scratch memory, then at those from number `first` on.

    results: its shapes and dtypes; all are contiguous, or have these strides at last.
    """
    layouts = [_rows(*shape, dtype=dtype) for shape, dtype in results]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in results]
    starts = list(itertools.accumulate(sizes, initial=0))

    def leave(scratch_at: int, addresses: tuple[int, ...]) -> None:
        for (_, dtype), start, size, result in zip(results, starts, sizes, compute(*addresses), strict=False):
            rounded = result.to(dtype).contiguous()
            ctypes.memmove(scratch_at + start, rounded.data_ptr(), size)

    def store(scratch_at: int, addresses: tuple[int, ...]) -> None:
        for number, (at, start, size) in enumerate(zip(addresses[first:], starts, sizes, strict=False)):
            if strides is None:
                ctypes.memmove(at, scratch_at + start, size)
            else:
                shape, _, dtype = layouts[number]
                _view((shape, strides[number], dtype), at).copy_(_view(layouts[number], scratch_at + start))
        ctypes.memset(scratch_at, 0xFF, starts[-1])  # NaN in every dtype

    def run(stream: int, scratch_at: int, *addresses: int) -> None:
        assert stream in _LANES
        _submit(stream, functools.partial(leave, scratch_at, addresses))
        _submit(stream, functools.partial(store, scratch_at, addresses))

    return BoundAttention(run, starts[-1])


class _Attention(MathAttention):
    can_bind = True

    def forward(self, operands: Operands, mask: SplitMask, scale: float, dropout) -> tuple[torch.Tensor, ...]:
        super().forward(operands, mask, scale, dropout)
        (queries, batch, heads, _), keys = operands[0].shape, operands[1].size(0)
        # As cuDNN does: what `bind_backward` looks for, of more than one query that sees one key.
        return () if queries == keys == 1 else (torch.ones(batch, heads, queries, 1),)

    def bind_forward(
        self, operands: Operands, mask: SplitMask, scale: float, state_rows: int | None = None
    ) -> BoundAttention:
        *loaded, out = operands
        layouts = [_layout(tensor) for tensor in loaded]
        assert out.is_contiguous()

        def attend(q_at: int, k_at: int, v_at: int, out_at: int, state_at: int) -> list[torch.Tensor]:
            ctypes.c_float.from_address(state_at).value = 1.0  # is memory
            views = [_view(layout, at) for layout, at in zip(layouts, (q_at, k_at, v_at), strict=True)]
            result = torch.empty(out.shape, dtype=out.dtype)
            self.forward((*views, result), mask, scale, None)
            return [result]

        return _bind_through_scratch([(out.shape, out.dtype)], 3, attend)

    def bind_backward(
        self,
        grad_out: torch.Tensor,
        operands: tuple[torch.Tensor, ...],
        mask: SplitMask,
        scale: float,
        gradients: Sequence[torch.Tensor] | None = None,
    ) -> BoundAttention:
        layouts = [_layout(tensor) for tensor in (*operands, grad_out)]

        def attend(q_at, k_at, v_at, out_at, state_at, grad_out_at, *gradients_at: int) -> Sequence[torch.Tensor]:
            assert ctypes.c_float.from_address(state_at).value == 1.0  # what the forward pass left
            addresses = (q_at, k_at, v_at, out_at, grad_out_at)
            *views, grad = [_view(layout, at) for layout, at in zip(layouts, addresses, strict=True)]
            return self.backward(grad, tuple(views), (), mask, scale, None)

        results = [(tensor.shape, tensor.dtype) for tensor in operands[:3]]
        strides = None if gradients is None else [tensor.stride() for tensor in gradients]
        return _bind_through_scratch(results, 6, attend, strides)


def _bind_copy(target: torch.Tensor, source: torch.Tensor, *, device: torch.device, is_aligned: bool):
    to_layout, from_layout = _layout(target), _layout(source)

    def copy(target_at: int, source_at: int) -> None:
        _view(to_layout, target_at).copy_(_view(from_layout, source_at))

    return lambda stream, *addresses: _submit(stream, functools.partial(copy, *addresses))


def _bind_sum(
    own: torch.Tensor,
    partials: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    device: torch.device | None = None,
):
    rows, others, sums = _layout(own), _layout(partials), _layout(out)
    row = None if bias is None else _layout(bias)

    def total(own_at: int, partials_at: int, bias_at: int | None, out_at: int) -> None:
        added = None if row is None else _view(row, bias_at)
        sum_partials(_view(rows, own_at), _view(others, partials_at), bias=added, out=_view(sums, out_at))

    return lambda stream, *addresses: _submit(stream, functools.partial(total, *addresses))


class _Driver(Driver):
    memory, batch, event, graph, flag_page, new_stream = _Memory, tuple, _Event, _Graph, _Page, _Stream
    allocate_shared, share = staticmethod(_aligned), _Mapping

    def __init__(self) -> None:
        self._spare: list[_Stream] = []

    def borrow_stream(self, device: torch.device) -> _Stream:
        with contextlib.suppress(IndexError):
            return self._spare.pop()
        return _Stream()

    def give_stream_back(self, device: torch.device, stream: _Stream) -> None:
        self._spare.append(stream)

    def free_memory_bytes(self) -> int:
        return 0  # which never changes

    def current_stream(self, device: torch.device) -> int:
        assert _capture() is None or self.is_capturing(), "a step of a graph asked for the current stream"
        return _CURRENT

    def wait_for_current_stream(self, device: torch.device) -> None:
        pass

    def is_capturing(self) -> bool:
        capture = _capture()
        return capture is not None and capture.origin == _CURRENT


class _Lanes(Lanes):
    def handles(self, num_lanes: int = 2) -> tuple[int, ...]:
        return _LANES[:num_lanes]


class _AttentionKernels(AttentionKernels):
    def _make(self, name: str) -> AttentionKernel:
        return _Attention() if name == "math" else super()._make(name)


class _Hardware(Hardware):
    lanes, attention_kernels, matmul = _Lanes, _AttentionKernels, _Matmul
    attention = _Attention  # the plain one, on addresses
    sum, copy = staticmethod(_bind_sum), staticmethod(_bind_copy)
    choose_backend = staticmethod(lambda group, config, exchange: "copy_engine")
    device_of = staticmethod(lambda backend: _CPU)
    tapes_unavailable_reason = staticmethod(lambda device, dtype: None)

    def __init__(self) -> None:
        self.driver = _Driver()

    def create_transport(self, backend, group, store, config, nccl, exchange) -> CopyEngineTransport:
        return CopyEngineTransport(group, _CPU, exchange, graph_memory_mib=config.graph_memory_mib, driver=self.driver)
