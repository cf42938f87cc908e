"""Run on every rank: what `commfuse verify --megatron` runs, and the same with faults that it must find."""

import warnings
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from commfuse_megatron.ops.weight_grad import DueWeightGrad
from commfuse_megatron.testing import cpu_megatron
from commfuse_megatron.tools.verify.megatron_cases import choose_configurations
from commfuse_megatron.tools.verify.megatron_models import ModelResult, verify_models


def verify(_: dist.ProcessGroup, __: torch.device, names: list[str] | None) -> list[ModelResult]:
    with cpu_megatron(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return verify_models(choose_configurations(dist.get_world_size(), names))


def verify_all(
    group: dist.ProcessGroup, device: torch.device, names: list[str]
) -> tuple[list[ModelResult], dict[str, tuple[str, ...]]]:
    """The results, and on two ranks what is found wrong with faults in the way."""
    return verify(group, device, names), _verify_with_faults(group, device) if group.size() == 2 else {}


def _verify_with_faults(group: dist.ProcessGroup, device: torch.device) -> dict[str, tuple[str, ...]]:
    """What is found wrong with a dense model, by fault."""
    faults = {
        "a gradient that is off by 1e-11": _scaled_weight_gradient,
        "an operation that never ran": _never_overlapped,
        "a shard of another rank": _shards_exchanged,
    }
    found = {}
    for name, fault in faults.items():
        with cpu_megatron(), fault():
            (result,) = verify(group, device, ["dense"])
        found[name] = result.complaints
    return found


def _scaled_weight_gradient() -> Any:
    stock = DueWeightGrad.finish

    def scaled(due: DueWeightGrad) -> Any:
        result = stock(due)
        return result if result is None else result * (1 + 1e-11)

    return mock.patch.object(DueWeightGrad, "finish", scaled)


def _never_overlapped() -> Any:
    from commfuse_megatron.plugin import linear

    return mock.patch.object(linear, "overlap_context", return_value=None)


def _shards_exchanged() -> Any:
    from commfuse_megatron import ops

    stock = ops.linear_reduce_scatter
    return mock.patch.object(ops, "linear_reduce_scatter", lambda *args, **kwargs: stock(*args, **kwargs).flip(0))
