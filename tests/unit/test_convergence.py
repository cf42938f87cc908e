"""What counts as converging alike (mean distances from the reference, every linear overlapped), and as saved."""

import dataclasses
import math
from typing import Any

import pytest
import torch

from commfuse_megatron.tools.verify.convergence import Convergence, ConvergenceTask, Curve, complaints_of, ratios_of
from commfuse_megatron.tools.verify.step_costs import _saved_bytes

LAYERS = {"plugin": {"qkv": None, "proj": None}, "plugin after stock": {"qkv": None, "proj": None}}


def made(**changed: Any) -> Convergence:
    """Four steps, checkpoints after the second; stock is off by 0.1 in every step, the others by as much."""
    curves = {
        "reference": Curve(1, [4.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0]),
        "stock": Curve(1, [4.1, 2.9, 2.1, 0.9], [1.1, 0.9, 1.1, 0.9]),
        "plugin": Curve(1, [3.9, 3.1, 1.9, 1.1], [0.9, 1.1, 0.9, 1.1]),
        "plugin after stock": Curve(3, [2.1, 0.9], [1.1, 0.9]),
        "stock after plugin": Curve(3, [1.9, 1.1], [0.9, 1.1]),
    }
    layers = changed.pop("layers", LAYERS)
    return Convergence(curves | {run.replace("_", " "): curve for run, curve in changed.items()}, layers)


def test_equally_good_runs_pass() -> None:
    assert complaints_of(made()) == []
    for distance, stock in ratios_of(made()).values():
        assert math.isclose(distance, 0.1, rel_tol=1e-9)
        assert math.isclose(stock, 0.1, rel_tol=1e-9)


def test_a_run_too_far_from_the_reference_fails() -> None:
    far = Curve(1, [4.25, 3.25, 2.25, 1.25], [1.0, 1.0, 1.0, 1.0])
    (complaint,) = complaints_of(made(plugin=far))
    assert complaint.startswith("plugin: mean loss differs from the reference's by 0.25, stock's by 0.1")
    just_within = Curve(1, [4.19, 3.19, 2.19, 1.19], [1.0, 1.0, 1.0, 1.0])
    assert complaints_of(made(plugin=just_within)) == []


def test_a_resumed_run_is_held_to_its_own_steps() -> None:
    forgot_the_optimizer = Curve(3, [2.1, 1.5], [1.1, 0.9])
    (complaint,) = complaints_of(made(stock_after_plugin=forgot_the_optimizer))
    assert complaint.startswith("stock after plugin: mean loss")
    (complaint,) = complaints_of(made(plugin_after_stock=Curve(3, [2.1, 0.9], [1.5, 0.5])))
    assert complaint.startswith("plugin after stock: mean grad_norm")


def test_nan_fails() -> None:
    broken = Curve(1, [4.0, math.nan, 2.0, 1.0], [1.0, 1.0, 1.0, 1.0])
    assert len(complaints_of(made(plugin=broken))) == 1
    assert complaints_of(made(stock=broken)), "nothing is allowed where stock itself has no number"


def test_a_linear_that_was_not_overlapped_fails() -> None:
    stock_proj = {"qkv": None, "proj": "stock: a reason"}
    assert complaints_of(made(layers={**LAYERS, "plugin": stock_proj})) == ["plugin: proj: stock: a reason"]
    assert complaints_of(made(layers={**LAYERS, "plugin": {}})) == ["plugin: the model has no tensor-parallel linear"]


def test_what_is_still_kept_counts_once_and_parameters_do_not() -> None:
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        x.exp()  # saves its result, which nobody keeps
        doubled = 2 * x
        return (linear(doubled) * doubled).sum()  # saves the weight, `doubled` twice, and what the linear gives

    assert _saved_bytes(linear, forward) == 2 * 8 * 4 * 4


@pytest.mark.parametrize(("device_type", "impl", "shared"), [
    ("cuda", "transformer_engine", {"stock", "plugin", "plugin after stock", "stock after plugin"}),
    ("cpu", "local", {"plugin", "plugin after stock"}), ("cuda", "local", {"plugin", "plugin after stock"}),
])  # fmt: skip
def test_who_shares_sequences(device_type: str, impl: str, shared: set[str]) -> None:
    options: dict[str, Any] = {"device_type": device_type, "transformer_impl": impl, "context_parallel": 2}
    task = ConvergenceTask(dtype=torch.bfloat16, reference_dtype=torch.float32, **options)
    assert {run for run in made().curves if task.sharing_of(run) == 2} == shared
    assert task.stock_shares == ("stock" in shared)


def test_more_is_asked_of_losses_where_stock_shares_sequences() -> None:
    farther = Curve(1, [4.106, 3.106, 2.106, 1.106], [1.106, 0.9, 1.1, 0.9])
    assert complaints_of(made(plugin=farther)) == []
    asked = dataclasses.replace(made(plugin=farther), allowed_ratio=1.05)
    (complaint,) = complaints_of(asked)
    assert complaint.startswith("plugin: mean loss")
    assert complaint.endswith("allowed is 1.05 times as much")
