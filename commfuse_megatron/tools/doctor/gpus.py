"""The GPUs that this process sees and the links between them, from the driver's management library.

Never raises for a missing driver or GPU; says what is missing instead. Initialises CUDA for the devices' properties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pynvml
import torch


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _NvLinks:
    """Active links of one GPU: by the PCI bus of the GPU at the other end, and into switches."""

    to_bus: dict[str, int]
    to_switch: int


def inspect_gpus() -> tuple[str | None, tuple[Gpu, ...], tuple[GpuLink, ...]]:
    """Driver version (None without NVML), GPUs and the link of every pair of them."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None, _gpus(), _links(None)
    try:
        return str(pynvml.nvmlSystemGetDriverVersion()), _gpus(), _links(pynvml)
    finally:
        pynvml.nvmlShutdown()


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            Gpu(
                index=index,
                name=properties.name,
                memory_gib=round(properties.total_memory / 2**30, 1),
                multiprocessors=properties.multi_processor_count,
                compute_capability=f"{properties.major}.{properties.minor}",
            )
        )
    return tuple(found)


def _links(nvml: Any) -> tuple[GpuLink, ...]:
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    handles = [_handle(nvml, index) for index in range(count)]
    nvlinks = [_active_nvlinks(nvml, handle) for handle in handles]
    found = []
    for first in range(count):
        for second in range(first + 1, count):
            number = _nvlinks_between(nvml, handles[second], nvlinks[first], nvlinks[second])
            kind = "nvlink" if number else _common_ancestor(nvml, handles[first], handles[second])
            found.append(
                GpuLink(
                    first=first,
                    second=second,
                    kind=kind,
                    nvlinks=number,
                    can_access_peer=torch.cuda.can_device_access_peer(first, second),
                )
            )
    return tuple(found)


def _handle(nvml: Any, index: int) -> Any:
    """NVML numbers devices without regard to CUDA_VISIBLE_DEVICES, so look the device up by its identity."""
    if nvml is None:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
    except nvml.NVMLError:
        return None


def _active_nvlinks(nvml: Any, handle: Any) -> _NvLinks:
    to_bus: dict[str, int] = {}
    to_switch = 0
    if handle is not None:
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            try:
                if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                    continue
                if _is_switch(nvml, handle, link):
                    to_switch += 1
                else:
                    bus = _text(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)
                    to_bus[bus] = to_bus.get(bus, 0) + 1
            except nvml.NVMLError:
                continue
    return _NvLinks(to_bus=to_bus, to_switch=to_switch)


def _is_switch(nvml: Any, handle: Any, link: int) -> bool:
    try:
        kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
    except nvml.NVMLError:
        return False
    return kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH


def _nvlinks_between(nvml: Any, second_handle: Any, first: _NvLinks, second: _NvLinks) -> int:
    if second_handle is None:
        return 0
    try:
        bus = _text(nvml.nvmlDeviceGetPciInfo(second_handle).busId)
    except nvml.NVMLError:
        return 0
    return first.to_bus.get(bus, 0) or min(first.to_switch, second.to_switch)


def _common_ancestor(nvml: Any, first: Any, second: Any) -> str:
    if first is None or second is None:
        return "unknown"
    try:
        level = nvml.nvmlDeviceGetTopologyCommonAncestor(first, second)
    except nvml.NVMLError:
        return "unknown"
    names = {
        nvml.NVML_TOPOLOGY_INTERNAL: "same board",
        nvml.NVML_TOPOLOGY_SINGLE: "PCIe switch",
        nvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
        nvml.NVML_TOPOLOGY_HOSTBRIDGE: "host bridge",
        nvml.NVML_TOPOLOGY_NODE: "same NUMA node",
        nvml.NVML_TOPOLOGY_SYSTEM: "across NUMA nodes",
    }
    return names.get(level, "unknown")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
