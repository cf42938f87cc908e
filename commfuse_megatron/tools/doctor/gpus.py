"""The GPUs that this process sees and the links between them, from the driver's management library.

Never raises for a missing driver or GPU; says what is missing instead. Initialises CUDA for the devices' properties.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pynvml
import torch

# In place of a PCI bus.
_SWITCH = "switch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One device, by the index that PyTorch gives it."""

    index: int
    name: str
    memory_gib: float
    multiprocessors: int
    compute_capability: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLink:
    """How two GPUs reach each other.

    kind: "nvlink" or the closest common point on the host ("PCIe switch", "host bridge", ...), "unknown" without NVML.
    nvlinks: active NVLinks between the two, through switches included; 0 if none.
    can_access_peer: whether CUDA allows one to address the other's memory.
    """

    first: int
    second: int
    kind: str
    nvlinks: int
    can_access_peer: bool


def inspect_gpus() -> tuple[str | None, tuple[Gpu, ...], tuple[GpuLink, ...]]:
    """Driver version (None without NVML), GPUs and the link of every pair of them."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, _gpus(), _links()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion()), _gpus(), _links()
    finally:
        pynvml.nvmlShutdown()


def _ask(question: Callable[..., Any], *about: Any) -> Any:
    """NVML's answer; None where it has none, as without a driver."""
    try:
        return question(*about)
    except pynvml.NVMLError:
        return None


def _properties() -> list[Any]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(index) for index in range(count)]


def _gpus() -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            index=index,
            name=properties.name,
            memory_gib=round(properties.total_memory / 2**30, 1),
            multiprocessors=properties.multi_processor_count,
            compute_capability=f"{properties.major}.{properties.minor}",
        )
        for index, properties in enumerate(_properties())
    )


def _links() -> tuple[GpuLink, ...]:
    # NVML numbers devices without regard to CUDA_VISIBLE_DEVICES, so look them up by their identity.
    handles = [_ask(pynvml.nvmlDeviceGetHandleByUUID, f"GPU-{each.uuid}") for each in _properties()]
    nvlinks = [_active_nvlinks(handle) for handle in handles]
    found = []
    for (first, of_first), (second, of_second) in combinations(enumerate(handles), 2):
        info = None if of_second is None else _ask(pynvml.nvmlDeviceGetPciInfo, of_second)
        bus = "" if info is None else _text(info.busId)
        direct, through_switches = nvlinks[first][bus], min(nvlinks[first][_SWITCH], nvlinks[second][_SWITCH])
        number = direct or through_switches if bus else 0
        link = GpuLink(
            first=first,
            second=second,
            kind="nvlink" if number else _common_ancestor(of_first, of_second),
            nvlinks=number,
            can_access_peer=torch.cuda.can_device_access_peer(first, second),
        )
        found.append(link)
    return tuple(found)


def _active_nvlinks(handle: Any) -> Counter[str]:
    """Of one GPU: by the PCI bus of the GPU at the other end; those into switches together."""
    found: Counter[str] = Counter()
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS if handle is not None else 0):
        with suppress(pynvml.NVMLError):
            if pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED:
                kind = _ask(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
                is_switch = kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH
                found[_SWITCH if is_switch else _text(pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)] += 1
    return found


def _common_ancestor(first: Any, second: Any) -> str:
    if first is None or second is None:
        return "unknown"
    names = {
        pynvml.NVML_TOPOLOGY_INTERNAL: "same board",
        pynvml.NVML_TOPOLOGY_SINGLE: "PCIe switch",
        pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
        pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "host bridge",
        pynvml.NVML_TOPOLOGY_NODE: "same NUMA node",
        pynvml.NVML_TOPOLOGY_SYSTEM: "across NUMA nodes",
    }
    return names.get(_ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, first, second), "unknown")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
