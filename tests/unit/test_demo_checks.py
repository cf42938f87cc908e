"""What makes the demo fail: losses too far apart, or a call that was not overlapped; and where its text is from."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch

from commfuse_megatron.tools.common.modes import Mode
from commfuse_megatron.tools.common.text import batch_of, standard_library_text
from commfuse_megatron.tools.demo import cli as demo
from commfuse_megatron.tools.demo.training import Comparison, Run, complaints_of, gradient_limit, loss_limits, task_for
from tests.harness import run_python
from tests.unit.test_cli import subcommands

STEPS = 20


def comparison(differences: dict[int, float] | None = None, **changes: object) -> Comparison:
    """A run of 20 steps and one layer where all is well, but for the given differences (by step from 1)."""
    stock = [4.0] * STEPS
    plugin = [loss + (differences or {}).get(step, 0.0) for step, loss in enumerate(stock, 1)]
    layer = {"name": "fc1", "path": "overlapped", "overlapped_calls": STEPS, "stock_calls": 0, "reasons": ()}
    layer |= {"sequential_calls": 0, "sequential_reasons": ()}
    op = {"op": "linear_reduce_scatter", "N": 8, "K": 8, "calls": STEPS, "path": "sliced", "modes": {"stepped": STEPS}}
    ops = tuple(op | {"pass_name": name} for name in ("fprop", "backward"))
    run = Run(loss=tuple(plugin), ops=ops, layers=(layer | changes,), gradient="fc1.weight", gradient_error=0.0)
    return Comparison(stock_loss=tuple(stock), runs={"stepped": run}, recording={})


def with_run(found: Comparison, mode: Mode = "stepped", **changes: object) -> Comparison:
    """The same with another run of this mode."""
    return dataclasses.replace(found, runs=found.runs | {mode: dataclasses.replace(found.recorded, **changes)})


def complaints(found: Comparison, dtype: torch.dtype = torch.float32, group_size: int = 2) -> list[str]:
    return complaints_of(found, loss_limits(dtype, len(found.stock_loss), group_size), gradient_limit(dtype))


def test_equal_losses_and_counted_calls_pass() -> None:
    assert complaints(comparison()) == []
    assert complaints(comparison({1: 9e-7, 20: 9e-5})) == []


@pytest.mark.parametrize(("step", "difference", "dtype"), [
    (1, 2e-6, torch.float32), (5, 2e-6, torch.float32), (6, 2e-4, torch.float32), (20, -2e-4, torch.float32),
    (3, math.nan, torch.float32), (20, math.inf, torch.float32), (1, 2e-10, torch.float64), (20, 2e-10, torch.float64),
    (1, 1e-2, torch.bfloat16), (20, 2e-2, torch.bfloat16),
])  # fmt: skip
def test_losses_too_far_apart_fail(step: int, difference: float, dtype: torch.dtype) -> None:
    (complaint,) = complaints(comparison({step: difference}), dtype)
    assert complaint.startswith("stepped: losses of steps ")


@pytest.mark.parametrize("error", [0.3, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gradient_too_far_from_stocks_fails(error: float, dtype: torch.dtype) -> None:
    (complaint,) = complaints(with_run(comparison(), gradient_error=error), dtype)
    assert complaint.startswith("stepped: the gradient of fc1.weight differs by ")


@pytest.mark.parametrize(("mode", "modes", "words"), [
    ("tape", {"tape": STEPS}, None), ("graph", {"tape": 4, "graph": STEPS - 4}, None),
    ("graph", {"tape": STEPS}, "no call became a graph"),
    ("graph", {"stepped": 1, "graph": STEPS - 1}, f"as graph {STEPS - 1}"), ("tape", {"stepped": STEPS}, "as tape 0"),
    ("tape", {"tape": STEPS - 1, "graph": 1}, f"as tape {STEPS - 1}"), ("stepped", {"tape": STEPS}, "as stepped 0"),
])  # fmt: skip
def test_calls_that_did_not_run_in_their_mode_fail(mode: Mode, modes: dict[str, int], words: str | None) -> None:
    good = with_run(
        comparison(), "tape", ops=tuple(op | {"modes": {"tape": STEPS}} for op in comparison().recorded.ops)
    )
    forward, backward = good.runs["tape"].ops
    look_up = {"op": "embedding_reduce_scatter", "modes": {"stepped": STEPS}}
    ops = (forward | look_up, backward | {"modes": modes})
    found = complaints(with_run(good, mode, ops=ops))
    if words is None:
        assert found == []
    else:
        (complaint,) = found
        assert complaint.startswith(f"{mode}: linear_reduce_scatter backward")
        assert words in complaint


@pytest.mark.parametrize("num_steps", [1, 3, 5, 6, 19, 20, 21, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_step_has_one_limit(num_steps: int, dtype: torch.dtype) -> None:
    covered = [step for limit in loss_limits(dtype, num_steps, 2) for step in range(limit.first, limit.last + 1)]
    assert covered == list(range(1, num_steps + 1))


@pytest.mark.parametrize("changes", [
    {"path": "stock", "overlapped_calls": 0, "reasons": ("sequence parallelism is off",)},
    {"path": "mixed", "overlapped_calls": STEPS - 1},
    {"path": "sequential", "overlapped_calls": 0, "sequential_reasons": ("sequential: forced",)},
    {"path": "not called yet", "overlapped_calls": 0}, {"overlapped_calls": STEPS + 1},
])  # fmt: skip
def test_a_layer_that_was_not_overlapped_fails(changes: dict) -> None:
    (complaint,) = complaints(comparison(**changes))
    assert complaint.startswith("stepped: fc1: ")
    assert all(reason in complaint for reason in changes.get("reasons", ()))


@pytest.mark.parametrize("change", [{"path": "sequential"}, {"calls": STEPS - 1}])
def test_an_op_that_did_not_run_sliced_every_time_fails(change: dict) -> None:
    good = comparison()
    forward, backward = good.recorded.ops
    found = with_run(good, ops=(forward, backward | change))
    (complaint,) = complaints(found)
    assert "backward calls ran sliced, expected 20" in complaint


def test_a_report_without_layers_fails() -> None:
    found = with_run(comparison(), ops=(), layers=())
    assert len(complaints(found)) == 2


def test_the_text_is_python_and_batches_repeat() -> None:
    text = standard_library_text(50_000)
    assert len(text) == 50_000
    assert b"import " in text
    first = batch_of(text, step=3, batch=4, length=17)
    assert first.shape == (4, 17)
    assert first.dtype == torch.int64
    assert bytes(first[0].tolist()) in text
    assert torch.equal(first, batch_of(text, step=3, batch=4, length=17))
    assert not torch.equal(first, batch_of(text, step=4, batch=4, length=17))
    assert batch_of(b"abc", step=0, batch=2, length=3).tolist() == [[97, 98, 99]] * 2


def test_no_more_of_a_text_is_read_than_is_used(tmp_path: Path) -> None:
    """Fails without a limit, and then must not be tried on /dev/zero."""
    file = tmp_path / "text"
    with file.open("wb") as opened:
        opened.truncate(demo.MOST_TEXT_BYTES + 1)
    assert len(demo._read_text(str(file))) == demo.MOST_TEXT_BYTES
    if Path("/dev/zero").exists():
        assert len(demo._read_text("/dev/zero")) == demo.MOST_TEXT_BYTES
    (option,) = re.findall("first ([0-9]+) are used", " ".join(subcommands()["demo"].format_help().split()))
    assert int(option) == demo.MOST_TEXT_BYTES


def test_a_task_names_its_dtype() -> None:
    assert task_for("cuda", dtype=torch.bfloat16, num_steps=1, text=b"").dtype_name == "bfloat16"


@pytest.mark.parametrize(("level", "are_shown"), [("WARNING", False), ("INFO", True)])
def test_what_is_said_of_others_on_import_is_shown_if_asked_for(level: str, are_shown: bool, tmp_path: Path) -> None:
    """Fails without the filters for SyntaxWarning and for Transformer Engine, which misses its part for JAX.

    In a process of its own, since filters and log levels stay.
    """
    for name in ("megatron", "transformer_engine", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text('"""\\-"""\n', encoding="utf-8")
        warns = f"import warnings; warnings.warn('{name} lacks something', RuntimeWarning)\n"
        (tmp_path / name / "__init__.py").write_text(warns, encoding="utf-8")
    script = (
        "from commfuse_megatron.tools.common import output\n"
        "import logging; output.configure_logging(logging." + level + ", rank=1)\n"
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import megatron.module, transformer_engine, own.module\n"
    )
    ran = run_python("-B", "-W", "default", "-c", script)
    assert ran.returncode == 0, ran.stderr
    assert "own/module.py" in ran.stderr
    assert "own lacks something" in ran.stderr
    for foreign in ("megatron/module.py", "megatron lacks something", "transformer_engine lacks something"):
        assert (foreign in ran.stderr) == are_shown
