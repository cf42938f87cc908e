"""Whole steps of a Megatron GPT as the planner's model has them: stock, with the plugin, without communication.

Forward and backward of one batch, no optimizer, as `commfuse trace --step` times them. What the device takes: linears,
attention, its exchanges and the embedding are the planner's predictions; norms, activations, the loss and the rest
move bytes. What the host takes to submit it: so long for each layer, as measured. Each pass lasts until both are
through.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.attention import AttentionCosts
from commfuse_megatron.plan.candidates import list_candidates
from commfuse_megatron.plan.cost_model import PassCosts, predict_parts_us
from commfuse_megatron.plan.machine import Channel, MachineModel
from commfuse_megatron.plan.pass_plan import PassPlan, parts_of
from commfuse_megatron.plan.ulysses import list_ulysses_plans, predict_ulysses_us
from commfuse_megatron.problem import AttentionProblem, GemmProblem, UlyssesProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.bench.report import read_rows
from commfuse_megatron.tools.common.cases import FREE, PLANNED, STEP_LAYERS, STOCK
from commfuse_megatron.tools.common.models import MODELS
from commfuse_megatron.tools.simulate.fit import DTYPE, SEQUENTIAL
from commfuse_megatron.tools.simulate.predict import candidates_on

#: The newest measured steps, by `docs/make_measured_steps.py`.
SHIPPED = Path(__file__).with_name("measured_steps.json")

#: Of a step: as users read them.
VARIANTS = {STOCK: "stock", PLANNED: "with the plugin", FREE: "without communication"}

_FREE = Channel(latency_us=0.0, bandwidth_gb_s=float("inf"))

_HEAD_DIM = 128
_ITEMSIZE = 2

# What GEMMs of a step reach of what they do in a benchmark's bursts, whose clocks are higher: 680 (70B) and 720 (8B) of
# 763 to 790 TFLOP/s, traced steps of S 8192 on 2 x H200, November 2026. Assumed figures are those of long runs.
_SUSTAINED = 0.92
# What element-wise kernels of a layer reach of memory's rate in a sum: 2.3 of 2.9 TB/s explain the steps of 8B and of
# 70B alike. Those of the loss, which are plain ones, reach all of it: of traced steps of four layers they took 9.8 ms
# (8B) to 12 (70B) where 9.4 are predicted (4c493ad, e8c6fe5).
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

# What hidden transfers of the plugin cost a step nevertheless, as a share of their time: they slow the GEMMs beside
# them, ranks wait for each other, CUDA graphs begin late. Linears alone show 0.08 to 0.19 (8B, 70B, M 8192, two runs).
# Fitted: with it the plugin's step of one row (e8c6fe5: 8B, 32 layers, S 8192) is as much longer than the one without
# communication as measured; any other row would give 0.33 to 0.55.
_SHOWN_OF_HIDDEN = 0.45
# What the host takes to submit a layer of Transformer Engine's, forward and backward, whatever its sizes: as far, in
# percent, from the fastest as from the slowest of three hosts on which a step that waits for the host was measured (8B,
# 32 layers, S 2048; e8c6fe5, 0694a0a, 2bf6ab1), its ends included, and parted as on the three in the mean. They differ
# by 13 to 21 %, and on a fourth one stock's step took 182 ms, not 217 (be15e82). The rows of single linears (b40c86c)
# say less, of stock's forward pass a quarter: the rest is Megatron's Python.
_HOST_US_OF_A_LAYER = {STOCK: (3625.0, 3141.0), PLANNED: (2666.0, 1991.0), FREE: (3161.0, 2724.0)}


class _Time(NamedTuple):
    forward_us: float
    backward_us: float

    def __add__(self, other: tuple[float, ...]) -> "_Time":  # type: ignore[override]
        return _Time(self.forward_us + other[0], self.backward_us + other[1])

    def times(self, count: int) -> "_Time":
        return _Time(self.forward_us * count, self.backward_us * count)


class StepMachine(NamedTuple):
    """Where steps are predicted: GPUs, the link between them, and the planner's model for a group of some size."""

    device: str
    link: str
    of_group: Callable[[int], MachineModel]


