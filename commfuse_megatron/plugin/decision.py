"""What one layer remembers, and its choice at every call between the overlapped op and Megatron's own path.

Kept apart from the layer classes because `convert_model` turns built layers into ours without running a constructor:
the state appears on first use. The state is no part of the module for copying, pickling and checkpoints; only what was
asked for survives a copy, never a context.
"""

import dataclasses
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils import parametrize

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.ops import DeferredWeightGrad
from commfuse_megatron.ops.weight_grad import WeightGrad
from commfuse_megatron.plugin import arguments, capture
from commfuse_megatron.plugin.compat import fuses_weight_gradient, group_of
from commfuse_megatron.plugin.contexts import context_for, existing_context
from commfuse_megatron.plugin.main_grad import DelayedWeightGrads, main_grad_target
from commfuse_megatron.plugin.stand_in import class_name
from commfuse_megatron.plugin.support import ALL_REDUCE_NOT_RUN, misses_nothing, unsupported_reason
from commfuse_megatron.problem import Problem

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_commfuse_state"


@dataclass
class LayerState:
    """Memory of one layer: the wishes it was built with, what it resolved, and what its calls did.

    overlap_config: the configuration given to `apply_to_spec` or `convert_model`; None reads the flags.
    name: how log lines call the layer. place: the layer's first among the calls that its context
    compared between ranks.
    kept_reason: why a layer that is none of ours was not replaced.
    overlapped_calls: forward passes whose transfers, if any, ran beside GEMMs. sequential_calls: those that the planner
    had run one after the other, by its reason. stock_calls: those that took Megatron's own path, by the reason.
    wants_gathered, gathered: during a call, whether the gathered input is to be kept, and where.
    """

    overlap_config: OverlapConfig | None = None
    name: str | None = None
    kept_reason: str | None = None
    overlapped_calls: int = 0
    sequential_calls: Counter[str] = field(default_factory=Counter)
    stock_calls: Counter[str] = field(default_factory=Counter)
    context: OverlapContext | None = None
    place: int | None = None
    wants_gathered: bool = False
    gathered: torch.Tensor | None = None
    _file: str | None = None
    _file_config: OverlapConfig | None = None

    def config(self, transformer_config: Any) -> OverlapConfig:
        """The configuration in force: the one given, else that of the flags; a file is read once per layer."""
        if self.overlap_config is not None:
            return self.overlap_config
        file = arguments.config_file(transformer_config)
        if self._file_config is None or file != self._file:
            self._file, self._file_config = file, arguments.read_config(file)
        return self._file_config

    def __deepcopy__(self, memo: dict) -> "LayerState":
        return LayerState(self.overlap_config, self.name, self.kept_reason)

    def __reduce__(self) -> tuple:
        return LayerState, (self.overlap_config, self.name, self.kept_reason)


def state_of(layer: torch.nn.Module) -> LayerState:
    """The memory of `layer`, made on first use."""
    state = layer.__dict__.get(_ATTRIBUTE)
    if state is None:
        state = LayerState()
        object.__setattr__(layer, _ATTRIBUTE, state)
    return state


def kept_reason_of(layer: torch.nn.Module) -> str | None:
    """Why `layer` was not replaced by one of ours, if that was ever decided."""
    state = layer.__dict__.get(_ATTRIBUTE)
    return None if state is None else state.kept_reason


def computing_weight_once[F: Callable[..., Any]](forward: F) -> F:
    """Decorates a `forward` of ours that stands for one of Megatron's, which computes a parametrized weight once.

    Ours looks at the weight to decide, and Megatron's, where it decides for that, asks for it again. A second time may
    change its state, such as the vectors of a spectral norm, and give another weight.
    """

    @functools.wraps(forward)
    def computes_once(layer: Any, *args: Any, **kwargs: Any) -> Any:
        if "weight" not in layer._modules.get("parametrizations", ()):
            return forward(layer, *args, **kwargs)
        with parametrize.cached():
            return forward(layer, *args, **kwargs)

    return computes_once  # type: ignore[return-value]


