"""Times both overlapped linears beside their bounds and the sequential program, under torchrun:

    torchrun --nproc-per-node 2 -m commfuse_megatron.benchmark.linears --cases llama-70b.fc2 --json rows.json

Owns the variants and the rows; the way of timing is `timing`'s. The contract that bites: a variant is timed only after
its result was found right, and one that did not run its own path is an error, not a row.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.benchmark.cases import CASE_NAMES, LinearCase, linear_case
from commfuse_megatron.benchmark.timing import Sample, measure
from commfuse_megatron.errors import VerificationError
from commfuse_megatron.schedule import schedule_bound_us
from commfuse_megatron.transport.base import Message

__all__ = ["Row", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case and variant; times in milliseconds, median and 95th percentile over rounds, maximum over ranks.

    comm_only_ms: the transfers alone over the transport that the variants use, at the best of their channel counts.
    comm_only_collective_ms: NCCL's collective for the same data. schedule_bound_ms: the closed form for the variant's
    chunks, from this run's compute_only and comm_only.
    """

    case: str
    op: str
    pass_name: str
    M: int
    N: int
    K: int
    dtype: str
    group_size: int
    emulated: bool
    variant: str
    path: str
    transport: str
    median_ms: float
    p95_ms: float
    compute_only_ms: float
    comm_only_ms: float
    comm_only_collective_ms: float
    sequential_ms: float
    schedule_bound_ms: float | None
    device: str
    link: str
    commit: str

    def as_json(self) -> dict[str, object]:
        """The row with the key names of the report format."""
        values = asdict(self)
        return {"case": values.pop("case"), "op": values.pop("op"), "pass": values.pop("pass_name"), **values}