class StepSizes(NamedTuple):
    """A step of one sequence of so many tokens, of `model` with so many layers.

    group_size: of all ranks, of which `context_parallel` share the sequence, and the others are tensor-parallel.
    """

    model: str
    layers: int
    tokens: int
    group_size: int
    context_parallel: int = 1


class StepPrediction(NamedTuple):
    """forward_ms, step_ms: by variant. host_bound: the passes that wait for the host, by variant that has any."""

    sizes: StepSizes
    forward_ms: dict[str, float]
    step_ms: dict[str, float]
    host_bound: dict[str, tuple[str, ...]]

    def as_json(self) -> dict[str, object]:
        """For the file; `predicted` tells it from a measured row."""
        times = {name: getattr(self, name) for name in ("forward_ms", "step_ms", "host_bound")}
        return {"predicted": True, **self.sizes._asdict(), **times}


class MeasuredStep(NamedTuple):
    """A step that `commfuse trace --step --json` wrote. step_ms: by variant. run: tells it from others of its sizes."""

    device: str
    transport: str
    sizes: StepSizes
    step_ms: dict[str, float]
    run: str

    def fits(self, machine: StepMachine) -> bool:
        """Whether it ran on such GPUs, over such a link."""
        here = machine.of_group(self.sizes.group_size).traits.transport
        return (self.device, self.transport) == (machine.device, here)


def predict_step(sizes: StepSizes, on: StepMachine) -> StepPrediction:
    """Forward and backward of one batch. Raises ConfigError for sizes that the ranks do not divide."""
    layers, step = sizes.layers, _Step(sizes, on)
    layer, ends = step.layers(), step.ends()
    forward_ms, step_ms, host_bound = {}, {}, {}
    for name, (host_forward_us, host_backward_us) in _HOST_US_OF_A_LAYER.items():
        device = layer[name].times(layers) + ends[name]
        forward_us = max(device.forward_us, layers * host_forward_us)
        # The host goes on while the device is behind; the device cannot begin before the host.
        device_us = forward_us + device.backward_us
        step_us = max(device_us, layers * (host_forward_us + host_backward_us))
        forward_ms[name], step_ms[name] = forward_us / 1e3, step_us / 1e3
        waits = {"forward": forward_us > device.forward_us, "backward": step_us > device_us}
        if any(waits.values()):
            host_bound[name] = tuple(pass_name for pass_name, does_wait in waits.items() if does_wait)
    return StepPrediction(sizes, forward_ms, step_ms, host_bound)


def _machine_of(on: StepMachine, group_size: int) -> MachineModel:
    """Of a group, as long runs have it; that of one rank sends nothing."""
    machine = on.of_group(max(2, group_size))
    if machine.source == "measured":
        rate = dataclasses.replace(machine.gemm, tflops=_SUSTAINED * machine.gemm.tflops)
        machine = dataclasses.replace(machine, gemm=rate)
    return machine


