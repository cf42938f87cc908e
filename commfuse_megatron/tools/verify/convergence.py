"""Trains one small model several times, stock and overlapped, and holds the differences to what rounding explains.

Five runs from the same weights on the same batches:

    reference            stock, in a wider dtype
    stock, plugin        in the dtype under test; both write a checkpoint half way
    plugin after stock   goes on from stock's checkpoint, overlapped
    stock after plugin   goes on from the plugin's, stock

The measure is the mean distance of losses and gradient norms from the reference: what the dtype costs stock Megatron,
the plugin may cost too, up to a factor. The contract that bites: equal numbers prove nothing if the plugin was not at
work, so every layer's calls are counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import distributed as dist

from commfuse_megatron.config import AttentionConfig, LinearConfig, OverlapConfig, PassConfig
from commfuse_megatron.tools.common.text import batch_of

#: The plugin's mean distance from the reference over stock's. Two equally good roundings have a ratio near 1.
ALLOWED_RATIO = 2.0

#: Losses and norms come as float32 numbers in every run, and two right ones may round to neighbours: one unit of that,
#: relative, is no difference. It only matters where stock meets the reference exactly, as over a few steps on the CPU.
ROUNDING = 2.0**-23

#: What is compared is the overlapped path, whatever would be faster for so small a model.
_SLICED = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=1)
OVERLAPPED = OverlapConfig(
    linear=LinearConfig(fprop=_SLICED, dgrad=_SLICED), attention=AttentionConfig(path="row_parallel")
)

QUANTITIES = ("loss", "grad_norm")

#: As `testing.lora`'s, which imports Megatron.
NormOutput = Literal["rows", "gathered"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained.

    pattern: None for a GPT, else the layers of a HybridModel ("*" attention, "-" MLP, "M" Mamba).
    exchange_at: the step after which checkpoints are written; the resumed runs begin with the next one.
    lora: train low-rank adapters at all linears, of a GPT whose own weights are frozen. The form (`testing.lora`) is
        the plugin's; stock always has "rows", the same function with other shards: Transformer Engine 2.20 leaves out
        the gradient of the norm's output that it returns gathered.
    """

    device_type: str
    dtype: torch.dtype
    reference_dtype: torch.dtype
    text: bytes
    pattern: str | None = None
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    num_steps: int = 50
    exchange_at: int = 25
    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_attention_heads: int = 8
    num_query_groups: int = 4
    sequence: int = 64
    batch: int = 2
    lr: float = 1e-3
    config: OverlapConfig = OVERLAPPED
    lora: NormOutput | None = None

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return torch.device("cpu") if self.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())

    @property
    def num_runs_steps(self) -> int:
        """Steps of all five runs together, for progress bars."""
        return 3 * self.num_steps + 2 * (self.num_steps - self.exchange_at)


@dataclass(slots=True)
class Curve:
    """One run: values of each step, the first of which is `first_step` (counted from 1)."""

    first_step: int = 1
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)

    def mean_distance(self, reference: Curve, quantity: str, first_step: int) -> float:
        """Mean absolute difference from `reference` over the steps from `first_step` on."""
        found = getattr(self, quantity)[first_step - self.first_step :]
        expected = getattr(reference, quantity)[first_step - reference.first_step :]
        return sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected)


@dataclass(frozen=True, slots=True)
class Convergence:
    """Curves by run, and by run of the plugin what became of its linears: name -> why stock, None if overlapped."""

    curves: dict[str, Curve]
    layers: dict[str, dict[str, str | None]]


def compare_runs(task: Task, *, on_step: Callable[[], object] = lambda: None) -> Convergence:
    """Train on all ranks of the default group, which is the tensor-parallel group. Collective; equal on all ranks."""
    with tensor_parallel_megatron(task.device_type), ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="convergence-"))]
        dist.broadcast_object_list(folders)  # one for all ranks: they write one checkpoint together
        converged = _Runs(task, Path(folders[0]), on_step).all()
        dist.barrier()  # the folder goes with the first rank
        return converged


