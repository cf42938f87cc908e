"""Whole steps of a Megatron GPT as the planner's model has them: stock, with the plugin, without communication.

Forward and backward of one batch, no optimizer, as `commfuse trace --step` times them. Linears, attention and the
embedding are the planner's predictions; norms, activations, the loss and the rest move bytes. The device's time alone:
a step with few tokens takes what its host does, which nobody predicts.
"""

import dataclasses
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.attention import AttentionCosts
from commfuse_megatron.plan.candidates import list_candidates
from commfuse_megatron.plan.cost_model import PassCosts, is_link_slow, predict_parts_us
from commfuse_megatron.plan.machine import Channel, MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import AttentionProblem, GemmProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.bench.report import read_rows
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STOCK
from commfuse_megatron.tools.common.models import MODELS
from commfuse_megatron.tools.simulate.fit import DTYPE, SEQUENTIAL

_HEAD_DIM = 128
_ITEMSIZE = 2

# What GEMMs of a step reach of what they do in a benchmark's bursts, whose clocks are higher: 680 (70B) and 720 (8B) of
# 763 to 790 TFLOP/s, traced steps of S 8192 on 2 x H200, November 2026. Assumed figures are those of long runs.
_SUSTAINED = 0.92
# What element-wise kernels reach of memory's rate in a sum: 2.3 of 2.9 TB/s explain the steps of 8B and of 70B alike.
_OF_MEMORY = 0.8

# Of rows [own, hidden] each layer's two norms and two residual sums read and write in all, forward and backward.
_PASSES_OF_NORMS = (2 * (2 + 3), 2 * (3 + 3))
# Of rows [all, this rank's queries and keys]: positions, and the copies that part q, k and v; backward the same.
_PASSES_OF_ROTARY = (4, 4)
# Of rows [all, ffn of this rank]: SwiGLU reads two and writes one; backward it reads three and writes two.
_PASSES_OF_SWIGLU = (3, 5)
# Bytes of each logit that Megatron's cross-entropy over a cut vocabulary reads and writes: to fp32, the maximum, less
# it, the exponential, their sum, the quotient; backward the product with the gradient, and back to 16 bits.
_BYTES_OF_A_LOGIT = (6 + 4 + 8 + 8 + 4 + 8, 8 + 6)

# Below so long a forward pass of a layer the host decides: with stock layers it took 2.6 to 3.9 ms of a layer, with the
# plugin's 2.9 (2 x H200, 8B, S 2048, November 2026).
_HOST_US_OF_A_LAYER = 2600.0


class _Time(NamedTuple):
    forward_us: float
    backward_us: float

    def __add__(self, other: tuple[float, ...]) -> "_Time":  # type: ignore[override]
        return _Time(self.forward_us + other[0], self.backward_us + other[1])

    def times(self, count: int) -> "_Time":
        return _Time(self.forward_us * count, self.backward_us * count)


