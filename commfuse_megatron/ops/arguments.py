"""Checks of what a user passes to an operation, and the problem it states.

Every check that could fail on one rank alone ends in `context.consensus.refuse`, so that the other ranks raise too.
Arguments are looked up first: like some seen before, they need no check. Beware: whatever a wrong kind of argument
raises there counts as "not seen before", and what a key cannot tell from a good one must not be used after it.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from commfuse_megatron.errors import ConfigError, ShapeError
from commfuse_megatron.ops.kinds import OF_TORCH, find_kind_complaint, stands_for_others
from commfuse_megatron.ops.trial import Given, Rehearse, run_trial
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad, WeightGradQueue, target_of
from commfuse_megatron.problem import DTYPE_BYTES, GemmProblem, Problem, shard_range
from commfuse_megatron.runtime.context import OverlapContext
from commfuse_megatron.runtime.prepared import PassContext, PreparedPass

# In which gradients may be added up, whatever the weight is; else in its own dtype.
_WIDE = (torch.float32, torch.float64)

# Shapes that vary from call to call must not fill the memory: with many chunks one of them takes over 100 KB.
_MOST_KNOWN_CALLS = 1024


class Operation(NamedTuple):
    """An operation's name, how to try out plans for it, and what users call, whose annotations are checked."""

    name: str
    rehearse: Rehearse
    function: Callable[..., object]


def require_context(op: str, context: object) -> None:
    """Raise ConfigError unless `context` is one: without it there is nobody to agree with."""
    if not isinstance(context, OverlapContext):
        raise ConfigError(
            f"{op}: context must be an OverlapContext, made once per process group; got a {type(context).__name__}"
        )


def cast_for_autocast(kind: str, *operands: Any) -> tuple[Any, ...]:
    """Cast as autocast for devices of `kind` would for a linear: it does not reach GEMMs into a given output."""
    if not torch.is_autocast_enabled(kind):
        return operands
    dtype = torch.get_autocast_dtype(kind)

    def cast(operand: Any) -> Any:
        try:  # autocast leaves float64 alone
            is_cast = isinstance(operand, torch.Tensor) and operand.is_floating_point()
            return operand.to(dtype) if is_cast and operand.dtype != torch.float64 else operand
        except torch.OutOfMemoryError:
            raise
        except Exception:  # of a wrong kind: the checks say which
            return operand

    return tuple(map(cast, operands))


