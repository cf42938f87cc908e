"""What the benchmark writes down: one row per case and variant, and the figures that follow from it.

Definitions (all of one row, hence of one process and one `measure`):

    exposed_ms           median - compute_only
    overlap_efficiency   1 - exposed / (sequential - compute_only): 1 hides everything, 0 nothing, below 0 is a loss
    ideal_fraction       max(compute_only, comm_only) / median
    schedule_fraction    schedule bound / median
    tail_ms              from the end of the last GEMM on the compute stream to the end of the operation
    split_loss_ms        the slices' GEMMs alone - compute_only

On the CPU the times only show that the code runs: none of these is given there.
"""

import json
import math
import os
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.problem import DTYPE_BYTES
from commfuse_megatron.tools.common.cases import PLANNED

_TIMES = ("median_ms", "p95_ms", "compute_only_ms", "comm_only_ms", "comm_only_collective_ms", "sequential_ms")
#: Of variants that do not do all that a pass is for.
BOUND_PATHS = ("compute", "transfers", "slices")
_DERIVED = ("exposed_ms", "overlap_efficiency", "ideal_fraction", "schedule_fraction")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case and variant; times in milliseconds, median and 95th percentile over rounds, maximum over ranks.

    compute_only_ms: the best of the GEMMs measured. comm_only_ms: the best of our transports' transfers alone and the
    collective. comm_only_collective_ms: the group's own collectives for the same data.
    schedule_bound_ms: what the schedule allows for the variant's chunks, from compute_only and what this variant's own
    transport takes alone, which need not be the best: a closed form, of query-split attention simulated. Transfers
    alone are issued step by step: a call that a graph moves faster, as small ones, can be below it.
    host_us: host time of a call that finds the device idle. reason: why the planner chose this path.
    group_size: of an emulated row, the size that is emulated. shrink: what the published sizes were divided by.
    recipe: of FP8, None without. layers: of the model whose step is timed, None of a single operation.
    """

    case: str
    op: str
    pass_name: str
    M: int
    N: int
    K: int
    dtype: str
    group_size: int
    variant: str
    path: str
    transport: str
    median_ms: float
    p95_ms: float
    compute_only_ms: float
    comm_only_ms: float
    comm_only_collective_ms: float
    sequential_ms: float
    emulated: bool = False
    recipe: str | None = None
    layers: int | None = None
    rounds: int = 0
    algorithm: str = ""
    chunks_per_shard: int | None = None
    schedule_bound_ms: float | None = None
    host_us: float | None = None
    tail_ms: float | None = None
    split_loss_ms: float | None = None
    max_error: float | None = None
    reason: str = ""
    shrink: int = 1
    device: str = ""
    link: str = ""
    commit: str = ""
    cuda_device_max_connections: str | None = None

    @property
    def is_comparable(self) -> bool:
        """Whether its times may be compared with others: not on the CPU."""
        return self.device != "cpu"

    @property
    def is_linear(self) -> bool:
        """Whether a linear was measured: not a block with attention in it."""
        return self.op in ("all_gather_linear", "linear_reduce_scatter") or self.all_reduces

    @property
    def all_reduces(self) -> bool:
        """Whether it is a linear without sequence parallelism: no machine is fitted to such rows."""
        return self.op in ("linear_grad_all_reduce", "linear_all_reduce")

    @property
    def schedule(self) -> str:
        """The path, and how its shards are cut and sent: "sliced ring m=2"."""
        ring = " ring" if self.algorithm == "ring" else ""
        return f"{self.path}{ring} m={self.chunks_per_shard}"

    @property
    def exposed_ms(self) -> float | None:
        """Time that communication adds to the computation."""
        return self.median_ms - self.compute_only_ms if self.is_comparable else None

    @property
    def overlap_efficiency(self) -> float | None:
        """The share of the sequential program's exposed time that is hidden."""
        saved_at_most = self.sequential_ms - self.compute_only_ms
        exposed = self.exposed_ms
        return None if exposed is None or saved_at_most <= 0 else 1 - exposed / saved_at_most

    @property
    def ideal_ms(self) -> float:
        """No less is possible: all computation, or all communication."""
        return max(self.compute_only_ms, self.comm_only_ms)

    @property
    def ideal_fraction(self) -> float | None:
        """1 when only the longer of computation and communication is left."""
        return self.ideal_ms / self.median_ms if self.is_comparable else None

    @property
    def schedule_fraction(self) -> float | None:
        """How close the schedule was carried out to its bound."""
        if self.schedule_bound_ms is None or not self.is_comparable:
            return None
        return self.schedule_bound_ms / self.median_ms

    @property
    def problem(self) -> tuple[object, ...]:
        """What is solved, whatever the variant, and by which commit: rows that share it were measured together."""
        return (*self.task, self.commit)

    @property
    def task(self) -> tuple[object, ...]:
        """What is solved, and where."""
        sizes = (self.M, self.N, self.K, self.dtype, self.recipe, self.shrink, self.group_size)
        return (self.case, self.pass_name, *sizes, self.emulated, self.device, self.link)

    def as_json(self) -> dict[str, object]:
        """The row with the key names of the report format, and what follows from it."""
        values = asdict(self)
        pass_name = values.pop("pass_name")
        derived = {name: getattr(self, name) for name in _DERIVED}
        return {"case": values.pop("case"), "op": values.pop("op"), "pass": pass_name, **values, **derived}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read what `as_json` wrote, in this version or an earlier one."""
        known = {field.name for field in fields(cls)}
        values = {key: value for key, value in data.items() if key in known}
        return cls(pass_name=data["pass"], **values)

    def complain(self) -> str | None:
        """What of it nobody can have measured, in one sentence; None if nothing."""
        for name in _TIMES:
            ms = getattr(self, name)
            if ms is None and name == "sequential_ms":  # of earlier versions
                continue
            is_time = isinstance(ms, int | float) and 0 <= ms < math.inf
            if not is_time or (name == "median_ms" and not ms):
                return f"{name} is no time in milliseconds: {ms!r}"
        for name, least in (("M", 1), ("N", 1), ("K", 1), ("group_size", 2), ("shrink", 1)):
            number = getattr(self, name)
            if not isinstance(number, int) or number < least:
                return f"{name} must be an integer of at least {least}, is {number!r}"
        for name, words in (("dtype", tuple(DTYPE_BYTES)), ("algorithm", ("", "direct", "ring"))):
            if getattr(self, name) not in words:
                return f"{name} must be of {', '.join(words)}, is {getattr(self, name)!r}"
        return None


#: What every row in a file has, under the names of the report format.
_KEYS = tuple("pass" if f.name == "pass_name" else f.name for f in fields(Row) if f.default is MISSING)


class Report:
    """The JSON file of a run: its header and its rows, written anew after every case, so that nothing is lost."""

    def __init__(self, path: Path | None, header: dict[str, Any], rows: Iterable[Row] = ()) -> None:
        self.path = path
        self.header = header
        self.rows = list(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows and write the file, if there is one."""
        self.rows += rows
        self.write()

    def write(self) -> None:
        """Replace the file at once: a run that is killed leaves the one before or this one, never a half."""
        if self.path is None:
            return
        lines = ",\n  ".join(json.dumps(row.as_json()) for row in self.rows)
        head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in self.header.items())
        path = self.path.resolve()  # a link stays one
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.part")
        unfinished.write_text(f'{{\n{head} "rows": [\n  {lines}\n ]\n}}\n', encoding="utf-8")
        os.replace(unfinished, path)


