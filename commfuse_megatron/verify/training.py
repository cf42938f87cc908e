"""Trains the same Megatron GPT twice, stock and overlapped, on the same text, and says how far the losses part.

Both models start from the same weights and see the same batches, step by step in turn. The contract that bites: equal
losses prove nothing if the plugin was not at work, so `complaints_of` also counts the calls of every layer and op.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.config import AttentionConfig, LinearConfig, OverlapConfig, PassConfig
from commfuse_megatron.runtime.recorder import Interval
from commfuse_megatron.tracing.session import Recorded, record
from commfuse_megatron.verify.text import batch_of

__all__ = ["Bound", "Comparison", "Recipe", "bounds_of", "complaints_of", "train_both"]

# What is compared is the overlapped path, whatever would be faster for so small a model.
_SLICED = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=1)
_OVERLAPPED = OverlapConfig(
    linear=LinearConfig(fprop=_SLICED, dgrad=_SLICED), attention=AttentionConfig(path="row_parallel"), record=True
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What is trained. The model is a small Llama over bytes; sizes per device, since a GPU idles on a CPU's.

    lr: Adam's. At 1e-3 the loss of the wider model jumps between 3.9 and 8.3 in the first steps, which amplifies
    rounding twice as much as the bounds allow (2 x H200, float32).
    """

    device_type: str
    dtype: torch.dtype
    num_steps: int
    text: bytes
    hidden_size: int
    ffn_hidden_size: int
    sequence: int
    batch: int
    lr: float
    num_layers: int = 2
    seed: int = 7

    @property
    def dtype_name(self) -> str:
        """E.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @classmethod
    def for_device(cls, device_type: str, *, dtype: torch.dtype, num_steps: int, text: bytes) -> Recipe:
        """The sizes that suit a device type."""
        sizes: dict[str, Any] = (
            {"hidden_size": 256, "ffn_hidden_size": 512, "sequence": 256, "batch": 4, "lr": 1e-3}
            if device_type == "cpu"
            else {"hidden_size": 1024, "ffn_hidden_size": 4096, "sequence": 1024, "batch": 4, "lr": 3e-4}
        )
        return cls(device_type=device_type, dtype=dtype, num_steps=num_steps, text=text, **sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Losses of both runs, what the layers and ops report, and what ran when in the last step, by rank."""

    stock_loss: tuple[float, ...]
    plugin_loss: tuple[float, ...]
    ops: tuple[dict[str, Any], ...]
    layers: tuple[dict[str, Any], ...]
    recording: dict[int, list[Interval]]

    @property
    def differences(self) -> tuple[float, ...]:
        """Absolute difference of the losses, per step."""
        return tuple(abs(a - b) for a, b in zip(self.stock_loss, self.plugin_loss, strict=True))

    @property
    def max_loss_difference(self) -> float:
        """The largest of them."""
        return max(self.differences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The losses of steps first..last (counted from 1) may differ by at most `limit`."""

    first: int
    last: int
    limit: float


def bounds_of(dtype: torch.dtype, num_steps: int, group_size: int) -> list[Bound]:
    """How far the losses may part. Both runs round differently, and training amplifies what rounding begins.

    Measured over 20 steps on the CPU, November 2026, largest difference in steps 1-5 / 6-20:
        float32   2 ranks 0 / 0 (two terms have one sum), 4 ranks 4.8e-7 / 7.2e-7; one unit of a loss above 4 is 4.8e-7
        float64   2 ranks 0 / 0
        bfloat16  4 ranks 3.2e-4 / 1.0e-3
    float32 and float64 are allowed 1e-6 / 1e-4 and 1e-10 for two ranks and as much again for every further rank, whose
    partial is one more to be rounded; bfloat16 some 15 times what was measured. A layer that drops or doubles a shard
    changes the first losses by more than any of these. After 20 steps rounding has grown too far to tell it from a
    fault; there the bound only catches runs that fall apart.
    """
    early, late = {
        torch.float32: (1e-6 * (group_size - 1), 1e-4 * (group_size - 1)),
        torch.float64: (1e-10 * (group_size - 1), 1e-10 * (group_size - 1)),
        torch.bfloat16: (5e-3, 1.5e-2),
    }[dtype]
    bounds = [Bound(first=1, last=min(5, num_steps), limit=early)]
    if num_steps > 5:
        bounds.append(Bound(first=6, last=min(20, num_steps), limit=late))
    if num_steps > 20:
        bounds.append(Bound(first=21, last=num_steps, limit=0.2))
    return bounds


def complaints_of(comparison: Comparison, bounds: list[Bound]) -> list[str]:
    """Everything that makes the comparison fail: losses too far apart, and calls that were not overlapped."""
    complaints = []
    for bound in bounds:
        worst = max(comparison.differences[bound.first - 1 : bound.last], key=lambda d: (d != d, d))
        if not worst <= bound.limit:
            complaints.append(
                f"losses of steps {bound.first}-{bound.last} differ by {worst:.3g}, allowed {bound.limit:g}"
            )
    num_steps = len(comparison.stock_loss)
    for layer in comparison.layers:
        if layer["path"] != "overlapped" or layer["overlapped_calls"] != num_steps:
            reasons = "; ".join((*layer["reasons"], *layer["sequential_reasons"])) or "no reason given"
            complaints.append(
                f"{layer['name']}: {layer['overlapped_calls']} of {num_steps} forward passes were overlapped"
                f" (path: {layer['path']}; {reasons})"
            )
    expected = num_steps * len(comparison.layers)
    for pass_name in ("fprop", "backward"):
        calls = sum(op["calls"] for op in comparison.ops if op["pass_name"] == pass_name and op["path"] == "sliced")
        if calls != expected or not expected:
            complaints.append(f"{calls} {pass_name} calls ran sliced, expected {expected}")
    return complaints


def train_both(recipe: Recipe, *, on_step: Callable[[int, float, float], None] = lambda *_: None) -> Comparison:
    """Train on all ranks of the default group, which is the tensor-parallel group. Collective; equal on all ranks.

    Args:
        on_step: called after each step with its number (from 1), the stock loss and the plugin's.
    """
    with ExitStack() as stack:
        if recipe.device_type == "cpu":
            from commfuse_megatron.testing import cpu_megatron

            stack.enter_context(cpu_megatron())
        from commfuse_megatron.plugin import reset_contexts
        from commfuse_megatron.testing.gpt import tensor_parallel

        stack.enter_context(tensor_parallel(dist.get_world_size()))
        comparison = _train_both(recipe, on_step)
        reset_contexts()
        return comparison


def _train_both(recipe: Recipe, on_step: Callable[[int, float, float], None]) -> Comparison:
    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.plugin.contexts import open_contexts
    from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, transformer_config
    from commfuse_megatron.testing.training import Training

    group_size = dist.get_world_size()
    device = torch.device("cpu") if recipe.device_type == "cpu" else torch.device("cuda", torch.cuda.current_device())
    gpt = SmallGPT(
        num_layers=recipe.num_layers,
        hidden_size=recipe.hidden_size,
        ffn_hidden_size=recipe.ffn_hidden_size,
        num_query_groups=max(4, group_size),
        max_sequence_length=recipe.sequence,
        dtype=recipe.dtype,
    )
    runs = []
    for overlap in (False, _OVERLAPPED):
        config = transformer_config(gpt, group_size)
        model = build_gpt(gpt, config, overlap=overlap, device=device, seed=recipe.seed)
        runs.append(Training(model, lr=recipe.lr))
    stock, plugin = runs
    losses: tuple[list[float], list[float]] = ([], [])
    recorded = Recorded()
    for step in range(recipe.num_steps):
        tokens = batch_of(recipe.text, step=step, batch=recipe.batch, length=recipe.sequence + 1).to(device)
        losses[0].append(stock.step(tokens))
        if step == recipe.num_steps - 1:
            with record(open_contexts, device=device) as recorded:
                losses[1].append(plugin.step(tokens))
        else:
            losses[1].append(plugin.step(tokens))
        on_step(step + 1, losses[0][-1], losses[1][-1])
    report = model_report(plugin.wrapped)
    return Comparison(
        stock_loss=tuple(losses[0]),
        plugin_loss=tuple(losses[1]),
        ops=tuple(dataclasses.asdict(record) for record in report.ops),
        layers=tuple(dataclasses.asdict(layer) for layer in report.layers),
        recording=recorded.by_rank,
    )
