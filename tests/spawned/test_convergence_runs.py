"""Five runs of small models on two ranks, float32 held to float64, through checkpoints; what a step of a GPT costs."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import distributed as dist

from tests.harness import run_spawned

#: Name -> what the task is, and its layers, embedding and output layer included.
TASKS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt": ({}, 10),
    "hybrid": ({"pattern": "*-"}, 6),
    "adapters": ({"lora": "gathered"}, 10),
    "shared": ({"context_parallel": 2}, 2),
}


def train(_: dist.ProcessGroup, __: torch.device) -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")
    from commfuse_megatron.tools.common.text import standard_library_text
    from commfuse_megatron.tools.verify.convergence import ConvergenceTask, compare_runs, complaints_of
    from commfuse_megatron.tools.verify.step_costs import measure_steps

    found: dict[str, Any] = {}
    for name, (options, _) in TASKS.items():  # all in one group: starting Megatron takes longer than training
        task = ConvergenceTask(
            device_type="cpu", dtype=torch.float32, reference_dtype=torch.float64, text=standard_library_text(100_000),
            **options, num_steps=4, exchange_at=2, hidden_size=32, ffn_hidden_size=64, sequence=16,
        )  # fmt: skip
        steps: list[None] = []
        converged = compare_runs(task, on_step=lambda steps=steps: steps.append(None))
        assert len(steps) == task.num_runs_steps
        found[name] = {
            "complaints": complaints_of(converged),
            "curves": {run: (c.first_step, c.loss, c.grad_norm) for run, c in converged.curves.items()},
            "layers": converged.layers,
        }
    task = dataclasses.replace(task, lora="gathered", context_parallel=1)
    return found | {"costs": measure_steps(task)}


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_runs_agree_and_checkpoints_interchange() -> None:
    for found in run_spawned(2, train):
        for name, (_, layers) in TASKS.items():
            check(found[name], layers)
        check_costs(found["costs"])


def check_costs(costs: dict[tuple[str, str], Any]) -> None:
    for weights in ("trained", "frozen, adapters"):
        stock, plugin = (costs[weights, run] for run in ("stock", "plugin"))
        assert 0 < plugin.saved_bytes <= stock.saved_bytes
        assert min(stock.step_ms, plugin.step_ms) > 0
        assert list(plugin.layers.values()) == [None] * 10


def check(found: dict[str, Any], layers: int) -> None:
    """Of ranks that share sequences the layers are core attentions; their sums are others than stock's."""
    is_shared = all(name.endswith("core_attention") for name in found["layers"]["plugin"])
    assert is_shared == (layers == 2)
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
            assert mine == pytest.approx(theirs[2:], rel=(16 if is_shared else 4) * 2.0**-23, abs=0)
