"""Chooses and builds the transport for a group. The only place that knows all transports."""

import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig, TransportConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.transport.base import Transport
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.gloo import GlooTransport
from commfuse_megatron.transport.mapped_window import why_memory_cannot_be_shared
from commfuse_megatron.transport.nccl import NcclTransport

logger = logging.getLogger(__name__)

# PyTorch's switch for symmetric memory of several ranks on one GPU.
SHARED_GPUS = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
_NO_PEER_ACCESS = "NCCL_P2P_DISABLE"


@dataclass(frozen=True, slots=True)
class NcclSettings:
    """How messages over NCCL are sent, and whether GEMMs take back the SMs that this leaves free."""

    channels: int
    communicators: int
    regains_sms: bool


DIRECT = NcclSettings(channels=20, communicators=1, regains_sms=True)
# 70B fc2 on 2 H200, m=8: 2.74 ms, where DIRECT takes 4.2 to 4.6; the paper's MLP on 4: 28.3, where DIRECT takes 41.1.
THROUGH_HOST_MEMORY = NcclSettings(channels=2, communicators=2, regains_sms=False)


def choose_backend(group: dist.ProcessGroup, config: TransportConfig, exchange: Callable[[str], list[str]]) -> str:
    """The transport for `group`: what the config names; else, where the group has a CUDA backend, the copy engine if
    it can serve all ranks, or NCCL; else gloo.

    exchange: hands one string of every rank to all of them. Raises ConfigError when the named one cannot serve here;
    for the copy engine on all ranks, since whether GPUs reach each other is found out together.
    """
    if config.backend == "nccl" and not (torch.cuda.is_available() and dist.is_nccl_available()):
        raise ConfigError('transport.backend is "nccl" but no CUDA device (or no NCCL) is available; use gloo or auto')
    if config.backend == "copy_engine":
        everyone = _everyone(exchange)
        obstacle = _obstacle_to_copy_engine(group, exchange, everyone)
        if obstacle:
            instead = _advice_without_copy_engine([gpu for _, gpu in everyone])
            raise ConfigError(f'transport.backend is "copy_engine", but {obstacle}; {instead}')
    if config.backend != "auto":
        return config.backend
    # Only what is the same on all ranks may decide whether they exchange anything; a rank may lack a GPU.
    if torch.device("cuda") not in group._device_types or not dist.is_nccl_available():
        return "gloo"
    everyone = _everyone(exchange)
    if any(gpu is None for _, gpu in everyone):
        return "gloo"
    if group.size() == 1:  # nothing is ever sent
        return "nccl"
    # Who tells NCCL to leave peer access alone has a reason that holds for us, too.
    obstacle = _obstacle_to_copy_engine(group, exchange, everyone, _forbidden())
    if obstacle and group.rank() == 0:
        logger.info("transport nccl, not copy_engine: %s", obstacle)
    return "nccl" if obstacle else "copy_engine"


def choose_nccl_settings(
    group: dist.ProcessGroup, backend: str, config: OverlapConfig, exchange: Callable[[str], list[str]]
) -> NcclSettings:
    """What the configuration leaves open, by the link: whether messages within the host go through its memory.

    Collective where the backend is NCCL; the same on all ranks.
    """
    found = DIRECT
    if backend == "nccl" and group.size() > 1:
        everyone = _everyone(exchange)
        hosts, gpus = [host for host, _ in everyone], [gpu for _, gpu in everyone]
        # Between hosts: not measured, as if it were direct.
        is_one_host = len(set(hosts)) == 1 and None not in gpus
        if is_one_host and _first(exchange(_forbidden() or _find_obstacle(hosts, gpus, gpus[group.rank()]))):
            found = THROUGH_HOST_MEMORY
    transport, regains_sms = config.transport, config.kernel.regain_sms
    return NcclSettings(
        found.channels if transport.nccl_channels is None else transport.nccl_channels,
        found.communicators if transport.nccl_communicators is None else transport.nccl_communicators,
        found.regains_sms if regains_sms is None else regains_sms,
    )


def device_of_backend(backend: str) -> torch.device:
    """The device whose tensors the transport carries for this process."""
    return torch.device("cpu") if backend == "gloo" else torch.device("cuda", torch.cuda.current_device())


