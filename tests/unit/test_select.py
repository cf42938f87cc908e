"""Which transport serves a group, and who says why not."""

import pytest

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.transport import select
from tests.harness import run_threads


@pytest.mark.parametrize(
    ("hosts", "gpus", "expected"),
    [
        (["a", "a"], ["0", None], "group rank 1 has no CUDA device"),
        (["a", "b"], ["0", "1"], "the ranks are on 2 hosts"),
        (["a", "a", "a"], ["0", "1", "0"], "several ranks share a GPU"),
    ],
)
def test_what_keeps_the_copy_engine_from_serving_is_said(hosts, gpus, expected, monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    assert select._find_obstacle(hosts, gpus, gpus[0]).startswith(expected)


def test_a_copy_engine_that_cannot_serve_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr(select.torch.cuda, "is_available", lambda: False)

    def body(group, device):
        config = OverlapConfig(transport=TransportConfig(backend="copy_engine", timeout_s=20.0))
        with pytest.raises(ConfigError, match="group rank 0 has no CUDA device; use nccl or auto"):
            OverlapContext(group, config)

    run_threads(3, body)


def test_gloo_serves_groups_without_a_cuda_backend():
    def body(group, device):
        with OverlapContext(group) as context:
            assert context.transport_name == "gloo"

    run_threads(2, body)