def load_report(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """Header and rows of a file that `Report` wrote. Raises ConfigError for anything else."""
    what = f"{path} is no file that `commfuse bench --json` wrote"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise ConfigError(f"{what}: not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
        raise ConfigError(f'{what}: it has no list "rows"')
    rows = []
    for number, row in enumerate(data.pop("rows"), 1):
        missing = [key for key in _KEYS if not isinstance(row, dict) or key not in row]
        if missing:
            raise ConfigError(f"{what}: row {number} of its rows has no {', '.join(missing)}")
        rows.append(Row.from_json(row))
        complaint = rows[-1].complain()
        if complaint is not None:
            raise ConfigError(f"{what}: row {number} of its rows: {complaint}")
    return data, rows


def has_word_prefix(name: str, prefix: str) -> bool:
    """Whether the first words of a variant's name are `prefix`; "sequential_mine" is no "sequential"."""
    return f"{name} ".startswith(f"{prefix} ")


class Problem(dict[str, Row]):
    """The rows of one problem by variant, in their order."""

    @property
    def any(self) -> Row:
        """One of them, for what they share."""
        return next(iter(self.values()))

    @property
    def planned(self) -> Row | None:
        """That of the path that the planner took."""
        return self.get(PLANNED)

    @property
    def fastest(self) -> Row:
        """That of the least time, bounds aside."""
        return min((row for row in self.values() if row.path not in BOUND_PATHS), key=lambda row: row.median_ms)

    @property
    def stock_ms(self) -> float | None:
        """The better of what a user has without us."""
        return min((self[name].median_ms for name in ("sequential", "megatron") if name in self), default=None)

    def ms(self, variant: str) -> float | None:
        """Of one variant, if it is there."""
        return self[variant].median_ms if variant in self else None

    def best(self, prefix: str) -> Row | None:
        """The fastest of the variants whose first words are `prefix`."""
        rows = [row for name, row in self.items() if has_word_prefix(name, prefix)]
        return min(rows, key=lambda row: row.median_ms, default=None)

    def best_ms(self, prefix: str) -> float | None:
        """Its time."""
        row = self.best(prefix)
        return None if row is None else row.median_ms


def by_problem(rows: Iterable[Row]) -> list[Problem]:
    """The problems in the order of their first rows."""
    problems: dict[tuple[object, ...], Problem] = {}
    for row in rows:
        problems.setdefault(row.problem, Problem())[row.variant] = row
    return list(problems.values())


def ratio(value: float | None, other: float | None) -> float | None:
    """None where one of them is."""
    return None if value is None or other is None else value / other