@contextmanager
def tensor_parallel_megatron(device_type: str) -> Iterator[None]:
    """Megatron, tensor parallel over the default group, on that kind of device; our contexts are closed at the end."""
    with ExitStack() as stack:
        if device_type == "cpu":
            from commfuse_megatron.testing import cpu_megatron
            from commfuse_megatron.testing.pretraining import PRETRAINING_SHIMS

            stack.enter_context(cpu_megatron())
            stack.enter_context(PRETRAINING_SHIMS["hybrid_final_norm"]())
        from commfuse_megatron.plugin import reset_contexts
        from commfuse_megatron.testing.gpt import tensor_parallel

        stack.enter_context(tensor_parallel(dist.get_world_size()))
        yield
        reset_contexts()


def ratios_of(converged: Convergence) -> dict[tuple[str, str], tuple[float, float]]:
    """(run, quantity) -> (its mean distance from the reference, stock's over the same steps)."""
    curves = converged.curves
    found = {}
    for run in ("plugin", "plugin after stock", "stock after plugin"):
        first = curves[run].first_step
        for quantity in QUANTITIES:
            found[run, quantity] = (
                curves[run].mean_distance(curves["reference"], quantity, first),
                curves["stock"].mean_distance(curves["reference"], quantity, first),
            )
    return found


def complaints_of(converged: Convergence) -> list[str]:
    """Everything that makes the comparison fail: runs too far from the reference, linears that were not overlapped."""
    complaints = []
    for (run, quantity), (distance, allowed) in ratios_of(converged).items():
        values = getattr(converged.curves["reference"], quantity)
        rounding = ROUNDING * max(map(abs, values))
        if not distance <= ALLOWED_RATIO * allowed + rounding:
            complaints.append(
                f"{run}: mean {quantity} differs from the reference's by {distance:.3g}, stock's by {allowed:.3g};"
                f" allowed is {ALLOWED_RATIO:g} times as much"
            )
    for run, layers in converged.layers.items():
        if not layers:
            complaints.append(f"{run}: the model has no tensor-parallel linear")
        complaints += [f"{run}: {name}: {reason}" for name, reason in layers.items() if reason is not None]
    return complaints


class _Runs:
    """The five runs of one task."""

    def __init__(self, task: Task, folder: Path, on_step: Callable[[], object]) -> None:
        self._task = task
        self._folder = folder
        self._on_step = on_step
        self._weights: dict[str, torch.Tensor] = {}
        self._layers: dict[str, dict[str, str | None]] = {}

    def all(self) -> Convergence:
        half, wide, narrow = self._task.exchange_at, self._task.reference_dtype, self._task.dtype
        curves = {
            "reference": self._train("reference", wide, overlap=False),
            "stock": self._train("stock", narrow, overlap=False, save_at=half),
            "plugin": self._train("plugin", narrow, overlap=True, save_at=half),
            "plugin after stock": self._train("plugin after stock", narrow, overlap=True, load="stock"),
            "stock after plugin": self._train("stock after plugin", narrow, overlap=False, load="plugin"),
        }
        return Convergence(curves, self._layers)

    def _train(
        self, run: str, dtype: torch.dtype, *, overlap: bool, save_at: int | None = None, load: str | None = None
    ) -> Curve:
        from commfuse_megatron.testing.training import Training

        task = self._task
        model = build_model(task, dtype, overlap=overlap, lora=task.lora if overlap else task.lora and "rows")
        self._begin_with_the_same_weights(model)
        training = Training(model, lr=task.lr, with_mask=task.transformer_impl == "local")
        curve = Curve()
        if load is not None:
            training.load(self._folder / load)
            curve.first_step = task.exchange_at + 1
        for step in range(curve.first_step, task.num_steps + 1):
            tokens = batch_of(task.text, step=step, batch=task.batch, length=task.sequence + 1).to(task.device)
            curve.loss.append(training.step(tokens))
            curve.grad_norm.append(training.grad_norm())
            if step == save_at:
                training.save(self._folder / run)
            self._on_step()
        if overlap:
            self._layers[run] = stock_reasons(model)
        return curve

    def _begin_with_the_same_weights(self, model: Any) -> None:
        """Copy the first model's weights, which are the widest ones; the names must be the same."""
        named = dict(model.named_parameters())
        if not self._weights:
            self._weights = {name: parameter.detach().clone() for name, parameter in named.items()}
        if named.keys() != self._weights.keys():
            differing = ", ".join(sorted(named.keys() ^ self._weights.keys()))
            raise RuntimeError(f"stock and overlapped models have parameters of different names: {differing}")
        with torch.no_grad():
            for name, parameter in named.items():
                weight = self._weights[name]
                if weight.shape != parameter.shape:  # replicated in the form of adapters that stock has
                    weight = weight.chunk(dist.get_world_size())[dist.get_rank()]
                parameter.copy_(weight)