def needs_autograd(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether anybody may ask for gradients; without, `torch.autograd.Function` is 14 us of host time for nothing."""
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)


def unusable_reason(*operands: torch.Tensor | None) -> str:
    """What is not told by shapes and types and keeps operands from being used; "" if nothing, as nearly always.

    "unsavable": a backward pass may be asked for, and some were made in inference mode. "negated": some are negative by
    a mark beside their memory. "transformed": a transform of torch.func, or forward-mode differentiation, looks on.
    "foreign": some stand for memory that is not their own.
    """
    given = [operand for operand in operands if operand is not None]
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return "transformed"
    is_usual = [type(o) in OF_TORCH and not o._is_zerotensor() and not torch._is_functional_tensor(o) for o in given]
    if not all(is_usual) and any(map(stands_for_others, given)):
        return "foreign"
    if any([operand.is_neg() for operand in given]):
        return "negated"
    if not any([operand.is_inference() for operand in given]) or not torch.is_grad_enabled():
        return ""
    return "unsavable" if any(operand.requires_grad for operand in given) else ""


def complain_if_unusable(named: Mapping[str, torch.Tensor]) -> str | None:
    """The same in a sentence; None if nothing keeps the operands from being used."""
    reason = unusable_reason(*named.values())
    if reason == "transformed":
        return "torch.func transforms and forward-mode differentiation are not supported"
    if reason == "foreign":
        which = _say_which(named, stands_for_others)
        return f"{which} not a tensor with memory of its own: pass the tensor that it stands for"
    if reason == "negated":
        return f"{_say_which(named, torch.Tensor.is_neg)} lazily negated: pass resolve_neg() of it"
    if reason == "unsavable":
        which = _say_which(named, torch.Tensor.is_inference)
        return f"{which} made in inference mode, but gradients are asked for: make copies outside of it"
    return None


def _say_which(named: Mapping[str, torch.Tensor], is_meant: Callable[[torch.Tensor], bool]) -> str:
    """Such as "x was"."""
    names = [name for name, tensor in named.items() if is_meant(tensor)]
    return f"{' and '.join(names)} {'were' if len(names) > 1 else 'was'}"


def with_unit_stride(tensor: torch.Tensor) -> torch.Tensor:
    """A weight as the kernels take it: rows or columns one after the other, none over another; else a copy."""
    if tensor.is_contiguous():
        return tensor
    (rows, columns), (of_rows, of_columns) = tensor.shape, tensor.stride()
    is_plain = (of_columns == 1 and of_rows >= columns) or (of_rows == 1 and of_columns >= rows)
    return tensor if is_plain else tensor.contiguous()


def is_fitting_target(weight_grad: WeightGrad, weight: torch.Tensor) -> bool:
    """Whether the weight's gradient can be added there, if anywhere; looked at in every call."""
    if isinstance(weight_grad, DeferredWeightGrad) and type(weight_grad.queue) is not WeightGradQueue:
        return False
    target = target_of(weight_grad)
    if target is None:
        return True
    total = target.accumulate
    return (
        total.shape == weight.shape
        and total.device == weight.device
        and (total.dtype is weight.dtype or total.dtype in _WIDE)
        and (total.is_contiguous() or not _overlaps_itself(total))
        and not total.is_inference()
        and not total.is_neg()
        and not stands_for_others(total)
        and callable(target.result)
    )


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    return torch._debug_has_internal_overlap(tensor) == 1


def find_target_complaint(weight_grad: WeightGrad, weight: torch.Tensor) -> str | None:
    """Why the weight's gradient cannot be added there, in one sentence; None if it can."""
    target = target_of(weight_grad)
    if target is None or is_fitting_target(target, weight):
        return None
    found = target.accumulate
    if found.shape != weight.shape or found.device != weight.device:
        there = f"{list(weight.shape)} on {weight.device}"
        return f"{target.name} is {list(found.shape)} on {found.device}, but the weight is {there}"
    if found.dtype is not weight.dtype and found.dtype not in _WIDE:
        return f"{target.name} must be {weight.dtype}, as the weight is, or fp32 or fp64, got {found.dtype}"
    if found.is_inference():
        return f"{target.name} was made in inference mode: nothing can be added to it outside"
    if found.is_neg():
        return f"{target.name} is lazily negated: pass one that is not"
    return f"{target.name} has elements that share memory: a gradient cannot be added to it"


def key_of_values(*values: object) -> tuple[object, ...]:
    """These values, in a key that tells equal ones of different types apart: checks may take 1, and refuse 1.0."""
    return (*values, *map(type, values))


def require_fitting(
    operation: Operation,
    given: Mapping[str, object],
    find_complaint: Callable[[], str | None],
    context: OverlapContext,
) -> None:
    """Refuse arguments, by name, that are of a wrong kind or do not fit together, before anything is sent.

    find_complaint: what does not fit together, of arguments that are of the right kinds. Whatever is raised on the way
    is a complaint: this rank may be the only one that sees it.

    Raises ShapeError, on this rank and at the others' next comparison.
    """
    try:
        complaint = find_kind_complaint(operation.function, given) or find_complaint()
    except Exception as error:
        complaint = f"the arguments cannot be judged: {type(error).__name__}: {error}"
    if complaint is not None:
        refusal = ShapeError(f"{operation.name}, group rank {context.group_rank}: {complaint}")
        context.consensus.refuse(refusal, topic=f"{operation.name} fprop")


def prepare(
    operation: Operation,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: Mapping[str, Any],
    context: OverlapContext,
    weight_grad: WeightGrad,
) -> PreparedPass:
    """The forward pass of a call, checked; not yet agreed on. options: its other arguments, by name.

    Raises ShapeError, on this rank and at the others' next comparison, when the arguments do not fit together.
    """
    key = prepared = None
    try:
        # All that the checks look at: arguments like some seen before need no second look.
        key = (
            operation.name,
            x.shape,
            x.dtype,
            x.device,
            weight.shape,
            weight.dtype,
            weight.device,
            None if bias is None else (bias.shape, bias.dtype, bias.device, bias.layout),
            *key_of_values(*options.values()),
            x.layout,
            weight.layout,
            unusable_reason(x, weight, bias),
        )
        if is_fitting_target(weight_grad, weight):
            prepared = context.known_calls.get(key)
    except Exception:  # of a wrong kind: the checks say which
        prepared = None
    if prepared is None:
        given = {"x": x, "weight": weight, "bias": bias, "weight_grad": weight_grad, **options}
        total_rows = options.get("total_rows")
        find_complaint = functools.partial(_find_complaint, context, x, weight, bias, weight_grad, total_rows)
        require_fitting(operation, given, find_complaint, context)
        problem = state_problem(operation.name, x, weight, total_rows, context)
        prepared = remember(context, key, problem, operation, (x, weight))
    return prepared


def join_needs(*, needs_input: bool, needs_weight: bool) -> str:
    """Which gradients are due, as a problem says it."""
    return "+".join(name for name, is_needed in (("input", needs_input), ("weight", needs_weight)) if is_needed)


def prepare_backward(
    operation: Operation, forward: PreparedPass, *, needs_input: bool, needs_weight: bool, given: Given = ()
) -> PreparedPass:
    """The backward pass of the same call; which gradients are due decides what is sent. given: see `remember`."""
    key = (forward.problem, needs_input, needs_weight)
    prepared = forward.context.known_calls.get(key)
    if prepared is None:
        needs = join_needs(needs_input=needs_input, needs_weight=needs_weight)
        problem = dataclasses.replace(forward.problem, pass_name="backward", needs=needs)
        prepared = remember(forward.context, key, problem, operation, given)
    return prepared


def remember(
    context: PassContext, key: Hashable, problem: Problem, operation: Operation, given: Given = ()
) -> PreparedPass:
    """The pass of a problem, planned if it is new, and found again under `key`.

    given: operands of the call, which a trial may read.
    """
    if len(context.known_calls) >= _MOST_KNOWN_CALLS:
        context.forget_programs()
    rehearse = functools.partial(operation.rehearse, given=given) if given else operation.rehearse
    try_out = functools.partial(run_trial, rehearse, context, problem)
    prepared = context.known_calls[key] = context.prepare(problem, try_out)
    return prepared


def state_problem(
    op: str, x: torch.Tensor, weight: torch.Tensor, total_rows: int | None, context: OverlapContext
) -> GemmProblem:
    """The forward pass of a call of a linear whose arguments fit together."""
    if op == "all_gather_linear":
        rows = x.size(0) * context.group_size if total_rows is None else total_rows
    else:
        rows = x.size(0)
    return GemmProblem(
        op=op,
        pass_name="fprop",
        rows=rows,
        batch=x.shape[1:-1].numel(),
        N=weight.size(0),
        K=weight.size(1),
        dtype=str(x.dtype).removeprefix("torch."),
        group_size=context.group_size,
    )


def _find_complaint(
    context: OverlapContext,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_grad: WeightGrad,
    total_rows: int | None,
) -> str | None:
    named = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    if x.dim() < 2:
        return f"x must be [S, ..., K] with at least two dimensions, got shape {list(x.shape)}"
    if weight.dim() != 2:
        return f"weight must be [N, K], got shape {list(weight.shape)}"
    if x.size(-1) != weight.size(1):
        return f"x has {x.size(-1)} input features (last dimension), weight {list(weight.shape)} has {weight.size(1)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must be [{weight.size(0)}] for weight {list(weight.shape)}, got shape {list(bias.shape)}"
    if len({tensor.dtype for tensor in named.values()}) > 1:
        dtypes = ", ".join(f"{name} {str(tensor.dtype).removeprefix('torch.')}" for name, tensor in named.items())
        return f"all tensors must have one dtype, got {dtypes}"
    if str(x.dtype).removeprefix("torch.") not in DTYPE_BYTES:
        return f"dtype {x.dtype} is not supported; supported are {', '.join(DTYPE_BYTES)}"
    complaint = complain_if_unusable(named)
    if complaint is not None:
        return complaint
    for name, tensor in named.items():
        if tensor.device != context.device:
            served = f"transport {context.transport_name}, which serves {context.device}"
            return f"{name} is on {tensor.device}, but this context uses {served}"
    complaint = None
    if total_rows is not None:
        complaint = _find_row_complaint(x, total_rows, context)
    return complaint or find_target_complaint(weight_grad, weight)


def _find_row_complaint(x: torch.Tensor, total_rows: int, context: OverlapContext) -> str | None:
    if total_rows < 0:
        return f"total_rows must not be negative, got {total_rows}"
    expected = shard_range(total_rows, context.group_size, context.group_rank).size
    if x.size(0) != expected:
        return (
            f"of total_rows={total_rows}, group rank {context.group_rank} of {context.group_size} must bring "
            f"{expected} rows (torch.tensor_split), x has {x.size(0)}"
        )
    return None