class _Step:
    """The parts of a step on one rank, by variant."""

    def __init__(self, step: StepSizes, on: StepMachine) -> None:
        self.sharing, self.sequence = step.context_parallel, step.tokens
        if step.group_size % self.sharing:
            raise ConfigError(f"{step.group_size} ranks cannot be cut for a context-parallel size of {self.sharing}")
        self.group_size = step.group_size // self.sharing
        self.machine = _machine_of(on, self.group_size)
        self.machine_of_exchange = _machine_of(on, self.sharing)
        sizes = MODELS[step.model]
        # In zigzag order a context-parallel rank has two chunks of the sequence.
        for name, size, ranks in (
            ("tokens", step.tokens, self.group_size * (2 * self.sharing if self.sharing > 1 else 1)),
            ("attention heads", sizes["num_attention_heads"], step.group_size),
            *((name.removeprefix("num_").replace("_", " "), size, self.group_size) for name, size in sizes.items()),
        ):
            if size % ranks and name != "query groups":
                which = "ranks" if ranks == step.group_size else "parts"
                raise ConfigError(f"{step.model}: {size} {name} cannot be cut for {ranks} {which}")
        self.tokens = step.tokens // self.sharing
        self.hidden = sizes["hidden_size"]
        self.heads = sizes["num_attention_heads"] // self.group_size
        self.kv_heads = max(1, sizes["num_query_groups"] // self.group_size)
        if self.kv_heads % self.sharing and self.sharing % self.kv_heads:
            which = f"{self.sharing} context-parallel ranks"
            raise ConfigError(f"{step.model}: {self.kv_heads} heads of keys cannot be cut for {which}, nor shared")
        self.ffn, self.vocab = sizes["ffn_hidden_size"] // self.group_size, sizes["vocab_size"] // self.group_size

    def layers(self) -> dict[str, _Time]:
        """One layer."""
        qkv = self._linear("all_gather_linear", (self.heads + 2 * self.kv_heads) * _HEAD_DIM, self.hidden)
        proj = self._linear("linear_reduce_scatter", self.hidden, self.heads * _HEAD_DIM)
        fc1 = self._linear("all_gather_linear", 2 * self.ffn, self.hidden)
        fc2 = self._linear("linear_reduce_scatter", self.hidden, self.ffn)
        if self.sharing > 1:
            exchanged = self._exchanged_attention()
            rest = self._rest()
            return {name: qkv[name] + proj[name] + fc1[name] + fc2[name] + exchanged[name] + rest for name in qkv}
        attention = self._attention()
        at_once = _Time(attention.at_once_us(is_backward=False), attention.at_once_us(is_backward=True))
        rest = self._rest()
        found = {name: qkv[name] + proj[name] + fc1[name] + fc2[name] + at_once + rest for name in qkv}
        ways = list_candidates(attention.problem, OverlapConfig()).plans
        split = [plan for plan in ways if plan.path == "query_split"]
        shown = _Time(*map(self._shown_us, self._passes("linear_reduce_scatter", self.hidden, self.heads * _HEAD_DIM)))
        times = [_Time(attention.forward_us(p), attention.backward_us(p.for_backward)) + shown for p in split]
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
        loss = _Time(*(self.machine.gemm.pass_us(size * self.tokens * self.vocab) for size in _BYTES_OF_A_LOGIT))
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

    def _exchanged_attention(self) -> dict[str, _Time]:
        """Attention of a shared sequence between its exchanges."""
        machine = self.machine_of_exchange
        problem = UlyssesProblem(
            pass_name="fprop",
            rows=self.sequence,
            batch=1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=_HEAD_DIM,
            value_dim=_HEAD_DIM,
            dtype=DTYPE,
            group_size=self.sharing,
            order="zigzag",
            right=0,
        )

        def time_of(plan: PassPlan, on: MachineModel) -> _Time:
            forward_us = predict_ulysses_us(problem, plan, on)
            both_us = predict_ulysses_us(dataclasses.replace(problem, needs="input"), plan, on)
            return _Time(forward_us, both_us - forward_us)

        stock = PassPlan("stock")
        theirs = time_of(stock, machine)
        free = time_of(stock, dataclasses.replace(machine, collective=_FREE))
        sent = self.tokens * (2 * self.heads + 2 * self.kv_heads) * _HEAD_DIM * _ITEMSIZE // self.sharing
        shown_us = _SHOWN_OF_HIDDEN * (self.sharing - 1) * machine.link.time_us(sent)
        ours = [time_of(plan, machine) for plan in list_ulysses_plans(problem, OverlapConfig())]
        hidden = [time + _Time(*(min(shown_us, part_us) for part_us in free)) for time in ours[1:]]
        return {STOCK: theirs, PLANNED: min([theirs, ours[0], *hidden], key=sum), FREE: free}

    def _passes(self, op: str, N: int, K: int) -> tuple[GemmProblem, GemmProblem]:
        """Forward and backward of a linear, or of the embedding."""
        forward = GemmProblem(op, "fprop", self.tokens, 1, N, K, DTYPE, self.group_size)
        needs = "weight" if op == "embedding_reduce_scatter" else "input+weight"
        return forward, dataclasses.replace(forward, pass_name="backward", needs=needs)

    def _linear(self, op: str, N: int, K: int) -> dict[str, _Time]:
        """A linear, or the embedding. Megatron's own backward pass of a column-parallel one is asynchronous."""
        passes = self._passes(op, N, K)
        if self.group_size == 1:
            alone = _Time(*(predict_parts_us(each, SEQUENTIAL, self.machine)[0] for each in passes))
            return dict.fromkeys(VARIANTS, alone)
        stock = [SEQUENTIAL, SEQUENTIAL]
        if op == "all_gather_linear":
            stock[1] = PassPlan("async", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
        return {
            STOCK: _Time(*(predict_parts_us(*pair, self.machine)[0] for pair in zip(passes, stock, strict=True))),
            PLANNED: _Time(*map(self._planned_us, passes)),
            FREE: _Time(*map(self._free_us, passes)),
        }

    def _planned_us(self, problem: GemmProblem) -> float:
        shown_us = self._shown_us(problem)
        return min(
            predict_parts_us(problem, plan, self.machine)[0] + plan.is_scheduled * shown_us
            for plan in candidates_on(problem, self.machine)
        )

    def _shown_us(self, problem: GemmProblem) -> float:
        """What a pass takes longer in the plugin's step than its dry-run, for the transfers that its GEMMs may hide."""
        costs = PassCosts(problem, self.machine)
        gathers, computes, scatters, has_weight = parts_of(costs.problem, SEQUENTIAL)
        one_us = (self.group_size - 1) * costs.transfer_us(self.tokens // self.group_size)
        gemms_us = computes * costs.product_us(self.tokens) + has_weight * costs.weight_gradient_us()
        return _SHOWN_OF_HIDDEN * min((gathers + scatters) * one_us, gemms_us)

    def _free_us(self, problem: GemmProblem) -> float:
        """The sequential program with local copies instead of collectives, as `trace.collectives` makes them."""
        costs = PassCosts(problem, dataclasses.replace(self.machine, collective=_FREE))
        gathers, _, scatters, _ = parts_of(costs.problem, SEQUENTIAL)
        own = self.tokens // self.group_size
        copies_us = gathers * costs.pass_us(own + self.tokens) + scatters * costs.pass_us(2 * own)
        return costs.collectives_us(SEQUENTIAL) + copies_us


def measured_steps(path: Path) -> list[MeasuredStep]:
    """All steps of a file of rows that can be predicted: of batch 1, without FP8, on GPUs. Raises ConfigError where
    there is none."""
    found: dict[tuple[Any, Any, Any, StepSizes], list[dict[str, float]]] = {}
    for row in read_rows(path):
        is_step = row.get("op") == "whole_step" and row.get("model") in STEP_LAYERS and row["batch"] == 1
        if is_step and row.get("recipe") is None and row.get("device") != "cpu" and row["variant"] in VARIANTS:
            names = ("model", "layers", "sequence", "group_size", "context_parallel")
            sizes = StepSizes(*(row[name] for name in names if row.get(name) is not None))
            runs = found.setdefault((row.get("commit"), row.get("device"), row.get("transport"), sizes), [{}])
            if row["variant"] in runs[-1]:  # measured again
                runs.append({})
            runs[-1][row["variant"]] = row["step_ms"]
    if not found:
        raise ConfigError(f"{path} has no steps of {', '.join(STEP_LAYERS)} that `commfuse trace --step --json` wrote")
    return [
        MeasuredStep(device, transport, sizes, step_ms, _name_run(commit, number, len(runs)))
        for (commit, device, transport, sizes), runs in found.items()
        for number, step_ms in enumerate(runs, 1)
    ]


def _name_run(commit: str | None, number: int, count: int) -> str:
    """By the commit that was measured; of several runs by it, or of none that is named, with a number."""
    parts = [f"commit {commit}"] if commit else []
    return ", ".join(parts + [f"run {number}"] * (count > 1 or not commit))