@dataclass(frozen=True, slots=True)
class Sliced:
    """One way of ours."""

    algorithm: str
    chunks_per_shard: int
    channels: int
    tile_order: str
    regain_sms: bool
    lanes: int = 1

    @property
    def name(self) -> str:
        regain = " regain" if self.regain_sms else ""
        lanes = f"{self.lanes}x" if self.lanes > 1 else ""
        return f"{self.algorithm} m={self.chunks_per_shard} {lanes}{self.channels}ch {self.tile_order}{regain}"

    def config(self) -> OverlapConfig:
        chosen = {"path": "sliced", "algorithm": self.algorithm, "chunks_per_shard": self.chunks_per_shard}
        return OverlapConfig.from_dict(
            {
                "linear": {"fprop": chosen, "dgrad": chosen},
                "transport": {"nccl_channels": self.channels, "nccl_lanes": self.lanes},
                "kernel": {"tile_order": self.tile_order, "regain_sms": self.regain_sms},
            }
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 0 when done, 2 when there is nothing to run on."""
    options = _parse(arguments)
    if torch.cuda.device_count() < int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        Console(stderr=True).print("needs one CUDA device per rank; see `commfuse doctor`")
        return 2
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    try:
        rows = [
            row
            for name in options.cases
            for M in options.tokens
            for row in _run_case(linear_case(name, M, dist.get_world_size()), options)
        ]
        if dist.get_rank() == 0:
            _print(rows)
            if options.json:
                options.json.write_text(json.dumps({"rows": [row.as_json() for row in rows]}, indent=1))
    finally:
        dist.destroy_process_group()
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Times the overlapped linears beside their bounds and the sequential program.",
        epilog="example: torchrun --nproc-per-node 2 -m commfuse_megatron.benchmark.linears --cases llama-70b.fc2",
    )
    default = ["llama-70b.qkv", "llama-70b.proj", "llama-70b.fc2"]
    parser.add_argument("--cases", nargs="+", choices=CASE_NAMES, default=default, metavar="CASE")
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192], metavar="M")
    parser.add_argument("--algorithms", nargs="+", choices=["direct", "ring"], default=["direct"])
    parser.add_argument("--chunks", nargs="+", type=int, default=[1, 2], metavar="m", help="chunks per shard")
    parser.add_argument("--channels", nargs="+", type=int, default=[20], help="NCCL channels")
    parser.add_argument("--tile-orders", nargs="+", choices=["static", "stealing"], default=["static"])
    parser.add_argument("--lanes", nargs="+", type=int, default=[1], help="NCCL communicators per message")
    parser.add_argument("--regain", nargs="+", choices=["on", "off"], default=["on"], help="kernel.regain_sms")
    parser.add_argument("--backward", action="store_true", help="time dgrad + wgrad too")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--commit", default=None, help="recorded in the rows; default: asked from git")
    options = parser.parse_args(arguments)
    options.commit = _commit() if options.commit is None else options.commit
    return options


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


@dataclass(slots=True)
class _Operands:
    x: torch.Tensor
    weight: torch.Tensor
    x_full: torch.Tensor
    grad_y: torch.Tensor
    grad_full: torch.Tensor


def _draw(case: LinearCase) -> _Operands:
    torch.manual_seed(dist.get_rank())
    shard_rows = case.M // case.group_size
    gathers = case.op == "all_gather_linear"

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x = tensor(shard_rows if gathers else case.M, 1, case.K).requires_grad_()
    grad_y = tensor(case.M if gathers else shard_rows, 1, case.N)
    weight = tensor(case.N, case.K).requires_grad_()
    return _Operands(x, weight, tensor(case.M, case.K), grad_y, tensor(case.M, case.N))


def _run_case(case: LinearCase, options: argparse.Namespace) -> list[Row]:
    group = dist.group.WORLD
    assert group is not None
    operands = _draw(case)
    ways = [
        Sliced(algorithm, m, channels, order, regains == "on", lanes)
        for algorithm in options.algorithms
        for m in options.chunks
        for channels in options.channels
        for order in options.tile_orders
        for regains in options.regain
        for lanes in options.lanes
    ]
    contexts = {way: OverlapContext(group, way.config()) for way in ways}
    rows = []
    for pass_name in ("fprop", "backward") if options.backward else ("fprop",):
        transports = {f"{way.lanes}x{way.channels}ch": context for way, context in contexts.items()}
        variants = _bounds(case, operands, pass_name, transports, group)
        variants |= {way.name: _timed_call(case, operands, pass_name, context) for way, context in contexts.items()}
        samples = measure(variants, group, rounds=options.rounds)
        rows += _rows(case, pass_name, samples, {way.name: way for way in ways}, options.commit)
    for context in contexts.values():
        paths = {record.path for record in context.report()}
        if paths != {"sliced"}:
            raise VerificationError(f"{case.name}: timed as sliced, but ran {sorted(paths)}")
        context.close()
    return rows


def _bounds(
    case: LinearCase,
    operands: _Operands,
    pass_name: str,
    contexts: dict[str, OverlapContext],
    group: dist.ProcessGroup,
) -> dict[str, Callable[[], object]]:
    """compute_only, comm_only (collective, and the schedule's transfers alone by lanes and channels) and sequential."""
    weight, x_full, grad_full = operands.weight.detach(), operands.x_full, operands.grad_full
    reference = getattr(ops.reference, case.op)
    shard = torch.randn(case.shard_shape, device="cuda", dtype=torch.bfloat16)
    full = torch.randn(case.M, case.shard_shape[1], device="cuda", dtype=torch.bfloat16)
    gathers = case.op == "all_gather_linear"

    def gather() -> None:
        dist.all_gather_into_tensor(full, shard, group=group)

    def scatter() -> None:
        dist.reduce_scatter_tensor(shard, full, group=group)

    # What travels: fprop one collective; a column's backward gathers x and scatters dx, a row's gathers dy.
    collectives = {"fprop": [gather if gathers else scatter], "backward": [gather, scatter] if gathers else [gather]}
    exchanges = len(collectives[pass_name])

    def transfers(context: OverlapContext) -> None:
        for _ in range(exchanges):
            for distance in range(1, case.group_size):
                to_rank = (group.rank() + distance) % case.group_size
                from_rank = (group.rank() - distance) % case.group_size
                target = full[from_rank * shard.size(0) : (from_rank + 1) * shard.size(0)]
                context.link.transport.exchange(Message(shard, to_rank, 0), Message(target, from_rank, 0)).wait()

    if pass_name == "fprop":
        outs = torch.empty(case.M, case.N, device="cuda", dtype=torch.bfloat16)

        def compute() -> None:
            torch.mm(x_full, weight.t(), out=outs)

        sequential = _without_grad(lambda: reference(operands.x, operands.weight, group=group))
    else:
        grad_x, grad_weight = torch.empty_like(x_full), torch.empty_like(weight)

        def compute() -> None:
            torch.mm(grad_full, weight, out=grad_x)
            torch.mm(grad_full.t(), x_full, out=grad_weight)

        y = reference(operands.x, operands.weight, group=group)
        sequential = _backward_of(y, operands)
    return {
        "compute_only": compute,
        "comm_only collective": lambda: [move() for move in collectives[pass_name]],
        "sequential": sequential,
        **{f"comm_only {name}": functools.partial(transfers, context) for name, context in contexts.items()},
    }


def _timed_call(case: LinearCase, operands: _Operands, pass_name: str, context: OverlapContext) -> Callable[[], object]:
    """Our op's pass, after its results were compared with the sequential program's."""
    call = getattr(ops, case.op)
    y = call(operands.x, operands.weight, context=context)
    expected = getattr(ops.reference, case.op)(operands.x, operands.weight, group=context.group)
    _check(case, "y", y, expected)
    found = torch.autograd.grad(y, [operands.x, operands.weight], operands.grad_y, retain_graph=True)
    wanted = torch.autograd.grad(expected, [operands.x, operands.weight], operands.grad_y)
    for name, ours, theirs in zip(("x.grad", "weight.grad"), found, wanted, strict=True):
        _check(case, name, ours, theirs)
    if pass_name == "backward":
        return _backward_of(y, operands)
    return _without_grad(lambda: call(operands.x, operands.weight, context=context))


def _check(case: LinearCase, name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
    # Two bf16 results of fp32 sums differ by about 3e-3; a crossed or missing partial by order 1.
    if not error < 1e-2:
        raise VerificationError(f"{case.name}: {name} differs from the reference by {error:.1e} relative")


def _without_grad(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def _backward_of(y: torch.Tensor, operands: _Operands) -> Callable[[], object]:
    return lambda: torch.autograd.grad(y, [operands.x, operands.weight], operands.grad_y, retain_graph=True)


def _link() -> str:
    return "host" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "nvlink"


def _rows(
    case: LinearCase, pass_name: str, samples: dict[str, Sample], ways: dict[str, Sliced], commit: str
) -> list[Row]:
    compute_ms = samples["compute_only"].median_ms
    comm_ms = min(samples[name].median_ms for name in samples if name.startswith("comm_only") and name.endswith("ch"))
    rows = []
    for name, sample in samples.items():
        way = ways.get(name)
        bound_ms = None
        if way is not None and pass_name == "fprop":
            bound_ms = schedule_bound_us(compute_ms, comm_ms, case.group_size, way.chunks_per_shard)
        rows.append(
            Row(
                case=case.name,
                op=case.op,
                pass_name=pass_name,
                M=case.M,
                N=case.N,
                K=case.K,
                dtype="bfloat16",
                group_size=case.group_size,
                emulated=False,
                variant=name,
                path="sliced" if way is not None else "sequential",
                transport="nccl",
                median_ms=sample.median_ms,
                p95_ms=sample.p95_ms,
                compute_only_ms=compute_ms,
                comm_only_ms=comm_ms,
                comm_only_collective_ms=samples["comm_only collective"].median_ms,
                sequential_ms=samples["sequential"].median_ms,
                schedule_bound_ms=bound_ms,
                device=torch.cuda.get_device_name(),
                link=_link(),
                commit=commit,
            )
        )
    return rows


def _print(rows: list[Row]) -> None:
    table = Table(title=f"{rows[0].device} x {rows[0].group_size}, link {rows[0].link}, bf16")
    names = ("case", "pass", "variant")
    numbers = ("M", "median ms", "p95 ms", "/ sequential", "/ max(comp, comm)", "/ bound")
    for heading in names:
        table.add_column(heading)
    for heading in numbers:
        table.add_column(heading, justify="right")
    for row in rows:
        ideal_ms = max(row.compute_only_ms, row.comm_only_ms)
        table.add_row(
            row.case,
            row.pass_name,
            row.variant,
            str(row.M),
            f"{row.median_ms:.3f}",
            f"{row.p95_ms:.3f}",
            f"{row.median_ms / row.sequential_ms:.3f}",
            f"{row.median_ms / ideal_ms:.3f}",
            "" if row.schedule_bound_ms is None else f"{row.median_ms / row.schedule_bound_ms:.3f}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
