"""Compares whole overlapped models with stock Megatron at the same parallel layout, in float64 on the CPU.

Both start from one state dict and see the same micro-batches under the same random states, through Megatron's own
schedules. The oracle is stock at the same layout, not one rank: what Megatron itself gets wrong there is not ours to
change. Only where ranks share sequences it is stock without that, which Megatron's local layers cannot. Beware: a
configuration fails unless the calls of every layer are those that it expects.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.tools.common.models import OVERLAPPED
from commfuse_megatron.tools.common.modes import badness
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
                own = _compare(configuration, size)
                everyones: list[Any] = [None] * num_ranks
                dist.all_gather_object(everyones, own)
                results.append(_judge(configuration, everyones))
                on_done(results[-1])
    return results


_OVERLAPPED = ("sliced", "overlapped")

# --- one configuration on one rank ------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Found:
    losses: list[tuple[float, float]]
    gradient_errors: dict[str, float]
    parameter_errors: dict[str, float]
    layers: list[tuple[str, int, dict[str, int]]]
    ops: dict[str, int]
    complaints: list[str]


def _compare(configuration: Configuration, size: int) -> _Found:
    from commfuse_megatron.plugin import reset_contexts

    if configuration.context > 1:
        return _compare_shared(configuration, size)
    found = _compare_runs(configuration, size)
    reset_contexts()
    return found


def _compare_shared(configuration: Configuration, size: int) -> _Found:
    """Ranks share sequences in our model; in stock's, which has another parallel state, each has them whole."""
    from megatron.core import parallel_state

    from commfuse_megatron.plugin import reset_contexts
    from commfuse_megatron.testing.gpt import tensor_parallel
    from commfuse_megatron.testing.pipeline import ScheduledRun

    batches = _micro_batches(configuration, 0, dist.get_rank() // (size * configuration.context))
    recipe = _recipe(configuration)
    with tensor_parallel(size, **configuration.layout):
        stock = _build_stock(configuration, recipe, size)
        states = [chunk.state_dict() for chunk in stock]
        expected = ScheduledRun(stock).step(batches)
    options = {**recipe.options, "context_parallel_size": configuration.context, "cp_comm_type": "a2a"}
    with tensor_parallel(size, context_parallel_size=configuration.context, **configuration.layout):
        ours = _build_ours(configuration, replace(recipe, options=options), size)
        for chunk, state in zip(ours, states, strict=True):
            chunk.load_state_dict(state)
        actual = ScheduledRun(ours).step(batches)
        means = torch.tensor(actual.losses, dtype=torch.float64) / configuration.context
        dist.all_reduce(means, group=parallel_state.get_context_parallel_group())
        losses = list(zip(expected.losses, means.tolist(), strict=True))
        errors = {name: _relative(each, actual.gradients[name]) for name, each in expected.gradients.items()}
        found = _note_calls(configuration, ours, 1, _Found(losses, errors, {}, [], {}, []))
        reset_contexts()
    return found


def _compare_runs(configuration: Configuration, size: int) -> _Found:
    from megatron.core import parallel_state

    from commfuse_megatron.testing.pipeline import ScheduledRun

    stock_chunks, our_chunks = _build_both(configuration, size)
    stock, ours = (ScheduledRun(chunks, optimizer=configuration.optimizer) for chunks in (stock_chunks, our_chunks))
    complaints: list[str] = []
    losses: list[tuple[float, float]] = []
    errors: dict[str, float] = {}
    num_steps = 1 if configuration.optimizer is None else NUM_STEPS
    for step in range(num_steps):
        batches = _micro_batches(configuration, step, parallel_state.get_data_parallel_rank())
        outcomes = []
        for run in (stock, ours):
            _reset_random_states()
            outcomes.append(run.step(batches, forward_only=configuration.forward_only, packed=configuration.packed))
        losses += zip(outcomes[0].losses, outcomes[1].losses, strict=True)
        if step == 0:
            expected = _by_stocks_name(outcomes[0].gradients)
            actual = _by_stocks_name(outcomes[1].gradients)
            complaints += [
                f"only one model has a gradient of {name}" for name in sorted(expected.keys() ^ actual.keys())
            ]
            errors = {name: _relative(expected[name], actual[name]) for name in expected if name in actual}
    if configuration.is_repeatable:
        _reset_random_states()
        again = ours.step(batches)
        num_steps += 1
        complaints += [
            f"{name}: a second run gives other bits"
            for name, gradient in outcomes[1].gradients.items()
            if not torch.equal(gradient, again.gradients[name])
        ]
    parameter_errors: dict[str, float] = {}
    if configuration.optimizer is not None:
        before, after = stock.parameters(), ours.parameters()
        parameter_errors = {name: _relative(before[name], after[name]) for name in before}
    found = _Found(losses, errors, parameter_errors, [], {}, complaints)
    return _note_calls(configuration, our_chunks, num_steps, found)


def _recipe(configuration: Configuration) -> Any:
    from commfuse_megatron.testing.gpt import SmallGPT
    from commfuse_megatron.testing.models import Recipe

    make = SmallGPT if configuration.variant == "llama" else SmallGPT.layer_norm_and_bias
    gpt = make(**{"dtype": torch.float64, "max_sequence_length": 64, **configuration.sizes})
    return Recipe(
        gpt=gpt,
        options=configuration.options,
        hybrid_pattern=configuration.hybrid_pattern,
        virtual_stages=configuration.virtual_stages,
        is_packed=bool(configuration.packed),
    )


def _build_stock(configuration: Configuration, recipe: Any, size: int) -> list[Any]:
    from commfuse_megatron.testing.models import build_chunks, make_config

    stock = build_chunks(recipe, make_config(recipe, size))
    _add_adapters(configuration, stock)
    _perturb(stock)
    return stock


def _build_both(configuration: Configuration, size: int) -> tuple[list[Any], list[Any]]:
    from commfuse_megatron.testing.models import name_with_separate_norm

    recipe = _recipe(configuration)
    stock = _build_stock(configuration, recipe, size)
    ours = _build_ours(configuration, replace(recipe, is_fused=configuration.is_fused), size)
    for from_, to in zip(stock, ours, strict=True):
        state = from_.state_dict()
        to.load_state_dict({name: state[name_with_separate_norm(name)] for name in to.state_dict()})
        for model in (from_, to):
            _freeze(model, configuration)
    return stock, ours


def _build_ours(configuration: Configuration, recipe: Any, size: int) -> list[Any]:
    from commfuse_megatron.plugin import convert_model
    from commfuse_megatron.testing.models import build_chunks, make_config

    adapters = configuration.adapters
    has_adapters_first = adapters is not None and adapters.is_first
    overlap = None if has_adapters_first else OVERLAPPED
    ours = build_chunks(recipe, make_config(recipe, size), overlap=overlap, way=configuration.way, seed=99)
    if has_adapters_first:
        _add_adapters(configuration, ours)
    if configuration.fuses_gradients:
        # Stock cannot: its linears need Apex for this, and the oracle is stock without it.
        for chunk in ours:
            for module in chunk.modules():
                if hasattr(module, "config"):  # adapters have one of their own
                    module.config.gradient_accumulation_fusion = True
    if configuration.fuses_gradients or has_adapters_first:
        convert_model(ours, OVERLAPPED)
    if not has_adapters_first:
        _add_adapters(configuration, ours)
    return ours


def _add_adapters(configuration: Configuration, chunks: list[Any]) -> None:
    if configuration.adapters is None:
        return
    from commfuse_megatron.testing.lora import add_lora

    for chunk in chunks:
        add_lora(chunk, norm_output=configuration.adapters.norm_output)
        _freeze(chunk, configuration)


def _by_stocks_name(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from commfuse_megatron.testing.models import name_with_separate_norm

    return {name_with_separate_norm(name.replace("to_wrap.", "")): each for name, each in gradients.items()}


def _freeze(model: torch.nn.Module, configuration: Configuration) -> None:
    for name, parameter in model.named_parameters():
        is_frozen = any(part in name for part in configuration.frozen)
        is_trained = any(part in name for part in configuration.trained)
        parameter.requires_grad_(is_trained or not is_frozen)


def _perturb(chunks: list[torch.nn.Module]) -> None:
    """Make biases and norm weights something else than zeros and ones, equally on all ranks."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def _micro_batches(configuration: Configuration, step: int, data_rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + data_rank)
    rows = 1 if configuration.packed else 2
    return [torch.randint(256, (rows, length + 1), generator=generator) for length in configuration.micro_batches]


def _reset_random_states() -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)


def _relative(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference over the largest element; NaN stays NaN, equal zeros have no error, and
    what should be zero and is not has an infinite one."""
    difference, scale = (expected - found).abs().max().item(), expected.abs().max().item()
    if not difference:
        return 0.0
    return difference / scale if scale else float("inf")


# --- calls, and the verdict -------------------------------------------------------------------------------------------


def _note_calls(configuration: Configuration, chunks: list[Any], num_steps: int, found: _Found) -> _Found:
    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.plugin.decision import state_of

    report = model_report(chunks)
    modules = {name: module for chunk in chunks for name, module in chunk.named_modules()}
    times = num_steps * len(configuration.micro_batches)
    expected_backward = 0
    for layer in report.layers:
        reasons = dict(state_of(modules[layer.name]).stock_calls) if layer.layer.startswith("CommFuse") else {}
        found.layers.append((layer.name, layer.overlapped_calls, reasons))
        complaint = _complaint_about(configuration, layer, times)
        if complaint is not None:
            found.complaints.append(f"{layer.name}: {complaint}")
        if layer.overlapped_calls and not any(part in layer.name for part in configuration.without_backward):
            expected_backward += times * _uses(configuration.repeated, layer.name)
    for pass_name in ("fprop", "backward"):
        found.ops[pass_name] = sum(
            op.calls for op in report.ops if op.pass_name == pass_name and op.path in _OVERLAPPED
        )
    if configuration.forward_only:
        expected_backward = 0
    expected = {"fprop": report.overlapped_calls, "backward": expected_backward}
    if found.ops != expected:
        found.complaints.append(f"overlapped calls of operations are {found.ops}, expected {expected}")
    return found


def _complaint_about(configuration: Configuration, layer: Any, times: int) -> str | None:
    if configuration.adapters is not None and "adapter." in layer.name:
        if not configuration.adapters.is_first:
            return f"is a {layer.layer}, not Megatron's own" if layer.layer.startswith("CommFuse") else None
        allowed = configuration.adapters.reasons_to_stay(layer.name)
        if allowed:
            unexpected = [reason for reason in layer.reasons if not any(part in reason for part in allowed)]
            if unexpected or not layer.reasons or layer.overlapped_calls:
                return f"was to be stock, since {' or '.join(allowed)}; is {layer.path}: {'; '.join(layer.reasons)}"
            return None
    if not layer.layer.startswith("CommFuse"):
        return f"is a {layer.layer}, not ours"
    surprises = [reason for reason in layer.reasons if not any(part in reason for part in configuration.stock)]
    if surprises:
        return f"took Megatron's own path: {'; '.join(surprises)}"
    if layer.reasons:
        return "was overlapped and stock" if layer.overlapped_calls else None
    if configuration.is_all_stock:
        return "was overlapped, and should not have been"
    expected = times * _uses(configuration.recomputed, layer.name) * _uses(configuration.repeated, layer.name)
    if layer.overlapped_calls != expected:
        return f"{layer.overlapped_calls} forward passes were overlapped, expected {expected}"
    return None


def _uses(parts: Sequence[str], name: str) -> int:
    return 2 if any(part in name for part in parts) else 1


def _judge(configuration: Configuration, everyones: list[_Found]) -> ModelResult:
    pairs = [pair for found in everyones for pair in found.losses]
    loss_error = max(((abs(a - b) / abs(a)) for a, b in pairs), key=badness, default=math.nan)
    gradient, gradient_error = _worst(found.gradient_errors for found in everyones)
    parameter, parameter_error = _worst(found.parameter_errors for found in everyones)
    num_gradients = sum(len(found.gradient_errors) for found in everyones)
    stock: dict[str, int] = {}
    for found in everyones:
        for _, _, reasons in found.layers:
            for reason, calls in reasons.items():
                stock[reason] = stock.get(reason, 0) + calls
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
    if bool(overlapped) == configuration.is_all_stock:
        complaints.append(f"{overlapped} forward passes were overlapped")
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
        stock=stock,
        complaints=tuple(dict.fromkeys(complaints)),
    )


def _worst(errors: Iterable[dict[str, float]]) -> tuple[str, float]:
    every = [item for each in errors for item in each.items()]
    return max(every, key=lambda item: badness(item[1]), default=("", 0.0))
