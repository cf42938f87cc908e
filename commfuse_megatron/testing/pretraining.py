"""Lets Megatron's whole training program run on CPU ranks: what `cpu_megatron` does, and the walls of `pretrain`.

For tests and for examples that are asked to (`--cpu`). As there, every shim removes one wall, is named after it, and
nothing is active outside `cpu_pretraining`. Enter it before anything imports `megatron.training`, and give the script
the flags of `CPU_FLAGS`, since fused kernels and NCCL need a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from commfuse_megatron.testing.cpu import cpu_megatron, does_nothing, replaced

#: Megatron's own flags that a run on the CPU needs. Later flags win, so put them first on a command line.
CPU_FLAGS: tuple[str, ...] = (
    "--distributed-backend=gloo",
    "--transformer-impl=local",
    "--use-cpu-initialization",
    "--num-workers=0",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)


@contextmanager
def cpu_pretraining() -> Iterator[None]:
    """Run `megatron.training.pretrain` on the CPU inside the with-block.

    Raises ConfigError as `cpu_megatron` does.
    """
    with ExitStack() as stack:
        stack.enter_context(cpu_megatron())
        for shim in PRETRAINING_SHIMS.values():
            stack.enter_context(shim())
        yield


def _one_device() -> AbstractContextManager[None]:
    """Wall: Megatron sets up its groups only where it counts a GPU, and asks that GPU for its architecture."""
    properties = SimpleNamespace(major=9, minor=0, total_memory=1 << 36, name="cpu", multi_processor_count=1)
    return replaced(
        torch.cuda,
        device_count=lambda: 1,
        set_device=does_nothing(),
        get_device_properties=lambda *_: properties,
        get_device_capability=lambda *_: (properties.major, properties.minor),
    )


def _memory_statistics() -> AbstractContextManager[None]:
    """Wall: memory is reported after the first steps and before checkpoints."""
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return replaced(
        torch.cuda,
        **{name: lambda *_, **__: 0 for name in sizes},
        memory_stats=lambda *_, **__: {},
        reset_peak_memory_stats=does_nothing(),
        mem_get_info=lambda *_: (1, 1),
    )


def _cuda_is_required() -> AbstractContextManager[None]:
    """Wall: `initialize_megatron` asserts that there is a GPU."""
    from megatron.training import training

    return replaced(training, initialize_megatron=partial(training.initialize_megatron, allow_no_cuda=True))


def _warm_up_of_fusions() -> AbstractContextManager[None]:
    """Wall: functions that `CPU_FLAGS` leave unused are compiled at the start, for some 15 s."""
    from megatron.training import training

    return replaced(training, set_jit_fusion_options=does_nothing())


def _norm_under_sequence_parallelism() -> AbstractContextManager[None]:
    """Wall: without Apex and Transformer Engine, Megatron's norms refuse sequence parallelism, in stock models too."""
    from commfuse_megatron.plugin.compat import WrappedTorchNorm
    from commfuse_megatron.plugin.norm import CommFuseNorm

    def build(_: type, *args: Any, **kwargs: Any) -> torch.nn.Module:
        return CommFuseNorm(*args, **kwargs)

    return replaced(WrappedTorchNorm, __new__=staticmethod(build))


def _hybrid_final_norm() -> AbstractContextManager[None]:
    """Wall: the stack of a hybrid model ends in Transformer Engine's norm, whatever its spec says."""
    from megatron.core.models.hybrid import hybrid_block

    from commfuse_megatron.plugin.norm import CommFuseNorm

    return replaced(hybrid_block, TENorm=CommFuseNorm)


#: Wall -> the shim that removes it, in the order in which they must be entered.
PRETRAINING_SHIMS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "one_device": _one_device,
    "memory_statistics": _memory_statistics,
    "cuda_is_required": _cuda_is_required,
    "warm_up_of_fusions": _warm_up_of_fusions,
    "norm_under_sequence_parallelism": _norm_under_sequence_parallelism,
    "hybrid_final_norm": _hybrid_final_norm,
}
