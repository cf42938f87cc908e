"""Other functions in place of torch.distributed's collectives, for a while: to record them, or to do without them.

Whoever looks the collectives up by name (`torch.distributed.all_gather_into_tensor(...)`) gets the replacement, and so
do modules that keep them under a name of their own, as Megatron's and Transformer Engine's do. Beware: replacements are
visible to every thread of the process; only measurements make them.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from commfuse_megatron.runtime.recorder import Recorder
from commfuse_megatron.transport.base import Transfer

_NAMES = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_to_all_single": "all-to-all",
}
_KEEP_COPIES = ("megatron", "transformer_engine")

#: Makes the replacement of a collective from its name and the original.
Replace = Callable[[str, Callable[..., Any]], Callable[..., Any]]


@contextmanager
def replaced_collectives(replace: Replace, names: tuple[str, ...] = tuple(_NAMES)) -> Iterator[None]:
    """Inside the with-block, `replace(name, original)` stands for each of torch.distributed's `names`."""
    originals = {name: getattr(dist, name) for name in names}
    replacements = {id(original): replace(name, original) for name, original in originals.items()}
    places = [(dist, name, original) for name, original in originals.items()]
    for module_name, module in list(sys.modules.items()):
        if module is not None and module_name.partition(".")[0] in _KEEP_COPIES:
            kept = [(name, value) for name, value in vars(module).items() if id(value) in replacements]
            places += [(module, name, value) for name, value in kept]
    for owner, name, original in places:
        setattr(owner, name, replacements[id(original)])
    try:
        yield
    finally:
        for owner, name, original in places:
            setattr(owner, name, original)


# --- doing without ----------------------------------------------------------------------------------------------------


class _Done:
    """Stands for a collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def local_copies() -> Iterator[None]:
    """Inside the with-block, all-gathers, reduce-scatters and all-to-alls only copy this rank's own data into their
    results.

    The results are wrong on purpose: what runs then is the same work with as many bytes written and nothing sent, a
    lower bound on the time with communication. All-reduces (the loss, the gradients of norms) stay, and with them the
    ranks in step.
    """

    def replace(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def copy_locally(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            tensors = [value for value in given.values() if isinstance(value, torch.Tensor)]
            output, source = tensors[0].view(-1), tensors[1].reshape(-1)
            if name == "all_gather_into_tensor":
                output.view(-1, source.numel()).copy_(source.expand(output.numel() // source.numel(), -1))
            else:
                output.copy_(source[: output.numel()])
            return _Done() if given.get("async_op") else None

        return copy_locally

    with replaced_collectives(replace, ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")):
        yield


# --- recording --------------------------------------------------------------------------------------------------------


@contextmanager
def recorded_calls(recorder: Recorder) -> Iterator[None]:
    """Inside the with-block, collectives become transfers of `recorder` and PyTorch's GEMMs its computations.

    For code that records nothing itself: Megatron's own layers, the sequential path. Kernels that PyTorch does not know
    of (Triton) are not seen, and neither are elementwise operations.
    """

    def replace(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def record(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            group = given.get("group")
            start = recorder.now()
            work = original(*args, **kwargs)
            if dist.get_world_size(group) == 1:
                return work
            if work is None or not given.get("async_op"):
                recorder.add_transfer(_NAMES[name], start, None)
                return work
            return _RecordedWork(work, recorder, _NAMES[name])

        record.observes = original  # type: ignore[attr-defined]  # so layers go on as without: see `plugin/compat.py`
        return record

    with replaced_collectives(replace), _RecordedGemms(recorder):
        yield


class _RecordedWork(Transfer):
    """A collective in flight that notes when it was seen to be over; else it behaves as torch's handle does."""

    lanes = ()

    def __init__(self, work: Any, recorder: Recorder, name: str) -> None:
        self._work = work
        self._recorder = recorder
        self._handle: object | None = recorder.open_transfer(name, self, None)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        # During `open_transfer`, which waits on a stream of its own, there is no handle yet.
        if getattr(self, "_handle", None) is not None:
            self._recorder.close_transfer(self._handle)
            self._handle = None
        return result

    def is_complete(self) -> bool:
        return bool(self._work.is_completed())

    def __getattr__(self, name: str) -> Any:
        if name == "_handle":
            raise AttributeError(name)
        return getattr(self._work, name)


_aten = torch.ops.aten
_GEMMS = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm}


class _RecordedGemms(TorchDispatchMode):
    """Sees PyTorch's products below autograd, so also those of backward passes."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.overloadpacket not in _GEMMS:
            return func(*args, **(kwargs or {}))
        mark = self._recorder.now()
        result = func(*args, **(kwargs or {}))
        a, b = [operand for operand in args if isinstance(operand, torch.Tensor)][-2:]  # a dtype may follow
        self._recorder.add_compute(f"GEMM {a.shape[-2]}x{b.shape[-1]}x{a.shape[-1]}", mark, None)
        return result
