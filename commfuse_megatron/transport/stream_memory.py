"""Waits for and writes of 32-bit flags in a stream's order, without a kernel; copies; and a stream of our own.

Thin over the driver (cuda-bindings). Parameters are built once and replayed: building them costs more host time than
the call. Beware: such a wait is invisible to CUDA, so nothing but the flag ends it, and what writes the flag must never
be submitted behind the wait.

`Driver` is all that the copy engine asks of the CUDA driver and of PyTorch, so that tests can stand in for it.
"""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.errors import TransportError

# The driver takes fewer than 256 operations at once.
_MOST_OPS = 255
# Results of a question that a capture forbids, or whose answer lies in a graph: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
# to CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD.
_CAPTURE_ERRORS = range(900, 909)

MemoryOp = Any
Batch = tuple[list[MemoryOp], ...]


def _driver() -> Any:
    from cuda.bindings import driver  # not at import: the package must not touch CUDA then

    return driver


def _check(status: Any, what: str) -> None:
    if status:
        raise TransportError(f"{what} failed: {getattr(status, 'name', status)}")


def batch(ops: Iterable[MemoryOp]) -> Batch:
    """Operations for `StreamMemory.run`, in order."""
    ops = list(ops)
    return tuple(ops[first : first + _MOST_OPS] for first in range(0, len(ops), _MOST_OPS))