def overlap_context(
    layer: Any,
    input_: torch.Tensor,
    weight: torch.Tensor,
    problems: Callable[[OverlapContext], Sequence[Problem]],
    *,
    grad_output_buffer: list | None = None,
) -> OverlapContext | None:
    """The context to overlap this call of a linear or embedding with, or None: see `context_unless`.

    Args:
        problems: what the op would state (`ops.problems`); asked for while a CUDA graph is captured only.
    """
    reason = unsupported_reason(layer, input_, weight=weight, grad_output_buffer=grad_output_buffer)
    if reason is None and not asks_for_all_reduce(layer, is_cuda=input_.is_cuda):
        reason = ALL_REDUCE_NOT_RUN
    if reason is None and capture.is_capturing(input_):
        existing = existing_context_of(layer)
        reason = capture.reason_not_to_capture(existing, () if existing is None else problems(existing))
    return context_unless(layer, input_, reason)


def asks_for_all_reduce(layer: Any, *, is_cuda: bool) -> bool:
    """Whether a call may all-reduce under its GEMMs, if it does that: on GPUs where the configuration asks for it."""
    if not is_cuda or getattr(layer, "sequence_parallel", True):
        return True
    linear = state_of(layer).config(layer.config).linear
    return "sliced" in (linear.fprop.path, linear.dgrad.path)


def context_unless(
    layer: Any, input_: torch.Tensor, reason: str | None, *, without_stock: str = ""
) -> OverlapContext | None:
    """The context to overlap this call with, or None where it takes Megatron's own path for `reason`, counted and
    logged.

    Whoever got a context runs its op by `run_operation`, or calls `count_call` when the op has returned.

    Args:
        without_stock: where there is no path of Megatron's, what to do instead; every reason is an error then.

    Raises UnsupportedError instead of returning None where the configuration says so, unless that misses
    nothing (`misses_nothing`).
    Raises ShapeError on all ranks where they decide differently, if the configuration has that checked.
    """
    state = state_of(layer)
    _compare_decision(layer, input_, state, reason)
    if reason is None:
        return context_of(layer)
    if without_stock:
        raise UnsupportedError(f"{label_of(layer)}: {reason}. {without_stock}")
    if not misses_nothing(reason) and state.config(layer.config).fallback.unsupported == "raise":
        raise UnsupportedError(f"{label_of(layer)}: {reason}")
    if reason not in state.stock_calls and group_of(layer).rank() == 0:
        level = logging.INFO if misses_nothing(reason) else logging.WARNING
        logger.log(level, "%s takes Megatron's own path: %s", label_of(layer), reason)
    state.stock_calls[reason] += 1
    return None


def count_call(layer: Any, context: OverlapContext) -> None:
    """Count the forward pass of `layer` that `context` has just run."""
    state = state_of(layer)
    assert context.latest_pass is not None
    plan = context.latest_pass.plan
    # A column-parallel linear without sequence parallelism sends nothing forward: its backward pass does.
    if plan.overlaps or not context.latest_pass.problem.sends:
        state.overlapped_calls += 1
    else:
        state.sequential_calls[f"{plan.path}: {plan.reason}"] += 1


def _compare_decision(layer: Any, input_: torch.Tensor, state: LayerState, reason: str | None) -> None:
    if group_of(layer).size() == 1:
        return
    try:
        if not state.config(layer.config).check_decisions:
            return
    except ConfigError:  # of a layer that is switched off; others have raised when they were built
        return
    if capture.is_capturing(input_) and existing_context_of(layer) is None:  # none can be made to compare by
        return
    consensus = context_of(layer).consensus
    number = consensus.next_place()
    if state.place is None:  # names may be those of many layers
        state.place = number
    place = f"{label_of(layer)}, compared layer call {number} (this layer's first was {state.place})"
    how = "overlapped" if getattr(layer, "sequence_parallel", True) else "overlapped, and sequence_parallel is off"
    consensus.agree(f"{place}: {reason or how}", topic=place, is_place=True)


