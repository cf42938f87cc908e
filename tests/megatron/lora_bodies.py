"""Run on every rank: what `commfuse verify --megatron --lora` runs, with a fault that it must find; checkpoints."""

import warnings
import zlib
from typing import Any
from unittest import mock

import torch
from megatron.core import dist_checkpointing, parallel_state
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.plugin import convert_model, norm_linear
from commfuse_megatron.testing import cpu_megatron
from commfuse_megatron.testing.gpt import SmallGPT, loss_of, tensor_parallel
from commfuse_megatron.testing.lora import add_lora
from commfuse_megatron.testing.models import Recipe, build_chunks, make_config, name_with_separate_norm
from commfuse_megatron.testing.training import Training
from commfuse_megatron.tools.verify.lora_cases import lora_configurations
from commfuse_megatron.tools.verify.megatron_models import ModelResult, verify_models
from tests.megatron.checkpoint_checks import folders, save_entries

TOLERANCE = 1e-13
#: Which adapters -> which models of ours. Row-parallel pairs of the two forms are split differently.
OURS = {"rows": ("lora_first", "fused"), "gathered": ("spec_first", "fused")}
FAULTY = "dense spec_first fused kept autograd frozen rows"


def verify_pairs(group: dist.ProcessGroup, _: torch.device, names: list[str]) -> tuple[list[ModelResult], Any]:
    """The results; on two ranks what is found wrong where adapters see the input of a norm instead of its output."""
    by_name = {each.name: each for each in lora_configurations()}
    with cpu_megatron(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = verify_models([by_name[name] for name in names])
        complaints: tuple[str, ...] = ()
        if group.size() == 2:
            with mock.patch.object(norm_linear, "with_norm_output", lambda _, output, bias, __: (output, bias)):
                complaints = verify_models([by_name[FAULTY]])[0].complaints
        else:
            for norm_output, kinds in OURS.items():
                check_adapters_resume(norm_output, kinds)
        return results, complaints


def check_adapters_resume(norm_output: Any, kinds: tuple[str, ...]) -> None:
    """Adapters that stock has trained go on in ours and back: from state dicts, and from distributed checkpoints at
    another tensor-parallel size."""
    with folders(1 + len(kinds)) as (of_stock, *of_ours):
        with tensor_parallel(2):
            stock = model("stock", 2, norm_output, seed=3)
            train(stock)
            trained, loss = adapters_of(stock), evaluate(stock)
            save_entries(sharded_adapters(stock), of_stock)
            for kind in kinds:
                ours = model(kind, 2, norm_output, seed=4)
                assert abs(evaluate(ours) - loss) > 1e-3 * loss
                take(ours, trained)
                assert abs(evaluate(ours) - loss) <= TOLERANCE * loss
                resumed = model("stock", 2, norm_output, seed=5)
                take(resumed, adapters_of(ours))
                assert_same(trained, adapters_of(resumed))
                after = [train(each) for each in (ours, resumed)]
                assert abs(after[0] - after[1]) <= TOLERANCE * loss
                assert abs(evaluate(ours) - evaluate(resumed)) <= 1e-12 * loss
        with tensor_parallel(4):
            for kind, folder in zip(kinds, of_ours, strict=True):
                ours = model(kind, 4, norm_output, seed=4)
                take(ours, dist_checkpointing.load(sharded_adapters(ours), of_stock))
                assert abs(evaluate(ours) - loss) <= TOLERANCE * loss
                save_entries(sharded_adapters(ours), folder)
        with tensor_parallel(2):
            for folder in of_ours:
                resumed = model("stock", 2, norm_output, seed=5)
                take(resumed, dist_checkpointing.load(sharded_adapters(resumed), folder))
                assert_same(trained, adapters_of(resumed))


def model(kind: str, group_size: int, norm_output: Any, *, seed: int) -> Any:
    """A GPT of the same weights each time, with adapters drawn from `seed`, which alone are trained."""
    recipe = Recipe(gpt=SmallGPT(dtype=torch.float64), is_fused=kind == "fused")
    overlap = OverlapConfig() if kind in ("spec_first", "fused") else None
    (built,) = build_chunks(recipe, make_config(recipe, group_size), overlap=overlap)
    for name, parameter in built.named_parameters():
        if "norm" in name:
            generator = torch.Generator().manual_seed(zlib.crc32(name_with_separate_norm(name).encode()))
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    built.requires_grad_(False)
    add_lora(built, norm_output=norm_output, seed=seed)
    return convert_model(built, OverlapConfig()) if kind == "lora_first" else built


def batch() -> torch.Tensor:
    return torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(5))


def train(m: Any) -> float:
    return Training(m, lr=1e-2).step(batch())


def evaluate(m: Any) -> float:
    with torch.no_grad():
        return loss_of(m, batch()).item()


def adapters_of(m: Any) -> dict[str, Any]:
    return {n: v.clone() for n, v in m.state_dict().items() if ".adapter." in n and isinstance(v, torch.Tensor)}


def sharded_adapters(m: Any) -> dict[str, Any]:
    entries = m.sharded_state_dict(metadata={"dp_cp_group": parallel_state.get_data_parallel_group()})
    return {name: entry for name, entry in entries.items() if ".adapter." in name}


def take(m: Any, adapters: dict[str, Any]) -> None:
    found = m.load_state_dict(adapters, strict=False)
    assert not found.unexpected_keys
    assert not [name for name in found.missing_keys if ".adapter." in name and not name.endswith("_extra_state")]


def assert_same(expected: dict[str, Any], found: dict[str, Any]) -> None:
    assert len(expected) == 2 * 9
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
