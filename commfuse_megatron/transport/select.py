"""Chooses and builds the transport for a group. The only place that knows all transports."""

import torch
from torch import distributed as dist

from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.transport.base import Transport
from commfuse_megatron.transport.gloo import GlooTransport
from commfuse_megatron.transport.nccl import NcclTransport

__all__ = ["choose_backend", "create_transport", "device_of_backend"]


def choose_backend(group: dist.ProcessGroup, config: TransportConfig) -> str:
    """The transport for `group`: what the config names, else NCCL where the group has a CUDA backend, else gloo.

    Raises ConfigError when the named one cannot serve here.
    """
    has_cuda_backend = torch.device("cuda") in group._device_types
    if config.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError('transport.backend is "nccl" but no CUDA device (or no NCCL) is available; use gloo or auto')
    if config.backend != "auto":
        return config.backend
    return "nccl" if has_cuda_backend and torch.cuda.is_available() and dist.is_nccl_available() else "gloo"


def device_of_backend(backend: str) -> torch.device:
    """The device whose tensors the transport carries for this process."""
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


def create_transport(backend: str, group: dist.ProcessGroup, store: dist.Store, config: TransportConfig) -> Transport:
    """Build the transport, collectively over `group` alone; `store` must be private to this context."""
    if backend == "nccl":
        return NcclTransport(
            store,
            group.rank(),
            group.size(),
            channels=config.nccl_channels,
            device=device_of_backend("nccl"),
            lanes=config.nccl_lanes,
        )
    return GlooTransport(store, group.rank(), group.size(), config.timeout_s)
