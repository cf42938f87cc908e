"""Compares whole overlapped models with stock Megatron at the same parallel layout, in float64 on the CPU.

Both start from one state dict and see the same micro-batches under the same random states, through Megatron's own
schedules. The oracle is stock at the same layout, not one rank: what Megatron itself gets wrong there is not ours to
change. Only where ranks share sequences it is stock without that, which Megatron's local layers cannot. Beware: a
configuration fails unless the calls of every layer are those that it expects.
"""

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.tools.common.models import OVERLAPPED
from commfuse_megatron.tools.common.modes import badness
from commfuse_megatron.tools.verify.calls import ALL_REDUCES
from commfuse_megatron.tools.verify.megatron_cases import Configuration

#: Two right programs differ in the order of sums: by a few units of 2.2e-16, times the cancellation in a gradient.
TOLERANCE = 1e-13
#: After two steps of Adam, which divides by the root of what it has averaged.
PARAMETER_TOLERANCE = 1e-12
NUM_STEPS = 2
#: Of losses where ranks share sequences: means over parts of Megatron's cross-entropies, which are fp32.
SHARED_LOSS_TOLERANCE = 2.0**-22


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResult:
    """What became of a configuration, over all ranks. Errors are relative to the largest element of a tensor.

    gradient, parameter: the name of the worst one; parameters only with an optimizer. overlapped, backward: calls of
    overlapped operations in forward and backward passes, over all ranks. stock: how many calls took Megatron's own
    path, by reason.
    """

    name: str
    layout: str
    loss_error: float
    gradient_error: float
    gradient: str
    num_gradients: int
    parameter_error: float | None
    parameter: str
    overlapped: int
    backward: int
    stock: dict[str, int] = field(default_factory=dict)
    complaints: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether numbers and calls are as they must be."""
        return not self.complaints

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self) | {"complaints": list(self.complaints), "passed": self.passed}


def verify_models(
    configurations: Iterable[Configuration], *, on_done: Callable[[ModelResult], None] = lambda _: None
) -> list[ModelResult]:
    """The result of every configuration, equal on all ranks. Collective over the default group, inside `cpu_megatron`.

    A failed comparison is a result; an error that a model raises is raised.
    """
    from commfuse_megatron.testing.gpt import tensor_parallel

    num_ranks = dist.get_world_size()

    def layout_of(configuration: Configuration) -> tuple[int, int, dict[str, Any]]:
        return configuration.context, configuration.tensor_size(num_ranks), configuration.layout

    results = []
    # One parallel state for neighbours of the same layout: groups take longer to make than these models to run.
    for (context, size, layout), same_layout in itertools.groupby(configurations, layout_of):
        with contextlib.nullcontext() if context > 1 else tensor_parallel(size, **layout):
            for configuration in same_layout:
                own = (_compare_shared if context > 1 else _compare_runs)(configuration, size)
                everyones: list[Any] = [None] * num_ranks
                dist.all_gather_object(everyones, own)
                results.append(_judge(configuration, everyones))
                on_done(results[-1])
    return results


# --- one configuration on one rank ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    losses: list[tuple[float, float]] = field(default_factory=list)
    gradient_errors: dict[str, float] = field(default_factory=dict)
    parameter_errors: dict[str, float] = field(default_factory=dict)
    stock: Counter[str] = field(default_factory=Counter)
    ops: dict[str, int] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def _compare_shared(configuration: Configuration, size: int) -> _Found:
    """Ranks share sequences in our model; in stock's, which has another parallel state, each has them whole."""
    from megatron.core import parallel_state

    from commfuse_megatron.testing.gpt import tensor_parallel
    from commfuse_megatron.testing.pipeline import ScheduledRun

    batches = _micro_batches(configuration, 0, dist.get_rank() // (size * configuration.context))
    with tensor_parallel(size, **configuration.layout):
        stock = _build_stock(configuration, size)
        states = [chunk.state_dict() for chunk in stock]
        expected = ScheduledRun(stock).step(batches)
    with tensor_parallel(size, context_parallel_size=configuration.context, **configuration.layout):
        ours = _build_ours(configuration, size, context_parallel_size=configuration.context, cp_comm_type="a2a")
        for chunk, state in zip(ours, states, strict=True):
            chunk.load_state_dict(state)
        actual = ScheduledRun(ours).step(batches)
        means = torch.tensor(actual.losses, dtype=torch.float64) / configuration.context
        dist.all_reduce(means, group=parallel_state.get_context_parallel_group())
        found = _Found(losses=list(zip(expected.losses, means.tolist(), strict=True)))
        _compare_gradients(found, expected.gradients, actual.gradients)
        _note_calls(configuration, ours, 1, found)
    return found


def _compare_runs(configuration: Configuration, size: int) -> _Found:
    from megatron.core import parallel_state

    from commfuse_megatron.testing.models import name_with_separate_norm
    from commfuse_megatron.testing.pipeline import ScheduledRun

    stock_chunks, our_chunks = _build_stock(configuration, size), _build_ours(configuration, size)
    for from_, to in zip(stock_chunks, our_chunks, strict=True):
        state = from_.state_dict()
        to.load_state_dict({name: state[name_with_separate_norm(name)] for name in to.state_dict()})
    stock, ours = (ScheduledRun(chunks, optimizer=configuration.optimizer) for chunks in (stock_chunks, our_chunks))
    found = _Found()
    num_steps = 1 if configuration.optimizer is None else NUM_STEPS
    for step in range(num_steps):
        batches = _micro_batches(configuration, step, parallel_state.get_data_parallel_rank())
        outcomes = []
        for run in (stock, ours):
            _reset_random_states()
            outcomes.append(run.step(batches, forward_only=configuration.forward_only, packed=configuration.packed))
        found.losses += zip(outcomes[0].losses, outcomes[1].losses, strict=True)
        if step == 0:
            _compare_gradients(found, *(_by_stocks_name(outcome.gradients) for outcome in outcomes))
    if configuration.is_repeatable:
        _reset_random_states()
        again = ours.step(batches)
        num_steps += 1
        found.complaints += [
            f"{name}: a second run gives other bits"
            for name, gradient in outcomes[1].gradients.items()
            if not torch.equal(gradient, again.gradients[name])
        ]
    if configuration.optimizer is not None:
        after = ours.parameters()
        found.parameter_errors = {name: _relative(each, after[name]) for name, each in stock.parameters().items()}
    _note_calls(configuration, our_chunks, num_steps, found)
    return found


def _recipe(configuration: Configuration, **options: Any) -> Any:
    from commfuse_megatron.testing.gpt import SmallGPT
    from commfuse_megatron.testing.models import Recipe

    make = SmallGPT if configuration.variant == "llama" else SmallGPT.layer_norm_and_bias
    return Recipe(
        gpt=make(**{"dtype": torch.float64, "max_sequence_length": 64, **configuration.sizes}),
        options=configuration.options | options,
        hybrid_pattern=configuration.hybrid_pattern,
        virtual_stages=configuration.virtual_stages,
        is_packed=bool(configuration.packed),
    )


def _build_stock(configuration: Configuration, size: int) -> list[Any]:
    """Biases and norm weights are no zeros and ones, equally on all ranks."""
    from commfuse_megatron.testing.models import build_chunks, make_config

    recipe = _recipe(configuration)
    stock = build_chunks(recipe, make_config(recipe, size))
    _adapt_and_freeze(configuration, stock)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in (parameter for chunk in stock for parameter in chunk.parameters()):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return stock


def _build_ours(configuration: Configuration, size: int, **options: Any) -> list[Any]:
    from commfuse_megatron.plugin import convert_model
    from commfuse_megatron.testing.models import build_chunks, make_config

    recipe = replace(_recipe(configuration, **options), is_fused=configuration.is_fused)
    has_adapters_first = configuration.adapters is not None and configuration.adapters.is_first
    overlap = None if has_adapters_first else OVERLAPPED
    ours = build_chunks(recipe, make_config(recipe, size), overlap=overlap, way=configuration.way, seed=99)
    if has_adapters_first:
        _adapt_and_freeze(configuration, ours)
    if configuration.fuses_gradients:
        # Stock cannot: its linears need Apex for this, and the oracle is stock without it.
        for module in (module for chunk in ours for module in chunk.modules()):
            if hasattr(module, "config"):  # adapters have one of their own
                module.config.gradient_accumulation_fusion = True
    if configuration.fuses_gradients or has_adapters_first:
        convert_model(ours, OVERLAPPED)
    if not has_adapters_first:
        _adapt_and_freeze(configuration, ours)
    return ours


def _adapt_and_freeze(configuration: Configuration, chunks: list[Any]) -> None:
    from commfuse_megatron.testing.lora import add_lora

    for chunk in chunks:
        if configuration.adapters is not None:
            add_lora(chunk, norm_output=configuration.adapters.norm_output)
        for name, parameter in chunk.named_parameters():
            is_frozen, is_trained = _is_in(configuration.frozen, name), _is_in(configuration.trained, name)
            parameter.requires_grad_(is_trained or not is_frozen)


def _is_in(parts: Iterable[str], name: str) -> bool:
    return any(part in name for part in parts)


def _by_stocks_name(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from commfuse_megatron.testing.models import name_with_separate_norm

    return {name_with_separate_norm(name.replace("to_wrap.", "")): each for name, each in gradients.items()}


def _micro_batches(configuration: Configuration, step: int, data_rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    rows = 1 if configuration.packed else 2
    return [torch.randint(256, (rows, length + 1), generator=generator) for length in configuration.micro_batches]


def _reset_random_states() -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def _compare_gradients(found: _Found, expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
    lonely = sorted(expected.keys() ^ actual.keys())
    found.complaints += [f"only one model has a gradient of {name}" for name in lonely]
    found.gradient_errors = {n: _relative(gradient, actual[n]) for n, gradient in expected.items() if n in actual}


def _relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference over the largest element; NaN stays NaN, equal zeros have no error, and
    what should be zero and is not has an infinite one."""
    difference, scale = (expected - found).abs().max().item(), expected.abs().max().item()
    if not difference:
        return 0.0
    return difference / scale if scale else math.inf


# --- calls, and the verdict -------------------------------------------------------------------------------------------


def _note_calls(configuration: Configuration, chunks: list[Any], num_steps: int, found: _Found) -> None:
    """What the layers and operations report, and what is wrong with it; our contexts are closed."""
    from commfuse_megatron.plugin import model_report, reset_contexts
    from commfuse_megatron.plugin.decision import state_of

    report = model_report(chunks)
    modules = {name: module for chunk in chunks for name, module in chunk.named_modules()}
    times = num_steps * len(configuration.micro_batches)
    expected_forward = expected_backward = 0
    for layer in report.layers:
        if layer.layer.startswith("CommFuse"):
            found.stock.update(dict(state_of(modules[layer.name]).stock_calls))
        complaint = _complaint_about(configuration, layer, times)
        if complaint is not None:
            found.complaints.append(f"{layer.name}: {complaint}")
        if _is_part_of_attention(modules[layer.name], layer):
            continue
        expected_forward += layer.overlapped_calls
        if layer.overlapped_calls and not _is_in(configuration.without_backward, layer.name):
            expected_backward += times * _uses(configuration.repeated, layer.name)
    for pass_name in ("fprop", "backward"):
        # Of the linears that all-reduce one pass has nothing to send.
        overlapped = [
            op
            for op in report.ops
            if op.pass_name == pass_name
            and (op.path in ("sliced", "grouped", "overlapped") or (op.path == "local" and op.op in ALL_REDUCES))
        ]
        found.ops[pass_name] = sum(op.calls for op in overlapped)
    expected = {"fprop": expected_forward, "backward": 0 if configuration.forward_only else expected_backward}
    if found.ops != expected:
        found.complaints.append(f"overlapped calls of operations are {found.ops}, expected {expected}")
    reset_contexts()


def _is_part_of_attention(module: Any, layer: Any) -> bool:
    """Whether its calls are parts of those of a core attention: alone it has nobody to send anything to."""
    from commfuse_megatron.plugin import compat

    is_core = isinstance(module, compat.CORE_ATTENTIONS)
    return bool(layer.overlapped_calls) and not is_core and compat.group_of(module).size() == 1


def _complaint_about(configuration: Configuration, layer: Any, times: int) -> str | None:
    if configuration.adapters is not None and "adapter." in layer.name:
        if not configuration.adapters.is_first:
            return f"is a {layer.layer}, not Megatron's own" if layer.layer.startswith("CommFuse") else None
        allowed = configuration.adapters.reasons_to_stay(layer.name)
        if allowed:
            unexpected = [reason for reason in layer.reasons if not _is_in(allowed, reason)]
            if unexpected or not layer.reasons or layer.overlapped_calls:
                return f"was to be stock, since {' or '.join(allowed)}; is {layer.path}: {'; '.join(layer.reasons)}"
            return None
    if not layer.layer.startswith("CommFuse"):
        return f"is a {layer.layer}, not ours"
    surprises = [reason for reason in layer.reasons if not _is_in(configuration.stock, reason)]
    if surprises:
        return f"took Megatron's own path: {'; '.join(surprises)}"
    if layer.reasons:
        return "was overlapped and stock" if layer.overlapped_calls else None
    expected = times * _uses(configuration.recomputed, layer.name) * _uses(configuration.repeated, layer.name)
    if layer.overlapped_calls != expected:
        return f"{layer.overlapped_calls} forward passes were overlapped, expected {expected}"
    return None


def _uses(parts: Iterable[str], name: str) -> int:
    return 2 if _is_in(parts, name) else 1


def _judge(configuration: Configuration, everyones: list[_Found]) -> ModelResult:
    pairs = [pair for found in everyones for pair in found.losses]
    loss_error = max(((abs(a - b) / abs(a)) for a, b in pairs), key=badness, default=math.nan)
    gradient, gradient_error = _worst(found.gradient_errors for found in everyones)
    parameter, parameter_error = _worst(found.parameter_errors for found in everyones)
    num_gradients = sum(len(found.gradient_errors) for found in everyones)
    stock = sum((found.stock for found in everyones), Counter())
    overlapped = sum(found.ops["fprop"] for found in everyones)
    complaints = [f"rank {rank}: {text}" for rank, found in enumerate(everyones) for text in found.complaints]
    allowed_loss = SHARED_LOSS_TOLERANCE if configuration.context > 1 else TOLERANCE
    if not loss_error <= allowed_loss:
        complaints.append(f"losses differ by {loss_error:.1e}, allowed {allowed_loss:g}")
    if not gradient_error <= TOLERANCE:
        complaints.append(f"gradient of {gradient} differs by {gradient_error:.1e}, allowed {TOLERANCE:g}")
    if not parameter_error <= PARAMETER_TOLERANCE:
        complaints.append(f"{parameter} after steps differs by {parameter_error:.1e}, allowed {PARAMETER_TOLERANCE:g}")
    if not num_gradients and not configuration.forward_only:
        complaints.append("there are no gradients")
    if not overlapped:
        complaints.append("no forward passes were overlapped")
    return ModelResult(
        name=configuration.name,
        layout=configuration.describe_layout(len(everyones)),
        loss_error=loss_error,
        gradient_error=gradient_error,
        gradient=gradient,
        num_gradients=num_gradients,
        parameter_error=parameter_error if parameter else None,
        parameter=parameter,
        overlapped=overlapped,
        backward=sum(found.ops["backward"] for found in everyones),
        stock=dict(stock),
        complaints=tuple(dict.fromkeys(complaints)),
    )


def _worst(errors: Iterable[dict[str, float]]) -> tuple[str, float]:
    every = [item for each in errors for item in each.items()]
    return max(every, key=lambda item: badness(item[1]), default=("", 0.0))
