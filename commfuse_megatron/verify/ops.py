"""Runs the operations against their meaning: forward and every gradient, in fp64, on every rank.

The oracle is `ops.reference` on the same inputs widened to fp64. Exact inputs (small integers) must agree with no
tolerance. The tolerance for random ones follows from the roundings that are allowed, see `tolerance`. The contract that
bites: a case that took another path than it asked for fails, however right its numbers are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapContext, ops
from commfuse_megatron.problem import shard_range
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.verify.attention import AttentionCase, attention_calls
from commfuse_megatron.verify.cases import Case

__all__ = ["CaseResult", "Deviation", "compare", "run_cases", "tolerance", "verify_ops", "worst_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """The largest error of one tensor of a case beside what is allowed; of all calls and ranks the worst."""

    tensor: str
    max_error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the error is allowed; NaN is not."""
        return self.max_error <= self.allowed

    @property
    def fraction(self) -> float:
        """Error in units of what is allowed; infinite where nothing is allowed but something was found."""
        if self.max_error == 0:
            return 0.0
        return self.max_error / self.allowed if self.allowed > 0 else math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """What became of a case. `paths` are those that its calls took, on any rank; `complaints` say why it failed."""

    case: Case | AttentionCase
    deviations: tuple[Deviation, ...]
    paths: tuple[str, ...]
    transport: str
    gemms: tuple[str, ...]
    complaints: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every tensor is right and the path is the one asked for."""
        return not self.complaints

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        case = asdict(self.case) | {"dtype": self.case.dtype_name, "rows": list(self.case.rows)}
        deviations = {d.tensor: {"max_error": d.max_error, "allowed": d.allowed} for d in self.deviations}
        return case | {
            "passed": self.passed,
            "paths": list(self.paths),
            "transport": self.transport,
            "gemms": list(self.gemms),
            "deviations": deviations,
            "complaints": list(self.complaints),
        }


def verify_ops(
    group: dist.ProcessGroup,
    device: torch.device,
    cases: Iterable[Case | AttentionCase],
    *,
    on_case_done: Callable[[], None] = lambda: None,
) -> list[CaseResult]:
    """The result of every case, equal on all ranks of `group`: each one's worst over the ranks.

    Collective over `group`. A failed comparison is a result; an error that an operation raises is raised.
    """
    own = run_cases(group, device, cases, on_case_done=on_case_done)
    everyones: list[list[CaseResult]] = [[] for _ in range(group.size())]
    dist.all_gather_object(everyones, own, group=group)
    return [worst_of(results) for results in zip(*everyones, strict=True)]


def run_cases(
    group: dist.ProcessGroup,
    device: torch.device,
    cases: Iterable[Case | AttentionCase],
    *,
    on_case_done: Callable[[], None] = lambda: None,
) -> list[CaseResult]:
    """The results as this rank sees them. Collective over `group`."""
    own: list[CaseResult] = []
    context: OverlapContext | None = None
    try:
        for case in cases:
            config = case.config()
            if context is None or context.config != config:
                if context is not None:
                    context.close()
                context = OverlapContext(group, config)
            own.append(_run_case(case, context, device))
            on_case_done()
    finally:
        if context is not None and context.is_usable:
            context.close()
    return own


def tolerance(case: Case, terms: int) -> float:
    """The largest error allowed in a sum of `terms` products of standard normal numbers; 0 for exact inputs.

    Such a sum has standard deviation sqrt(terms) and stays below 6 of them. Every rounding to the dtype costs at most
    its unit roundoff times that: one per hop of a ring or per arrived partial, one for the result, one for a bias. A
    partial GEMM accumulates in fp32 (fp64) at least: at most one such roundoff per term. In bfloat16 on 8 ranks this
    is 0.24 standard deviations, while a missing or doubled shard shows as more than one somewhere.
    """
    if case.exact:
        return 0.0
    roundoff = torch.finfo(case.dtype).eps / 2
    accumulator = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps / 2
    return 6 * math.sqrt(terms) * ((case.group_size + 2) * roundoff + terms * accumulator)


def compare(name: str, found: torch.Tensor | None, expected: torch.Tensor | None, allowed: float) -> Deviation:
    """The largest difference of two tensors; infinite if only one is there, or their shapes or placement differ."""
    if found is None and expected is None:
        return Deviation(tensor=name, max_error=0.0, allowed=allowed)
    if found is None or expected is None or found.shape != expected.shape:
        return Deviation(tensor=name, max_error=math.inf, allowed=allowed)
    difference = (found.double() - expected.double()).abs()
    return Deviation(tensor=name, max_error=float(difference.max()) if difference.numel() else 0.0, allowed=allowed)


# --- one case on one rank ---------------------------------------------------------------------------------------------


def _run_case(case: Case | AttentionCase, context: OverlapContext, device: torch.device) -> CaseResult:
    before = {_key(record): record.calls for record in context.report()}
    deviations: dict[str, Deviation] = {}
    if isinstance(case, AttentionCase):
        calls = attention_calls(case, context, device)
    else:
        calls = _linear_calls(case, context, device)
    for found, oracle, allowed in calls:
        for name in found:
            deviation = compare(name, found[name], oracle[name], allowed[name])
            if name not in deviations or not deviation.fraction <= deviations[name].fraction:
                deviations[name] = deviation
    records = [r for r in context.report() if r.op == case.op and r.calls > before.get(_key(r), 0)]
    return _judge(case, tuple(deviations.values()), records, context)


def _linear_calls(
    case: Case, context: OverlapContext, device: torch.device
) -> Iterator[tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None], dict[str, float]]]:
    """Of every call what was found, what fp64 gives, and the errors allowed."""
    for number, rows in enumerate(case.rows):
        inputs = _draw(case, rows, number, context, device)
        found = _call(case, inputs, getattr(ops, case.op), rows, context=context)
        oracle = _call(case, inputs.widened(), getattr(ops.reference, case.op), rows, group=context.group)
        yield found, oracle, {name: tolerance(case, terms) for name, terms in _terms(case, rows).items()}


def _judge(
    case: Case | AttentionCase, deviations: tuple[Deviation, ...], records: list[OpRecord], context: OverlapContext
) -> CaseResult:
    complaints = [
        f"{d.tensor}: error {d.max_error:.3g}, allowed {d.allowed:.3g} (group rank {context.group_rank})"
        for d in deviations
        if not d.passed
    ]
    if not records:
        complaints.append("the report shows no call")
    for record in records:
        expected = case.expected_path if record.pass_name == "fprop" else case.expected_backward_path
        if record.path != expected:
            complaints.append(
                f"took the path {record.path!r} in {record.pass_name}, asked for {expected!r}: {record.reason}"
            )
    return CaseResult(
        case=case,
        deviations=deviations,
        paths=tuple(sorted({record.path for record in records})),
        transport=context.transport_name,
        gemms=tuple(sorted({record.gemm for record in records})),
        complaints=tuple(complaints),
    )


def _key(record: OpRecord) -> tuple:
    return (record.op, record.pass_name, record.M, record.N, record.K, record.dtype)


def worst_of(results: Sequence[CaseResult]) -> CaseResult:
    """One case's results of all ranks, as one."""
    first = results[0]
    by_tensor = zip(*(result.deviations for result in results), strict=True)
    return CaseResult(
        case=first.case,
        # NaN compares false with everything, so it is asked for by name.
        deviations=tuple(max(ds, key=lambda d: (math.isnan(d.max_error), d.fraction)) for ds in by_tensor),
        paths=tuple(sorted({path for result in results for path in result.paths})),
        transport=first.transport,
        gemms=tuple(sorted({gemm for result in results for gemm in result.gemms})),
        complaints=tuple(dict.fromkeys(complaint for result in results for complaint in result.complaints)),
    )


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Leaves of one rank's call; x and grad_y are stored in the layout's base form."""

    x_base: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad_base: torch.Tensor

    def widened(self) -> _Inputs:
        return _Inputs(
            self.x_base.double(),
            self.weight.double(),
            None if self.bias is None else self.bias.double(),
            self.grad_base.double(),
        )


def _draw(case: Case, rows: int, number: int, context: OverlapContext, device: torch.device) -> _Inputs:
    """Inputs that differ between ranks and calls, and are the same in every run."""
    generator = torch.Generator().manual_seed(7919 * number + 101 * rows + context.group_rank)

    def tensor(*shape: int, limit: int = 1) -> torch.Tensor:
        if case.exact:
            return torch.randint(-limit, limit + 1, shape, generator=generator).to(device, case.dtype)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, case.dtype)

    own_rows = shard_range(rows, context.group_size, context.group_rank).size
    rows_in, rows_out = (own_rows, rows) if case.op == "all_gather_linear" else (rows, own_rows)
    shapes = {
        "contiguous": (rows_in, case.batch, case.K),
        "gradient expanded": (rows_in, case.batch, case.K),
        "x transposed": (case.batch, rows_in, case.K),
        "x strided": (rows_in, case.batch, 2 * case.K),
    }
    grad_shape = (1, 1, case.N) if case.layout == "gradient expanded" else (rows_out, case.batch, case.N)
    return _Inputs(
        tensor(*shapes[case.layout], limit=2),
        tensor(case.N, case.K),
        tensor(case.N) if case.has_bias else None,
        tensor(*grad_shape),
    )


def _call(
    case: Case, inputs: _Inputs, op: Callable[..., torch.Tensor], rows: int, **where: Any
) -> dict[str, torch.Tensor | None]:
    """Forward and backward of one call; results by name, None for a gradient that is not due."""
    x_base = inputs.x_base.clone().requires_grad_(case.needs_x)
    weight = inputs.weight.clone().requires_grad_(case.needs_weight)
    bias = None if inputs.bias is None else inputs.bias.clone().requires_grad_()
    x = x_base
    if case.layout == "x transposed":
        x = x_base.transpose(0, 1)
    elif case.layout == "x strided":
        x = x_base[..., ::2]
    total_rows = {"total_rows": rows} if case.op == "all_gather_linear" else {}
    y = op(x, weight, bias, **total_rows, **where)
    y.backward(inputs.grad_base.expand_as(y))
    return {
        "y": y.detach(),
        "x.grad": x_base.grad,
        "weight.grad": weight.grad,
        "bias.grad": None if bias is None else bias.grad,
    }


def _terms(case: Case, rows: int) -> dict[str, int]:
    """How many products (of numbers of standard deviation 1) each element of a result sums, over all ranks."""
    tokens = rows * case.batch
    ranks_in_y, ranks_in_dx = (1, case.group_size) if case.op == "all_gather_linear" else (case.group_size, 1)
    return {
        "y": case.K * ranks_in_y + 1,
        "x.grad": case.N * ranks_in_dx,
        "weight.grad": max(1, tokens),
        "bias.grad": max(1, tokens),
    }
