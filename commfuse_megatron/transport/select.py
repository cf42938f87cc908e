"""Chooses and builds the transport for a group. The only place that knows all transports."""

import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed as dist

from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.transport.base import Transport
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.gloo import GlooTransport
from commfuse_megatron.transport.nccl import NcclTransport

__all__ = ["choose_backend", "create_transport", "device_of_backend"]


def choose_backend(group: dist.ProcessGroup, config: TransportConfig, exchange: Callable[[str], list[str]]) -> str:
    """The transport for `group`: what the config names, else the fastest that serves all ranks. Collective.

    exchange: hands one string of every rank to all of them. Raises ConfigError when the named one cannot serve here.
    """
    has_cuda = torch.device("cuda") in group._device_types and torch.cuda.is_available()
    if config.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError('transport.backend is "nccl" but no CUDA device (or no NCCL) is available; use gloo or auto')
    if config.backend == "copy_engine" and not torch.cuda.is_available():
        raise ConfigError('transport.backend is "copy_engine" but no CUDA device is available; use gloo or auto')
    if config.backend != "auto":
        return config.backend
    if not has_cuda:
        return "gloo"
    return "copy_engine" if _all_reach_each_other(exchange) else "nccl"


def device_of_backend(backend: str) -> torch.device:
    """The device whose tensors the transport carries for this process."""
    return torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())


def create_transport(backend: str, group: dist.ProcessGroup, store: dist.Store, config: TransportConfig) -> Transport:
    """Build the transport, collectively over `group` alone; `store` must be private to this context."""
    if backend == "gloo":
        return GlooTransport(store, group.rank(), group.size(), config.timeout_s)
    device = device_of_backend(backend)
    if backend == "copy_engine":
        return CopyEngineTransport(group, device)
    return NcclTransport(
        store,
        group.rank(),
        group.size(),
        channels=config.nccl_channels,
        device=device,
        lanes=config.nccl_lanes,
    )


def _all_reach_each_other(exchange: Callable[[str], list[str]]) -> bool:
    """Whether every rank has a GPU of its own that can address those of all others."""
    me = {"host": _host(), "gpu": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)}
    everyone = [json.loads(text) for text in exchange(json.dumps(me))]
    gpus = [rank["gpu"] for rank in everyone]
    reaches = (
        len({rank["host"] for rank in everyone}) == 1
        and len(set(gpus)) == len(gpus)
        and _has_peer_access([gpu for gpu in gpus if gpu != me["gpu"]])
    )
    return all(text == "True" for text in exchange(str(reaches)))


def _has_peer_access(peers: list[str]) -> bool:
    # Whoever tells NCCL not to use it has a reason: a machine where it does not work, or a slow link to be emulated.
    if os.environ.get("NCCL_P2P_DISABLE", "0") not in ("", "0"):
        return False
    ordinals = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
    here = torch.cuda.current_device()
    # A GPU that is not visible to this process cannot be asked about.
    return all(peer in ordinals and torch.cuda.can_device_access_peer(here, ordinals[peer]) for peer in peers)


def _host() -> str:
    """Differs between hosts, and between containers that do not share a kernel."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
