"""Lets unmodified Megatron-Core run on CPU tensors and gloo, for tests and for the demo without a GPU.

Megatron names CUDA in many places where any device would do. Each shim below removes one such wall, is named after it,
and puts everything back when it ends; nothing is active outside `cpu_megatron`. What Megatron decided *at import* stays
decided, so enter `cpu_megatron` before the first `import megatron` where Transformer Engine is installed.
"""

import contextlib
import functools
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from commfuse_megatron.errors import ConfigError

_CPU = torch.device("cpu")

#: Sets attributes of an owner within a with-block, and puts the old ones back.
replaced = functools.partial(mock.patch.multiple, create=True)


@contextmanager
def cpu_megatron(*, without: Collection[str] = ()) -> Iterator[None]:
    """Run Megatron-Core on the CPU inside the with-block: build models, forward, backward, DDP, optimizer steps.

    Warnings that Apex, Transformer Engine or a CUDA runtime is missing are not shown in there; all others are.

    Args:
        without: names from `SHIMS` to leave out, which brings their wall back.

    Raises ConfigError for an unknown name, and when Megatron was already imported with Transformer Engine.
    """
    unknown = sorted(set(without) - set(SHIMS))
    if unknown:
        raise ConfigError(f"no shim is called {', '.join(unknown)}; there are {', '.join(SHIMS)}")
    with ExitStack() as stack:
        stack.enter_context(_no_word_of_missing_gpu_packages())
        for name, shim in SHIMS.items():
            if name not in without:
                stack.enter_context(shim())
        yield


@contextmanager
def _hide_transformer_engine() -> Iterator[None]:
    """Wall: with Transformer Engine importable, Megatron takes its CUDA-only optimizer kernels and modules."""
    name = "transformer_engine"
    if (name in sys.modules and sys.modules[name] is None) or importlib.util.find_spec(name) is None:
        yield
        return
    if "megatron.core" in sys.modules:
        raise ConfigError(
            "Megatron was imported with Transformer Engine, which needs CUDA; enter cpu_megatron() before anything"
            " imports megatron, or leave the shim out with cpu_megatron(without=['transformer_engine'])"
        )
    sys.modules[name] = None  # type: ignore[assignment]  # Python's own way to make an import fail
    try:
        yield
    finally:
        del sys.modules[name]


def _current_device() -> AbstractContextManager[None]:
    """Wall: buffers and weights are allocated on `torch.cuda.current_device()`."""
    return replaced(torch.cuda, current_device=lambda: _CPU)


@contextmanager
def _no_word_of_missing_gpu_packages() -> Iterator[None]:
    """Megatron warns some ten times of what a CPU has no use for, and of what `_hide_transformer_engine` has hidden."""
    extensions = logging.getLogger("torch.utils.cpp_extension")  # which says that there is no CUDA runtime
    level = extensions.level
    extensions.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"(Transformer Engine and )?Apex (is|are) not installed")
            yield
    finally:
        extensions.setLevel(level)


def does_nothing() -> Callable[..., None]:
    """A function of its own at every call: torch.compile takes one that stands in two places for two that differ."""
    return lambda *_, **__: None


class _Event:
    """Stands for a point in the one queue of work that a CPU has; it has always been passed."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = does_nothing()

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "_Event") -> float:
        return 0.0


class _Stream(_Event):
    """Stands for that queue."""

    device = _CPU
    wait_stream = wait_event = does_nothing()

    def record_event(self, event: _Event | None = None) -> _Event:
        return event or _Event()


@contextmanager
def _streams() -> Iterator[None]:
    """Wall: streams, events, synchronisation and NVTX ranges are used without asking for a GPU."""
    with (
        replaced(
            torch.cuda,
            Stream=_Stream,
            Event=_Event,
            stream=lambda *_: contextlib.nullcontext(),
            current_stream=_Stream,
            default_stream=_Stream,
            synchronize=does_nothing(),
            empty_cache=does_nothing(),
        ),
        replaced(torch.cuda.nvtx, range_push=does_nothing(), range_pop=does_nothing()),
    ):
        yield


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Reads "cuda" as "cpu" in torch calls and pins no memory; `tensor.type()` answers as a CUDA tensor would."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextmanager
def _cuda_literals() -> Iterator[None]:
    """Wall: `device="cuda"`, `.cuda()` and comparisons with "torch.cuda.FloatTensor" are written out.

    Also in what autograd calls: a mode is off while it handles `backward`, so recomputed layers would not be under it.
    """
    stock_run = torch.autograd._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        with _CudaMeansCpu():
            return stock_run(*args, **kwargs)

    with replaced(torch.autograd, _engine_run_backward=run_backward), _CudaMeansCpu():
        yield


@contextmanager
def _rng() -> Iterator[None]:
    """Wall: the tensor-parallel random number tracker keeps states of CUDA generators."""
    from megatron.core.tensor_parallel import random

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):
        """The same named states, of the CPU generator."""

        _current_state_name: str

        @contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            """Draw from the state `name` inside the with-block and advance it."""
            if name not in self.states_:
                raise KeyError(f"random number state {name} was never added")
            outer_name, outer_state = self._current_state_name, torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            self._current_state_name = name
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer_state)
                self._current_state_name = outer_name

    def get_state(*_: Any, **__: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
        torch.set_rng_state(state)

    with (
        replaced(
            random,
            CudaRNGStatesTracker=CpuRNGStatesTracker,
            _get_cuda_rng_state=get_state,
            _set_cuda_rng_state=set_state,
            _CUDA_RNG_STATE_TRACKER=None,
            _CUDA_RNG_STATE_TRACKER_INITIALIZED=False,
        ),
        replaced(torch.cuda, get_rng_state=get_state, set_rng_state=set_state, manual_seed=torch.manual_seed),
    ):
        yield


def _moe_split_sizes() -> AbstractContextManager[None]:
    """Wall: token counts become numpy arrays only when they lie on a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    return replaced(token_dispatcher, maybe_move_tensor_to_cpu=to_cpu)


def _recompute_fp8_flag() -> AbstractContextManager[None]:
    """Wall: selective recompute takes `fp8=False` for "fp8 is set" and then needs Transformer Engine."""
    from megatron.core.tensor_parallel import random

    stock_init = random.CheckpointWithoutOutput.__init__

    def init(self: Any, fp8: Any = False) -> None:
        stock_init(self, fp8 or None)

    return replaced(random.CheckpointWithoutOutput, __init__=init)


def _recomputed_storage() -> AbstractContextManager[None]:
    """Wall: selective recompute compiles C++ at its first use, to let one tensor have another's memory.

    That takes a compiler, ninja and up to a minute per process; a copy below autograd gives the same bytes.
    """
    from megatron.core.tensor_parallel import random

    def copy_storage(target: torch.Tensor, source: torch.Tensor) -> None:
        memory = source.untyped_storage()
        target.untyped_storage().resize_(memory.nbytes())
        target.untyped_storage().copy_(memory)

    return replaced(random, _get_share_storage=lambda: copy_storage)


#: Wall -> the shim that removes it, in the order in which they must be entered.
SHIMS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "transformer_engine": _hide_transformer_engine,
    "current_device": _current_device,
    "streams": _streams,
    "cuda_literals": _cuda_literals,
    "rng": _rng,
    "moe_split_sizes": _moe_split_sizes,
    "recompute_fp8_flag": _recompute_fp8_flag,
    "recomputed_storage": _recomputed_storage,
}