def run_operation(
    layer: Any,
    operation: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    context: OverlapContext,
    **options: Any,
) -> Any:
    """What an overlapped `operation` gives for this call, which is counted.

    Megatron adds the bias to the output, so one of a wider dtype (an adapter's, or any under autocast) gives an output
    of that dtype; the operation has one dtype for all, and the bias is added to its output then.
    """
    is_inside = bias is None or bias.dtype == dtype_of_operation(inputs[0])
    given = {"context": context, "weight_grad": weight_grad_of(layer, weight), **options}
    output = operation(*inputs, weight, bias if is_inside else None, **given)
    count_call(layer, context)
    if is_inside:
        return output
    return (output[0] + bias, *output[1:]) if isinstance(output, tuple) else output + bias


def run_with_own_bias(
    layer: Any,
    operation: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    weight: torch.Tensor,
    context: OverlapContext,
    **options: Any,
) -> tuple[Any, torch.Tensor | None]:
    """The same with the bias of the layer, and what of it is returned to the caller."""
    added, returned = biases_of(layer, inputs[0])
    return run_operation(layer, operation, inputs, weight, added, context, **options), returned


def weight_grad_of(layer: Any, weight: torch.Tensor) -> WeightGrad:
    """Where this call's weight gradient goes: `main_grad` under gradient accumulation fusion, else to autograd; later
    where Transformer Engine is told so."""
    target = None
    if fuses_weight_gradient(layer) and weight.requires_grad and torch.is_grad_enabled():
        target = main_grad_target(weight, f"main_grad of {state_of(layer).name or 'the layer'}")
    store = vars(layer).get("wgrad_store")
    if store is None or not store.delay_wgrad_compute():
        return target
    return DeferredWeightGrad(DelayedWeightGrads(store, weight, target), target)


def biases_of(layer: Any, input_: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The bias that a built linear adds, and the one that it returns to the caller; at most one of them is given.

    Transformer Engine casts both to the dtype that it computes in; Megatron's own linears cast neither.
    """
    own = vars(layer)
    if "te_return_bias" in own:  # without a bias Transformer Engine's has an empty tensor
        bias = layer.bias.to(dtype_of_operation(input_)) if layer.use_bias else None
        return (None, bias) if own["te_return_bias"] else (bias, None)
    return (None, layer.bias) if layer.skip_bias_add else (layer.bias, None)


def dtype_of_operation(input_: torch.Tensor) -> torch.dtype:
    """The dtype that a linear computes in: autocast's, or that of its input."""
    kind = input_.device.type
    is_cast = torch.is_autocast_enabled(kind) and input_.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else input_.dtype


def context_of(layer: Any) -> OverlapContext:
    """The context of an overlapped linear; made, collectively over its group, when first needed."""
    state = state_of(layer)
    config, context, group = _context_config(layer, state), state.context, group_of(layer)
    if context is None or not context.is_usable or context.group is not group or context.config is not config:
        context = context_for(group, config)
        if context is not state.context:
            state.context, state.place = context, None
    return context


def existing_context_of(layer: Any) -> OverlapContext | None:
    """The same, if it is made; makes none."""
    return existing_context(group_of(layer), _context_config(layer, state_of(layer)))


def _context_config(layer: Any, state: LayerState) -> OverlapConfig:
    config = state.config(layer.config)
    return _without_measurements(config) if getattr(layer.config, "deterministic_mode", False) else config


@functools.lru_cache(maxsize=16)
def _without_measurements(config: OverlapConfig) -> OverlapConfig:
    """The same, but plans come from the model alone: a measurement may choose another one, hence other bits, next time.

    Equal configurations give the same object.
    """
    return dataclasses.replace(config, plan=dataclasses.replace(config.plan, measure="never"))


def label_of(layer: torch.nn.Module) -> str:
    """How log lines call a layer."""
    return f"{state_of(layer).name or 'layer'} ({class_name(layer)})"
