"""Which transport serves a group, and who says why not."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.transport import select
from tests.harness import on_ranks, run_threads


@pytest.mark.parametrize(("hosts", "gpus", "expected"), [
    (["a", "a"], ["0", None], "group rank 1 has no CUDA device"), (["a", "b"], ["0", "1"], "the ranks are on 2 hosts"),
    (["a", "a", "a"], ["0", "1", "0"], "several ranks share a GPU"),
])  # fmt: skip
def test_what_keeps_the_copy_engine_from_serving_is_said(hosts, gpus, expected, monkeypatch):
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    assert select._find_obstacle(hosts, gpus, gpus[0]).startswith(expected)


def test_a_copy_engine_that_cannot_serve_is_refused_on_all_ranks(monkeypatch):
    monkeypatch.setattr(select.torch.cuda, "is_available", lambda: False)

    def body(group, device):
        config = OverlapConfig(transport=TransportConfig(backend="copy_engine", timeout_s=20.0))
        with pytest.raises(ConfigError, match="group rank 0 has no CUDA device; use gloo or auto"):
            OverlapContext(group, config)

    run_threads(3, body)


@pytest.mark.parametrize(("backend", "gpus", "hosts", "has_nccl", "mapping", "advice"), [
    ("nccl", [None, None], ["a", "a"], True, "", ["gloo", "auto"]),
    ("nccl", ["0", "1"], ["a", "a"], False, "", ["gloo", "auto"]),
    ("copy_engine", [None, None], ["a", "a"], True, "", ["gloo", "auto"]),
    ("copy_engine", ["0", None], ["a", "a"], True, "", ["gloo", "auto"]),
    ("copy_engine", ["0", "1"], ["a", "b"], False, "", ["gloo", "auto"]),
    ("copy_engine", ["0", "0"], ["a", "a"], True, "", ["gloo"]),
    ("copy_engine", ["0", "1"], ["a", "b"], True, "", ["nccl", "auto"]),
    ("copy_engine", ["0", "1"], ["a", "a"], True, "group rank 0 cannot share memory", ["nccl", "auto"]),
])  # fmt: skip
def test_what_a_refusal_advises_is_not_refused(backend, gpus, hosts, has_nccl, mapping, advice, monkeypatch):
    """Fails where nccl is advised to whom has no GPU, no NCCL, or a GPU of which other ranks are, too."""
    monkeypatch.delenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", raising=False)
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(select.torch.cuda, "is_available", lambda: gpus[0] is not None)
    monkeypatch.setattr(select.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(select.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{index}"))
    monkeypatch.setattr(select.dist, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(select, "why_memory_cannot_be_shared", lambda group, device: mapping)
    monkeypatch.setattr(select, "host_name", lambda: hosts[0])

    def exchange(text):
        if text.startswith("{"):
            return [text, json.dumps({"host": hosts[1], "gpu": gpus[1]})]
        return [text, ""]

    with pytest.raises(ConfigError) as caught:
        select.choose_backend(CudaGroup(), TransportConfig(backend=backend), exchange)
    (words,) = re.findall(r"use ([\w ]+)", str(caught.value).rpartition(";")[2])
    assert [word for word in words.split() if word in ("nccl", "copy_engine", "gloo", "auto")] == advice
    for other in advice:
        found = select.choose_backend(CudaGroup(), TransportConfig(backend=other), exchange)
        assert found != "nccl" or (has_nccl and None not in gpus and len(set(gpus)) == len(gpus))
        assert found in (other, "gloo", "nccl")


@on_ranks(2)
def test_gloo_serves_groups_without_a_cuda_backend(group, device):
    with OverlapContext(group) as context:
        assert context.transport_name == "gloo"


class CudaGroup:
    """A group of two ranks on GPUs, as far as choosing a transport looks at it."""

    _device_types = (torch.device("cuda"),)

    def rank(self):
        return 0

    def size(self):
        return 2


@pytest.mark.parametrize(("others", "mapping", "environment", "expected"), [
    ("", "", {}, "copy_engine"), ("", "", {"NCCL_P2P_DISABLE": "0"}, "copy_engine"),
    ("device 1 cannot address the memory of device 0", "", {}, "nccl"), ("", "", {"NCCL_P2P_DISABLE": "1"}, "nccl"),
    ("NCCL_P2P_DISABLE is set", "", {}, "nccl"),
    ("", "group rank 0 cannot share memory with the others: no pidfd_getfd", {}, "nccl"),
])  # fmt: skip
def test_auto_takes_the_copy_engine_where_no_rank_objects(others, mapping, environment, expected, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(select.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(select.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(select.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}"))
    monkeypatch.setattr(select.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(select, "why_memory_cannot_be_shared", lambda group, device: mapping)

    def exchange(text):
        if text.startswith("{"):
            return [text, text.replace("gpu-0", "gpu-1")]
        return [text, others]

    assert select.choose_backend(CudaGroup(), TransportConfig(), exchange) == expected


@pytest.mark.parametrize(("other_host", "complaint", "environment", "expected"), [
    ("here", "", {}, select.DIRECT), ("here", "", {"NCCL_P2P_DISABLE": "1"}, select.THROUGH_HOST_MEMORY),
    ("here", "device 1 cannot address the memory of device 0", {}, select.THROUGH_HOST_MEMORY),
    ("there", "device 1 cannot address the memory of device 0", {"NCCL_P2P_DISABLE": "1"}, select.DIRECT),
])  # fmt: skip
def test_how_nccl_sends_follows_from_the_link(other_host, complaint, environment, expected, monkeypatch):
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(select, "_everyone", lambda exchange: [("here", "0"), (other_host, "1")])
    monkeypatch.setattr(select, "_find_obstacle", lambda hosts, gpus, here: "")
    exchange = lambda text: [text, complaint]  # noqa: E731
    found = select.choose_nccl_settings(CudaGroup(), "nccl", OverlapConfig(), exchange)
    assert found == expected
    chosen = OverlapConfig.from_dict({"transport": {"nccl_communicators": 3}, "kernel": {"regain_sms": False}})
    found = select.choose_nccl_settings(CudaGroup(), "nccl", chosen, exchange)
    assert found == select.NcclSettings(expected.channels, 3, regains_sms=False)


@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_takes_gloo_where_one_rank_has_no_gpu(has_gpu, monkeypatch):
    monkeypatch.setattr(select.torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(select.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(select.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="gpu-0"))
    monkeypatch.setattr(select.dist, "is_nccl_available", lambda: True)
    said = []

    def exchange(text):
        said.append(text)
        return [text, text.replace('"gpu-0"', "null")]

    assert select.choose_backend(CudaGroup(), TransportConfig(), exchange) == "gloo"
    assert len(said) == 1