@dataclass(frozen=True, slots=True)
class StepPrediction:
    """A step of `model` with so many layers and tokens. forward_ms, step_ms: by variant. is_host_bound: likely."""

    model: str
    layers: int
    tokens: int
    group_size: int
    forward_ms: dict[str, float]
    step_ms: dict[str, float]
    is_host_bound: bool

    def as_json(self) -> dict[str, object]:
        """For the file; `predicted` tells it from a measured row."""
        return {"predicted": True, **asdict(self)}


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A variant of a step that `commfuse trace --step --json` wrote."""

    model: str
    layers: int
    tokens: int
    group_size: int
    variant: str
    step_ms: float


def predict_step(model: str, layers: int, tokens: int, group_size: int, machine: MachineModel) -> StepPrediction:
    """One batch of one sequence of so many tokens. Raises ConfigError for sizes that the group does not divide."""
    if machine.source == "measured":
        rate = dataclasses.replace(machine.gemm, tflops=_SUSTAINED * machine.gemm.tflops)
        machine = dataclasses.replace(machine, gemm=rate)
    step = _Step(model, tokens, group_size, machine)
    layer = step.layers()
    whole = {name: layer[name].times(layers) + step.ends()[name] for name in layer}
    return StepPrediction(
        model,
        layers,
        tokens,
        group_size,
        {name: time.forward_us / 1e3 for name, time in whole.items()},
        {name: sum(time) / 1e3 for name, time in whole.items()},
        layer[PLANNED].forward_us < _HOST_US_OF_A_LAYER,
    )


class _Step:
    """The parts of a step on one rank, by variant."""

    def __init__(self, model: str, tokens: int, group_size: int, machine: MachineModel) -> None:
        self.machine, self.group_size, self.tokens = machine, group_size, tokens
        sizes = MODELS[model]
        for name, size in {"tokens": tokens, **sizes}.items():
            if size % group_size and name != "num_query_groups":
                raise ConfigError(f"{model}: {size} {name.replace('_', ' ')} cannot be cut for {group_size} ranks")
        self.hidden = sizes["hidden_size"]
        self.heads = sizes["num_attention_heads"] // group_size
        self.kv_heads = max(1, sizes["num_query_groups"] // group_size)
        self.ffn, self.vocab = sizes["ffn_hidden_size"] // group_size, sizes["vocab_size"] // group_size

    def layers(self) -> dict[str, _Time]:
        """One layer."""
        qkv = self._linear("all_gather_linear", (self.heads + 2 * self.kv_heads) * _HEAD_DIM, self.hidden)
        proj = self._linear("linear_reduce_scatter", self.hidden, self.heads * _HEAD_DIM)
        fc1 = self._linear("all_gather_linear", 2 * self.ffn, self.hidden)
        fc2 = self._linear("linear_reduce_scatter", self.hidden, self.ffn)
        attention = self._attention()
        at_once = _Time(attention.at_once_us(is_backward=False), attention.at_once_us(is_backward=True))
        rest = self._rest()
        found = {name: qkv[name] + proj[name] + fc1[name] + fc2[name] + at_once + rest for name in qkv}
        ways = list_candidates(attention.problem, OverlapConfig()).plans
        split = [plan for plan in ways if plan.path == "query_split"]
        times = [_Time(attention.forward_us(p), attention.backward_us(p.for_backward)) for p in split]
        best = min([proj[PLANNED] + at_once, *times], key=sum)
        found[PLANNED] = qkv[PLANNED] + fc1[PLANNED] + fc2[PLANNED] + best + rest
        return found

    def ends(self) -> dict[str, _Time]:
        """The embedding, the last norm, the output layer and the loss."""
        output = self._linear("all_gather_linear", self.vocab, self.hidden)
        embedding = self._linear("embedding_reduce_scatter", self.hidden, 1)
        own = self.tokens // self.group_size * self.hidden * _ITEMSIZE
        # The embedding's gradient is written as a whole.
        table = _Time(0.0, self._moved_us((self.vocab + 2 * self.tokens) * self.hidden * _ITEMSIZE))
        loss = _Time(*(self._moved_us(size * self.tokens * self.vocab) for size in _BYTES_OF_A_LOGIT))
        norm = _Time(self._moved_us(2 * own), self._moved_us(3 * own))
        return {name: output[name] + embedding[name] + table + loss + norm for name in output}

    def _rest(self) -> _Time:
        """What a layer computes besides: element by element."""
        own, every = self.tokens // self.group_size * self.hidden, self.tokens
        heads = every * (self.heads + self.kv_heads) * _HEAD_DIM
        parts = zip(_PASSES_OF_NORMS, _PASSES_OF_ROTARY, _PASSES_OF_SWIGLU, strict=True)
        sizes = (norms * own + rotary * heads + swiglu * every * self.ffn for norms, rotary, swiglu in parts)
        return _Time(*(self._moved_us(size * _ITEMSIZE) for size in sizes))

    def _moved_us(self, size_bytes: float) -> float:
        return self.machine.gemm.pass_us(size_bytes) / _OF_MEMORY

    def _attention(self) -> AttentionCosts:
        problem = AttentionProblem(
            pass_name="fprop",
            rows=self.tokens,
            batch=1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=_HEAD_DIM,
            value_dim=_HEAD_DIM,
            N=self.hidden,
            dtype=DTYPE,
            group_size=self.group_size,
            right=0,
            needs="input+weight",
        )
        return AttentionCosts(problem, self.machine)

    def _linear(self, op: str, N: int, K: int) -> dict[str, _Time]:
        """A linear, or the embedding. Megatron's own backward pass of a column-parallel one is asynchronous."""
        forward = GemmProblem(op, "fprop", self.tokens, 1, N, K, DTYPE, self.group_size)
        needs = "weight" if op == "embedding_reduce_scatter" else "input+weight"
        backward = dataclasses.replace(forward, pass_name="backward", needs=needs)
        passes = (forward, backward)
        stock = [SEQUENTIAL, SEQUENTIAL]
        if op == "all_gather_linear":
            stock[1] = PassPlan("async", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
        return {
            STOCK: _Time(*(predict_parts_us(*pair, self.machine)[0] for pair in zip(passes, stock, strict=True))),
            PLANNED: _Time(*map(self._planned_us, passes)),
            FREE: _Time(*map(self._free_us, passes)),
        }

    def _planned_us(self, problem: GemmProblem) -> float:
        plans = list_candidates(
            problem,
            OverlapConfig(),
            is_link_slow=is_link_slow(problem, self.machine),
            with_rings=not self.machine.traits.replays,
        ).plans
        return min(predict_parts_us(problem, plan, self.machine)[0] for plan in plans)

    def _free_us(self, problem: GemmProblem) -> float:
        """The sequential program with local copies instead of collectives, as `trace.collectives` makes them."""
        free = Channel(latency_us=0.0, bandwidth_gb_s=float("inf"))
        costs = PassCosts(problem, dataclasses.replace(self.machine, collective=free))
        gathers, _, scatters, _ = costs.parts(SEQUENTIAL)
        own = self.tokens // self.group_size
        copies_us = gathers * costs.pass_us(own + self.tokens) + scatters * costs.pass_us(2 * own)
        return costs.collectives_us(SEQUENTIAL) + copies_us


def measured_steps(path: Path) -> list[MeasuredStep]:
    """All steps of batch 1 in a file of rows, FP8's and the CPU's apart. Raises ConfigError where there is none."""
    found = [
        MeasuredStep(*(row[name] for name in ("model", "layers", "sequence", "group_size", "variant", "step_ms")))
        for row in read_rows(path)
        if row.get("op") == "whole_step" and row.get("recipe") is None and row.get("device") != "cpu"
        if row["batch"] == 1 and row["variant"] in (STOCK, PLANNED, FREE)
    ]
    if not found:
        raise ConfigError(f"{path} has no steps that `commfuse trace --step --json` wrote")
    return found