def build_model(task: Task, dtype: torch.dtype, *, overlap: bool, lora: NormOutput | None) -> Any:
    """The task's model, stock or with the plugin, frozen and with adapters of that form where one is given."""
    model = _build_gpt(task, dtype, overlap)
    if lora is not None:
        from commfuse_megatron.testing.lora import add_lora

        model.requires_grad_(False)
        add_lora(model, norm_output=lora)
    return model


def stock_reasons(model: Any) -> dict[str, str | None]:
    """By linear of a model that was overlapped: why it, or a call of it, was not; None if all calls were."""
    from commfuse_megatron.plugin import model_report

    return {
        layer.name: None
        if layer.path == "overlapped"
        else f"{layer.path}: {'; '.join((*layer.reasons, *layer.sequential_reasons)) or 'no reason given'}"
        for layer in model_report(model).layers
        if ".adapter." not in layer.name  # they are Megatron's own, in stock and here
    }


def _build_gpt(task: Task, dtype: torch.dtype, overlap: bool) -> Any:
    from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config

    group_size = dist.get_world_size()
    gpt = SmallGPT(
        num_layers=task.num_layers if task.pattern is None else len(task.pattern),
        hidden_size=task.hidden_size,
        ffn_hidden_size=task.ffn_hidden_size,
        num_attention_heads=task.num_attention_heads,
        num_query_groups=max(task.num_query_groups, group_size),
        max_sequence_length=task.sequence,
        dtype=dtype,
    )
    options: dict[str, Any] = {"transformer_impl": task.transformer_impl}
    if task.device_type == "cuda":
        options["use_cpu_initialization"] = False
    if task.pattern is not None:
        options["is_hybrid_model"] = True
    config = transformer_config(gpt, group_size, **options)
    ours: OverlapConfig | Literal[False] = task.config if overlap else False
    if task.pattern is not None:
        return _build_hybrid(task, gpt, config, ours)
    spec = None
    if task.transformer_impl == "transformer_engine":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return build_gpt(gpt, config, overlap=ours, device=task.device, spec=spec)


def _build_hybrid(task: Task, gpt: Any, config: Any, ours: OverlapConfig | Literal[False]) -> Any:
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from commfuse_megatron.plugin import apply_to_spec, convert_model
    from commfuse_megatron.plugin.hybrid_spec import stock_stack_spec_local

    is_local = task.transformer_impl == "local"
    spec = stock_stack_spec_local if is_local else hybrid_stack_spec
    model = HybridModel(
        config=config,
        hybrid_stack_spec=apply_to_spec(spec, ours) if ours else spec,
        vocab_size=gpt.vocab_size,
        max_sequence_length=gpt.max_sequence_length,
        hybrid_layer_pattern=task.pattern,
        position_embedding_type="rope",
    ).to(task.device)
    return convert_model(model, ours) if ours else model
