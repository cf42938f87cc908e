"""The shims for Megatron on the CPU: each removes its wall, and all of it comes back."""

import importlib.machinery
import importlib.util
import sys
import warnings
from typing import Any

import pytest
import torch
from megatron.core.models import backends
from megatron.core.tensor_parallel import random
from megatron.core.transformer import utils
from megatron.core.transformer.moe import token_dispatcher
from torch.utils.checkpoint import checkpoint

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.testing import cpu_megatron
from commfuse_megatron.testing.cpu import SHIMS
from commfuse_megatron.testing.pretraining import cpu_pretraining


def snapshot() -> dict[str, Any]:
    owners = (torch.autograd, torch.cuda, torch.cuda.nvtx, random, random.CheckpointWithoutOutput, token_dispatcher)
    state = {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}
    return state | {"te": sys.modules.get("transformer_engine", "absent")}


def changed(before: dict[str, Any]) -> set[str]:
    after = snapshot()
    return {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)}


def test_everything_is_restored() -> None:
    before = snapshot()
    with cpu_megatron():
        assert changed(before)
    assert changed(before) == set()

    def fail() -> None:
        with cpu_megatron():
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert changed(before) == set()


@pytest.mark.parametrize("name", SHIMS)
def test_a_shim_can_be_left_out(name: str) -> None:
    before = snapshot()
    with SHIMS[name]():
        alone = changed(before)
    with cpu_megatron(without=[name]):
        assert not alone & changed(before)
    assert changed(before) == set()


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="Apex is installed")
def test_only_missing_gpu_packages_are_not_said() -> None:
    """Fails without the filter: Megatron warns of Apex and Transformer Engine some ten times."""

    def import_again() -> None:
        spec = importlib.util.spec_from_file_location("backends_again", backends.__file__)
        assert spec is not None
        assert spec.loader is not None
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        warnings.warn("another thing is not installed", stacklevel=1)

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        import_again()
        assert [str(each.message).split()[0] for each in seen] == ["Apex", "another"]
        del seen[:]
        with cpu_megatron():
            import_again()
        assert [str(each.message).split()[0] for each in seen] == ["another"]
        import_again()
        assert len(seen) == 3, "it is over with the block"


def test_unknown_shim() -> None:
    with pytest.raises(ConfigError, match=r"no shim is called gpu; there are .*rng"), cpu_megatron(without=["gpu"]):
        pass


def test_cuda_means_cpu() -> None:
    with cpu_megatron():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.zeros(2, device=torch.device("cuda", 1)).device.type == "cpu"
        assert torch.zeros(2).cuda().device.type == "cpu"
        assert torch.zeros(2).to("cuda").device.type == "cpu"
        assert torch.zeros(2).to("cuda:0", torch.float64).dtype == torch.float64
        assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(2).type(torch.float64).dtype == torch.float64
        assert torch.empty(2, device=torch.cuda.current_device()).device.type == "cpu"
    assert torch.zeros(2).type() == "torch.FloatTensor"


MASKS = {
    "causal": lambda: utils.get_default_causal_mask(3),
    "sliding window": lambda: utils.get_sliding_window_causal_mask(3, 3, (1, 0)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("way", ["checkpoint", "reentrant checkpoint", "Megatron's checkpoint", "hook, by grad"])
def test_cuda_means_cpu_in_what_autograd_calls(way: str, mask: str) -> None:
    """Fails without the shim around the engine: "Found no NVIDIA driver" where a layer is computed again."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return x.masked_fill(MASKS[mask](), 0.0).square()

    def grad(is_recomputed: bool) -> torch.Tensor:
        x = torch.arange(1.0, 10.0).view(3, 3).requires_grad_()
        if not is_recomputed:
            y = run(x)
        elif way == "Megatron's checkpoint":
            random.initialize_rng_tracker(force_reset=True)
            y = random.checkpoint(run, False, x)
        elif way == "hook, by grad":
            y = run(x)
            y.register_hook(lambda gradient: gradient.masked_fill(MASKS[mask](), 0.0))
            return torch.autograd.grad(y.sum(), x)[0]
        else:
            y = checkpoint(run, x, use_reentrant=way == "reentrant checkpoint")
        y.sum().backward()
        assert x.grad is not None
        return x.grad

    with cpu_megatron():
        assert torch.equal(grad(False), grad(True))


def test_streams_and_events_do_nothing() -> None:
    with cpu_megatron():
        stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.current_stream())
            event.record()
        stream.wait_event(event)
        assert isinstance(stream.record_event(), type(event))
        assert stream.query()
        assert event.query()
        assert event.elapsed_time(event) == 0.0
        torch.cuda.synchronize()
        torch.cuda.nvtx.range_push("name")
        torch.cuda.nvtx.range_pop()


@pytest.mark.filterwarnings("ignore:Only transformer-engine")
def test_torch_compile_takes_what_stands_for_its_functions() -> None:
    """Megatron's router compiles a function; torch.compile looks at all of torch then."""
    with cpu_pretraining():
        assert torch._dynamo.trace_rules.get_torch_obj_rule_map.__wrapped__()  # type: ignore[attr-defined]


def test_random_states_are_kept_apart(caplog: pytest.LogCaptureFixture) -> None:
    with cpu_megatron():
        random.initialize_rng_tracker(force_reset=True)
        tracker = random.get_cuda_rng_tracker()
        tracker.add("a", 1)
        tracker.add("b", 2)
        torch.manual_seed(0)
        expected = torch.rand(2)
        torch.manual_seed(0)
        with tracker.fork("a"):
            first = torch.rand(2)
            with tracker.fork("b"):
                other = torch.rand(2)
            second = torch.rand(2)
        assert torch.equal(torch.rand(2), expected)
        torch.manual_seed(1)
        assert torch.equal(torch.cat([first, second]), torch.rand(4))
        torch.manual_seed(2)
        assert torch.equal(other, torch.rand(2))
        with pytest.raises(KeyError, match="never added"), tracker.fork("c"):
            pass
    assert not caplog.records, "Megatron's own tracker complains when the CPU generator moves"


def test_fp8_flag() -> None:
    assert random.CheckpointWithoutOutput(fp8=False).fp8 is True, "the wall is gone upstream: drop the shim"
    with cpu_megatron():
        assert random.CheckpointWithoutOutput(fp8=False).fp8 is False
        assert random.CheckpointWithoutOutput(fp8=True).fp8 is True


def test_recomputed_outputs_fill_the_first_ones_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(random, "load_inline", None)
    weight = torch.randn(3, 3, dtype=torch.float64)
    results = []
    for discards in (False, True):
        x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
        with cpu_megatron():
            random.initialize_rng_tracker(force_reset=True)
            checkpoint = random.CheckpointWithoutOutput()
            first = checkpoint.checkpoint(torch.sin, x) if discards else torch.sin(x)
            y = first @ weight + first.view(3, 2).square().view(2, 3)  # a view is kept for the backward pass, too
            if discards:
                checkpoint.discard_output_and_register_recompute(y)
                assert first.untyped_storage().nbytes() == 0
            y.sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_transformer_engine_is_hidden_before_megatron_only(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    found = importlib.machinery.ModuleSpec("transformer_engine", None)
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: found if name == "transformer_engine" else find_spec(name)
    )
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    with pytest.raises(ConfigError, match="before anything imports megatron"), cpu_megatron():
        pass
    monkeypatch.delitem(sys.modules, "megatron.core")
    with SHIMS["transformer_engine"](), pytest.raises(ImportError):
        import transformer_engine  # noqa: F401
    assert "transformer_engine" not in sys.modules
