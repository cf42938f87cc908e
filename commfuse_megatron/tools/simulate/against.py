"""A larger group as measured, beside what two ranks had said of it: emulated, and predicted from their rows."""

import statistics
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from commfuse_megatron.tools.bench.rows import Row
from commfuse_megatron.tools.simulate.fit import Machines
from commfuse_megatron.tools.simulate.predict import key_of_way, name_of_way, predicted_ms, rows_of_ways


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured row of a group of `group_size` ranks; None where it was not emulated or cannot be predicted."""

    case: str
    M: int
    group_size: int
    variant: str
    measured_ms: float
    emulated_ms: float | None
    predicted_ms: float | None

    @property
    def emulation_error(self) -> float | None:
        """emulated / measured - 1."""
        return None if self.emulated_ms is None else self.emulated_ms / self.measured_ms - 1

    @property
    def prediction_error(self) -> float | None:
        """predicted / measured - 1."""
        return None if self.predicted_ms is None else self.predicted_ms / self.measured_ms - 1

    def as_json(self) -> dict[str, object]:
        """For the file."""
        return {
            **asdict(self),
            "emulation_error": self.emulation_error,
            "prediction_error": self.prediction_error,
        }


def compare(
    measured: Iterable[Row], rows: Iterable[Row], machines: Machines, left_out: Collection[str] = ()
) -> list[Comparison]:
    """Every measured forward row that was emulated among `rows` or can be predicted from `machines`, by its way.

    Only rows of the machines' device and link count: between machines nothing is compared. left_out: cases that are not
    wanted.
    """
    real = [row for row in measured if not row.emulated and row.case not in left_out]
    emulated = {key_of_way(row): row.median_ms for row in rows_of_ways(rows, machines) if row.emulated}
    comparisons = [
        Comparison(
            row.case,
            row.M,
            row.group_size,
            name_of_way(row),
            row.median_ms,
            emulated.get(key_of_way(row)),
            predicted_ms(row, machines),
        )
        for row in rows_of_ways(real, machines)
    ]
    return [entry for entry in comparisons if entry.emulated_ms is not None or entry.predicted_ms is not None]


def median_size(errors: Sequence[float | None]) -> float | None:
    """Of the sizes of the errors that there are."""
    known = [abs(error) for error in errors if error is not None]
    return statistics.median(known) if known else None
