"""Five runs of a small GPT and of a hybrid model on two ranks, float32 held to float64, through checkpoints."""

from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.harness import run_spawned

LAYERS = {None: 10, "*-": 6}  # embedding and output layer included


def train(_: dist.ProcessGroup, __: torch.device) -> dict[str | None, dict[str, Any]]:
    import warnings

    warnings.simplefilter("ignore")
    from commfuse_megatron.verify.convergence import Task, compare_runs, complaints_of
    from commfuse_megatron.verify.text import standard_library_text

    found = {}
    for pattern in LAYERS:  # both in one group: starting Megatron takes longer than training
        task = Task(
            device_type="cpu",
            dtype=torch.float32,
            reference_dtype=torch.float64,
            text=standard_library_text(100_000),
            pattern=pattern,
            num_steps=4,
            exchange_at=2,
            hidden_size=32,
            ffn_hidden_size=64,
            sequence=16,
        )
        steps: list[None] = []
        converged = compare_runs(task, on_step=lambda steps=steps: steps.append(None))
        assert len(steps) == task.num_runs_steps
        found[pattern] = {
            "complaints": complaints_of(converged),
            "curves": {run: (c.first_step, c.loss, c.grad_norm) for run, c in converged.curves.items()},
            "layers": converged.layers,
        }
    return found


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_runs_agree_and_checkpoints_interchange() -> None:
    for by_pattern in run_spawned(2, train):
        for pattern, layers in LAYERS.items():
            check(by_pattern[pattern], layers)


def check(found: dict[str, Any], layers: int) -> None:
    assert found["complaints"] == []
    assert {run: len(reported) for run, reported in found["layers"].items()} == {
        "plugin": layers,
        "plugin after stock": layers,
    }
    curves = found["curves"]
    assert [curves[run][0] for run in curves] == [1, 1, 1, 3, 3]
    assert 5.0 < curves["reference"][1][0] < 6.5
    assert curves["reference"][1][-1] < curves["reference"][1][0], "it learns"
    # The resumed runs continue the others. Two ranks sum two partials in one way; only the embedding's gradient adds
    # the rows of one token in another order than stock: four units of a float32.
    for resumed, source in (("plugin after stock", "stock"), ("stock after plugin", "plugin")):
        for mine, theirs in zip(curves[resumed][1:], curves[source][1:], strict=True):
            assert mine == pytest.approx(theirs[2:], rel=4 * 2.0**-23, abs=0)
