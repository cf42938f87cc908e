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
from tests.harness import on_ranks
from tests.harness.contexts import in_context

#: A group of two ranks on GPUs, as far as choosing a transport looks at it.
GROUP = SimpleNamespace(_device_types=(torch.device("cuda"),), rank=lambda: 0, size=lambda: 2)


@pytest.fixture
def meet(monkeypatch):
    """Says what this rank is, and gives its exchange with another one."""

    def make(gpus=("0", "1"), hosts=("a", "a"), has_nccl=True, mapping="", complaint="", environment=()):
        for name in ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "NCCL_P2P_DISABLE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in dict(environment).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(select.torch.cuda, "is_available", lambda: gpus[0] is not None)
        monkeypatch.setattr(select.torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(select.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"{index}"))
        monkeypatch.setattr(select.dist, "is_nccl_available", lambda: has_nccl)
        monkeypatch.setattr(select, "why_memory_cannot_be_shared", lambda *arguments: mapping)
        monkeypatch.setattr(select, "host_name", lambda: hosts[0])
        said = []

        def exchange(text):
            said.append(text)
            is_first = text.startswith("{")
            return [text, json.dumps({"host": hosts[1], "gpu": gpus[1]}) if is_first else complaint]

        exchange.said = said
        return exchange

    return make


@on_ranks(3)
def test_a_copy_engine_that_cannot_serve_is_refused_on_all_ranks(group, device, monkeypatch):
    monkeypatch.setattr(select.torch.cuda, "is_available", lambda: False)
    config = OverlapConfig(transport=TransportConfig(backend="copy_engine", timeout_s=20.0))
    with pytest.raises(ConfigError, match="group rank 0 has no CUDA device; use gloo or auto"):
        OverlapContext(group, config)


@pytest.mark.parametrize(("backend", "here", "why", "advice"), [
    ("nccl", {"gpus": [None, None]}, None, ["gloo", "auto"]), ("nccl", {"has_nccl": False}, None, ["gloo", "auto"]),
    ("copy_engine", {"gpus": [None, None]}, "group rank 0 has no CUDA device", ["gloo", "auto"]),
    ("copy_engine", {"gpus": ["0", None]}, "group rank 1 has no CUDA device", ["gloo", "auto"]),
    ("copy_engine", {"hosts": ["a", "b"], "has_nccl": False}, "the ranks are on 2 hosts", ["gloo", "auto"]),
    ("copy_engine", {"gpus": ["0", "0"]}, "several ranks share a GPU", ["gloo"]),
    ("copy_engine", {"hosts": ["a", "b"]}, "the ranks are on 2 hosts", ["nccl", "auto"]),
    ("copy_engine", {"mapping": "group rank 0 cannot share memory"}, "cannot share memory", ["nccl", "auto"]),
])  # fmt: skip
def test_what_a_refusal_advises_is_not_refused(backend, here, why, advice, meet):
    """Fails where nccl is advised to whom has no GPU, no NCCL, or a GPU of which other ranks are, too."""
    exchange, gpus = meet(**here), here.get("gpus", ["0", "1"])
    with pytest.raises(ConfigError, match=why) as caught:
        select.choose_backend(GROUP, TransportConfig(backend=backend), exchange)
    (words,) = re.findall(r"use ([\w ]+)", str(caught.value).rpartition(";")[2])
    assert [word for word in words.split() if word in ("nccl", "copy_engine", "gloo", "auto")] == advice
    for other in advice:
        found = select.choose_backend(GROUP, TransportConfig(backend=other), exchange)
        assert found != "nccl" or (here.get("has_nccl", True) and None not in gpus and len(set(gpus)) == len(gpus))
        assert found in (other, "gloo", "nccl")


@in_context(2)
def test_gloo_serves_groups_without_a_cuda_backend(group, context):
    assert context.transport_name == "gloo"


NO_ACCESS = "device 1 cannot address the memory of device 0"


@pytest.mark.parametrize(("here", "expected"), [
    ({}, "copy_engine"), ({"environment": {"NCCL_P2P_DISABLE": "0"}}, "copy_engine"),
    ({"complaint": NO_ACCESS}, "nccl"), ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "nccl"),
    ({"complaint": "NCCL_P2P_DISABLE is set"}, "nccl"),
    ({"mapping": "group rank 0 cannot share memory with the others: no pidfd_getfd"}, "nccl"),
    ({"gpus": ["0", None]}, "gloo"), ({"gpus": [None, None]}, "gloo"),
])  # fmt: skip
def test_auto_takes_the_copy_engine_where_no_rank_objects(here, expected, meet):
    """And gloo where one has no GPU, which is known from what all have said first."""
    exchange = meet(**here)
    assert select.choose_backend(GROUP, TransportConfig(), exchange) == expected
    assert expected != "gloo" or len(exchange.said) == 1


@pytest.mark.parametrize(("here", "expected"), [
    ({}, select.DIRECT), ({"environment": {"NCCL_P2P_DISABLE": "1"}}, select.THROUGH_HOST_MEMORY),
    ({"complaint": NO_ACCESS}, select.THROUGH_HOST_MEMORY),
    ({"complaint": NO_ACCESS, "hosts": ["a", "b"], "environment": {"NCCL_P2P_DISABLE": "1"}}, select.DIRECT),
])  # fmt: skip
def test_how_nccl_sends_follows_from_the_link(here, expected, meet):
    exchange = meet(**here)
    assert select.choose_nccl_settings(GROUP, "nccl", OverlapConfig(), exchange) == expected
    chosen = OverlapConfig.from_dict({"transport": {"nccl_communicators": 3}, "kernel": {"regain_sms": False}})
    found = select.choose_nccl_settings(GROUP, "nccl", chosen, exchange)
    assert found == select.NcclSettings(expected.channels, 3, regains_sms=False)