def create_transport(
    backend: str,
    group: dist.ProcessGroup,
    store: dist.Store,
    config: TransportConfig,
    nccl: NcclSettings,
    exchange: Callable[[str], list[str]],
) -> Transport:
    """Build the transport, collectively over `group` alone; `store` must be private to this context.

    exchange: as in `choose_backend`; the transport may use it whenever all ranks come to the same call of it.
    """
    if backend == "gloo":
        return GlooTransport(store, group.rank(), group.size(), config.timeout_s)
    device = device_of_backend(backend)
    if backend == "copy_engine":
        return CopyEngineTransport(group, device, exchange, graph_memory_mib=config.graph_memory_mib)
    return NcclTransport(
        store, group.rank(), group.size(), channels=nccl.channels, device=device, communicators=nccl.communicators
    )


def _forbidden() -> str:
    return f"{_NO_PEER_ACCESS} is set" if os.environ.get(_NO_PEER_ACCESS, "0") not in ("", "0") else ""


def _everyone(exchange: Callable[[str], list[str]]) -> list[tuple[str, str | None]]:
    """Host and GPU of every rank; None: it has none."""
    gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if torch.cuda.is_available() else None
    ranks = [json.loads(text) for text in exchange(json.dumps({"host": host_name(), "gpu": gpu}))]
    return [(rank["host"], rank["gpu"]) for rank in ranks]


def _obstacle_to_copy_engine(
    group: dist.ProcessGroup,
    exchange: Callable[[str], list[str]],
    everyone: list[tuple[str, str | None]],
    complaint: str = "",
) -> str:
    """The same on all ranks: why not every one has a GPU that can address those of all others, "" if it is so.

    complaint: what this rank has against it already.
    """
    hosts, gpus = [host for host, _ in everyone], [gpu for _, gpu in everyone]
    found = _first(exchange(complaint or _find_obstacle(hosts, gpus, gpus[group.rank()])))
    if found:
        return found
    return _first(exchange(why_memory_cannot_be_shared(group, device_of_backend("copy_engine"), exchange)))


def _advice_without_copy_engine(gpus: list[str | None]) -> str:
    """What is not refused in its turn. gpus: of every rank."""
    if None in gpus or not dist.is_nccl_available():
        return "use gloo or auto"
    if len(set(gpus)) < len(gpus):  # NCCL takes one rank per GPU, and auto would take NCCL
        return "give every rank a GPU of its own, or use gloo, which carries tensors on the CPU"
    return "use nccl or auto"


def _first(complaints: list[str]) -> str:
    return next((text for text in complaints if text), "")


def _find_obstacle(hosts: list[str], gpus: list[str | None], here: str | None) -> str:
    if None in gpus:
        return f"group rank {gpus.index(None)} has no CUDA device"
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} hosts"
    if len(set(gpus)) < len(gpus) and not may_share_gpus():
        return f"several ranks share a GPU (for tests of correctness, {SHARED_GPUS}=1 allows that)"
    ordinals = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
    # A GPU that is not visible to this process cannot be asked about.
    others = [ordinals[gpu] for gpu in set(gpus) if gpu != here and gpu in ordinals]
    me = torch.cuda.current_device()
    unreached = [other for other in others if not torch.cuda.can_device_access_peer(me, other)]
    return f"device {me} cannot address the memory of device {unreached[0]}" if unreached else ""


def may_share_gpus() -> bool:
    """Whether several ranks may use one GPU, which is for tests of correctness."""
    return bool(os.environ.get(SHARED_GPUS))


def take_gpu(local_rank: int) -> torch.device:
    """Make a GPU this rank's current device: its own, or where it may and there are fewer GPUs, one that is shared.

    NCCL refuses two ranks on one GPU of a host, so ranks that share one say that they are on different hosts; what
    they send each other goes through sockets then.
    """
    count = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % count if may_share_gpus() else local_rank)
    torch.cuda.set_device(device)
    if may_share_gpus():
        os.environ["NCCL_HOSTID"] = f"{host_name()} {local_rank // count}"
    return device


def host_name() -> str:
    """Differs between hosts, and between containers that do not share a kernel."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return socket.gethostname()