class StreamMemory:
    """The driver's calls, looked up once. `stream` arguments are the driver's handles."""

    def __init__(self) -> None:
        self._driver = _driver()
        self._batch_mem_op = self._driver.cuStreamBatchMemOp
        self._memcpy = self._driver.cuMemcpyDtoDAsync

    def wait_for(self, address: int, value: int) -> MemoryOp:
        """Operation that holds the stream until the flag at `address` equals `value`."""
        driver = self._driver
        op = driver.CUstreamBatchMemOpParams()
        op.operation = op.waitValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WAIT_VALUE_32
        op.waitValue.address = driver.CUdeviceptr(address)
        op.waitValue.value = driver.cuuint32_t(value)
        op.waitValue.flags = int(driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_EQ)
        return op

    def write_value(self, address: int, value: int) -> MemoryOp:
        """Operation that writes `value` to the flag at `address`, visible after all that came before in the stream."""
        driver = self._driver
        op = driver.CUstreamBatchMemOpParams()
        op.operation = op.writeValue.operation = driver.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        op.writeValue.address = driver.CUdeviceptr(address)
        op.writeValue.value = driver.cuuint32_t(value)
        # Without its memory barrier a write would be cheaper, but the driver no longer takes that flag (CUDA 13.0).
        op.writeValue.flags = int(driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
        return op

    def run(self, stream: Any, ops: Batch) -> None:
        """Enqueue the operations."""
        for part in ops:
            status = self._batch_mem_op(stream, len(part), part, 0)[0]
            if status:
                _check(status, "cuStreamBatchMemOp")

    def copy(self, stream: Any, target_at: int, source_at: int, size_bytes: int) -> None:
        """Enqueue a copy between device addresses, this device's or mapped ones of peers."""
        status = self._memcpy(target_at, source_at, size_bytes, stream)[0]
        if status:
            _check(status, "cuMemcpyDtoDAsync")

    def handle(self, raw_stream: int) -> Any:
        """The driver's handle of a stream, to be kept for `run` and `copy`."""
        return self._driver.CUstream(raw_stream)


class StreamEvent:
    """An event on raw stream handles: `torch.cuda.Event` takes several times the host time, to look up its stream."""

    __slots__ = ("_destroy", "_event", "_not_ready", "_query", "_record", "_wait")

    def __init__(self) -> None:
        driver = _driver()
        self._destroy: Any = None
        status, self._event = driver.cuEventCreate(int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        _check(status, "cuEventCreate")
        self._record, self._wait, self._query = driver.cuEventRecord, driver.cuStreamWaitEvent, driver.cuEventQuery
        self._destroy = driver.cuEventDestroy
        self._not_ready = driver.CUresult.CUDA_ERROR_NOT_READY

    def record(self, stream: Any) -> None:
        """Mark where `stream` is."""
        status = self._record(self._event, stream)[0]
        if status:
            _check(status, "cuEventRecord")

    def wait(self, stream: Any) -> None:
        """Make `stream` wait for the mark."""
        status = self._wait(stream, self._event, 0)[0]
        if status:
            _check(status, "cuStreamWaitEvent")

    def query(self) -> bool:
        """Whether the mark was reached; True before the first one. Raises TransportError if the device has failed."""
        status = self._query(self._event)[0]
        if not status:
            return True
        if status != self._not_ready and int(status) not in _CAPTURE_ERRORS:
            _check(status, "cuEventQuery")  # else one would wait for good
        return False

    def __del__(self) -> None:
        if self._destroy is not None:
            self._destroy(self._event)  # what was told to wait for it still does


class FlagPage:
    """Looks at flags in device memory and sets all of them while every other stream may be blocked.

    Everything is allocated beforehand, since an allocation may wait for the device, and moves by copy engine alone.
    """

    def __init__(self, flags: torch.Tensor) -> None:
        self._driver = _driver()
        self._stream = OwnStream(flags.device, is_high_priority=True)
        self._flags = flags
        self._seen = torch.zeros_like(flags, device="cpu", pin_memory=True)
        self._ones = torch.ones_like(flags, device="cpu").pin_memory()

    def read(self) -> torch.Tensor:
        """All flags now, on the CPU."""
        self._run(self._driver.cuMemcpyDtoHAsync, self._seen.data_ptr(), self._flags.data_ptr())
        return self._seen

    def set_all(self) -> None:
        """Set every flag to 1."""
        self._run(self._driver.cuMemcpyHtoDAsync, self._flags.data_ptr(), self._ones.data_ptr())

    def destroy(self) -> None:
        """Give the stream up."""
        self._stream.destroy()

    def _run(self, copy: Any, target_at: int, source_at: int) -> None:
        with torch.cuda.device(self._flags.device):
            _check(copy(target_at, source_at, self._flags.nbytes, self._stream.handle)[0], copy.__name__)
            _check(self._driver.cuStreamSynchronize(self._stream.handle)[0], "cuStreamSynchronize")


class OwnStream:
    """A stream that nobody else is handed: PyTorch's pool gives the same stream out again after 32 others.

    Behind a wait for a flag, somebody else's work on a shared stream could be what the flag waits for.
    """

    def __init__(self, device: torch.device, *, is_high_priority: bool) -> None:
        self._driver = _driver()
        with torch.cuda.device(device):
            _, least, greatest = self._driver.cuCtxGetStreamPriorityRange()
            flags = int(self._driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            status, self.handle = self._driver.cuStreamCreateWithPriority(
                flags, greatest if is_high_priority else least
            )
        _check(status, "cuStreamCreateWithPriority")
        self.torch = torch.cuda.ExternalStream(int(self.handle), device=device)

    def destroy(self) -> None:
        """Give the stream up; work on it is completed first."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._driver.cuStreamDestroy(handle)


# What libraries keep for a stream, they keep for good: contexts that are closed leave theirs to later ones.
# Without a lock: garbage collection may give streams back while this thread borrows one.
_spare_streams: dict[torch.device, list[OwnStream]] = {}


def borrow_stream(device: torch.device) -> OwnStream:
    """A stream of usual priority that nobody else uses until it is given back."""
    with suppress(KeyError, IndexError):
        return _spare_streams[device].pop()
    return OwnStream(device, is_high_priority=False)


def give_stream_back(device: torch.device, stream: OwnStream) -> None:
    """Leave it to others. What is on it must have been done."""
    _spare_streams.setdefault(device, []).append(stream)


def free_memory_bytes() -> int:
    """What is free of the current device's memory, for all processes; nothing is waited for."""
    status, free_bytes, _ = _driver().cuMemGetInfo()
    _check(status, "cuMemGetInfo")
    return int(free_bytes)


def allow_calls_during_capture() -> None:
    """Let this thread ask for events and copy flags while another thread captures a CUDA graph.

    In CUDA's global mode of capture, PyTorch's default and Megatron's for backward passes, what a thread does that does
    not say so breaks the capture.
    """
    if torch.cuda.is_initialized():
        driver = _driver()
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def may_wait_for_device() -> bool:
    """Whether this thread may free what others wait for: it captures no CUDA graph, and the device has not failed."""
    try:
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    except RuntimeError:  # of the device: whoever uses it will meet that
        return False


_capture_lock = threading.RLock()  # a signal's handler may close contexts in the middle of a capture


@contextmanager
def captures_excluded() -> Iterator[None]:
    """Keep captures of ours out of what waits for the device, which no capture allows."""
    with _capture_lock:
        yield


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep Python's garbage collection out of a capture that the program knows nothing of.

    What it finds may be somebody's memory whose freeing waits for the device, which no capture allows.
    """
    with captures_excluded():
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


class StreamGraph:
    """What a stream of our own is told once, launched again on any stream by one call."""

    def __init__(self, stream: OwnStream, tell: Callable[[], None]) -> None:
        """tell: makes the calls; nothing runs. Raises what it raises, or TransportError."""
        self._exec: Any = None
        driver = self._driver = _driver()
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        graph = None
        try:
            with _no_collection():
                try:
                    _check(driver.cuStreamBeginCapture(stream.handle, mode)[0], "cuStreamBeginCapture")
                    tell()
                finally:  # whatever was raised: the stream is others', too
                    status, graph = driver.cuStreamEndCapture(stream.handle)
            _check(status, "cuStreamEndCapture")
            status, self._exec = driver.cuGraphInstantiate(graph, 0)
            _check(status, "cuGraphInstantiate")
        finally:
            if graph is not None and int(graph):
                driver.cuGraphDestroy(graph)
        self._launch = driver.cuGraphLaunch

    def launch(self, stream: int) -> None:
        """Enqueue all of it."""
        status = self._launch(self._exec, stream)[0]
        if status:
            _check(status, "cuGraphLaunch")

    def __del__(self) -> None:
        if self._exec is not None:  # one that is running is freed when it is done
            driver, relaxed = self._driver, self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            # Garbage may be found while this or another thread captures a graph, which CUDA would break over this call.
            status, mode = driver.cuThreadExchangeStreamCaptureMode(relaxed)
            driver.cuGraphExecDestroy(self._exec)
            if not status:  # else the driver has gone
                driver.cuThreadExchangeStreamCaptureMode(mode)


class Driver:
    """Streams, events, flags and mapped memory of CUDA devices; streams are the driver's handles, as integers."""

    memory, event, graph, flag_page, new_stream = StreamMemory, StreamEvent, StreamGraph, FlagPage, OwnStream
    batch = staticmethod(batch)
    borrow_stream = staticmethod(borrow_stream)
    give_stream_back = staticmethod(give_stream_back)
    free_memory_bytes = staticmethod(free_memory_bytes)

    def current_stream(self, device: torch.device) -> int:
        """PyTorch's current one."""
        return torch._C._cuda_getCurrentRawStream(device.index)

    def wait_for_current_stream(self, device: torch.device) -> None:
        """Let the host wait until PyTorch's current stream has done what it was told."""
        torch.cuda.current_stream(device).synchronize()

    def is_capturing(self) -> bool:
        """Whether somebody captures a CUDA graph on PyTorch's current stream."""
        return bool(torch._C._cuda_isCurrentStreamCapturing())

    def allocate_shared(self, size_bytes: int, device: torch.device) -> torch.Tensor:
        """Memory that can be mapped; bytes."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        return symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)

    def share(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Map the memory of all ranks of `group`, which bring equally large tensors; collective.

        Returns what holds the mapping; its `buffer_ptrs` are the addresses, by rank.
        """
        from torch.distributed import _symmetric_memory as symmetric_memory

        return symmetric_memory.rendezvous(tensor, group.group_name)


CUDA = Driver()
