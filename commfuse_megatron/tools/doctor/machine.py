"""What this machine has, and what of this package will run on it or not, and why.

Works without GPU, driver, Megatron or Transformer Engine. Foreign packages are imported in a process of their own,
since importing one that does not fit the machine may end the process.
"""

import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.config import CONFIG_VARIABLE, OverlapConfig, config_file_from_environment
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.kernels import persistent_matmul_unavailable_reason
from commfuse_megatron.kernels.attention_cudnn import cudnn_attention_unavailable_reason
from commfuse_megatron.tools.common.cases import attention_case
from commfuse_megatron.tools.doctor.gpus import Gpu, GpuLink, inspect_gpus

DISTRIBUTIONS = (
    "commfuse-megatron",
    "torch",
    "megatron-core",
    "transformer-engine",
    "triton",
    "numpy",
    "cuda-bindings",
    "nvidia-ml-py",
    "nvidia-cudnn-frontend",
)
IMPORT_TIMEOUT_S = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """Something this package can do: `missing` says why not here, None if it will run; `needs` where it matters."""

    name: str
    needs: str
    missing: str | None

    @property
    def will_run(self) -> bool:
        """Whether nothing is missing."""
        return self.missing is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An environment variable that matters, its value (None if unset), and what that means; `is_wrong` asks to act."""

    name: str
    value: str | None
    meaning: str
    is_wrong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Everything that `commfuse doctor` shows. A version is None where the thing is not installed."""

    versions: dict[str, str | None]
    gpus: tuple[Gpu, ...]
    links: tuple[GpuLink, ...]
    abilities: tuple[Ability, ...]
    settings: tuple[Setting, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; abilities with their verdict."""
        data = asdict(self)
        for ability, row in zip(self.abilities, data["abilities"], strict=True):
            row["will_run"] = ability.will_run
        return data


def inspect_machine() -> Machine:
    """Look at versions, GPUs, links, environment, and decide what will run. Takes seconds: it imports Megatron."""
    driver, gpus, links = inspect_gpus()
    versions: dict[str, str | None] = {"python": platform.python_version()}
    versions |= {name: _version(name) for name in DISTRIBUTIONS}
    versions["CUDA (PyTorch's)"] = torch.version.cuda
    versions["NCCL (PyTorch's)"] = _nccl_version()
    versions["driver"] = driver
    return Machine(
        versions=versions, gpus=gpus, links=links, abilities=_abilities(gpus, links), settings=tuple(_settings(gpus))
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _has_nccl() -> bool:
    return dist.is_available() and dist.is_nccl_available()


def _nccl_version() -> str | None:
    if not _has_nccl():
        return None
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _abilities(gpus: tuple[Gpu, ...], links: tuple[GpuLink, ...]) -> tuple[Ability, ...]:
    gloo = None if dist.is_available() and dist.is_gloo_available() else "this PyTorch was built without gloo"
    megatron = _why_import_fails("megatron.core", "megatron-core")
    transformer_engine = _why_import_fails("transformer_engine.pytorch", "transformer-engine")
    if transformer_engine is None and not gpus:
        transformer_engine = "installed, but its layers need a CUDA device"
    missing_extra = "not installed: pip install 'commfuse-megatron[plot]'"
    matplotlib = None if importlib.util.find_spec("matplotlib") else missing_extra
    cudnn = (
        "self-attention split by queries, and the exchange of context parallelism (a2a) around it; else Megatron's own,"
        " or flash kernels where they serve"
    )
    persistent = persistent_matmul_unavailable_reason("cuda", torch.bfloat16)
    peers = "ranks on GPUs of one host that address each other's memory; else NCCL"
    found = (
        ("gloo transport", "ranks on the CPU", gloo),
        ("nccl transport", "ranks on GPUs, one rank per GPU", _why_no_nccl(gpus)),
        ("copy engine transport", peers, _why_no_copy_engine(gpus, links)),
        ("persistent GEMM (Triton)", "slices in bf16 and fp16 beside NCCL; torch.mm otherwise", persistent),
        ("query-split attention (cuDNN)", cudnn, _why_no_cudnn_attention(gpus)),
        ("Megatron-Core plugin", "layers, specs, the demo", megatron),
        ("Transformer Engine layers", "specs with Transformer Engine", transformer_engine),
        ("timeline picture", "the demo's picture", matplotlib),
    )
    return tuple(Ability(name=name, needs=needs, missing=missing) for name, needs, missing in found)


def _why_no_cudnn_attention(gpus: tuple[Gpu, ...]) -> str | None:
    if not gpus:
        return "PyTorch can use no GPU"
    usual = attention_case("llama-8b.attention", 8192, group_size=2).attention("bfloat16")
    return cudnn_attention_unavailable_reason(usual, torch.device("cuda", gpus[0].index))


def _why_no_nccl(gpus: tuple[Gpu, ...]) -> str | None:
    if not _has_nccl():
        return "this PyTorch was built without NCCL"
    if not gpus:
        return "no CUDA device that PyTorch can use (no GPU, or no driver that fits)"
    return None if len(gpus) > 1 else "one GPU only: there is nobody to send to on this machine"


def _why_no_copy_engine(gpus: tuple[Gpu, ...], links: tuple[GpuLink, ...]) -> str | None:
    if len(gpus) < 2:
        return _why_no_nccl(gpus) or "one GPU only: there is nobody to send to on this machine"
    apart = [link for link in links if not link.can_access_peer]
    if apart:
        return f"GPU {apart[0].first} cannot address the memory of GPU {apart[0].second}"
    return None if importlib.util.find_spec("cuda.bindings") else "cuda-bindings is not installed"


def _why_import_fails(module: str, distribution: str) -> str | None:
    if _version(distribution) is None:
        return f"{distribution} is not installed"
    try:
        tried = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", f"import {module}"],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"import {module} did not end within {IMPORT_TIMEOUT_S} s"
    if tried.returncode == 0:
        return None
    lines = tried.stderr.strip().splitlines()
    return f"import {module} fails: {lines[-1] if lines else f'exit code {tried.returncode}'}"


def _settings(gpus: tuple[Gpu, ...]) -> Iterable[Setting]:
    connections = "any value gives right results: order is kept by events"
    if gpus and int(gpus[0].compute_capability.split(".")[0]) < 10:
        connections += "; Megatron's training scripts require 1 with tensor parallelism on these GPUs"
    is_slow = os.environ.get("NCCL_P2P_DISABLE", "0") != "0"
    slow = "NCCL sends through host memory, which is much slower than NVLink"
    yield _variable("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    yield _variable("NCCL_P2P_DISABLE", slow if is_slow else "NCCL sends directly between GPUs where it can")
    yield _config_file()
    yield _variable("CUDA_VISIBLE_DEVICES", "GPUs that this process may use; unset: all")
    yield _variable("NCCL_SOCKET_IFNAME", "network interface of NCCL; unset: NCCL chooses")
    gloo = "network interface of gloo; unset: the one of the host's name; local ranks take loopback"
    yield _variable("GLOO_SOCKET_IFNAME", gloo)
    yield _variable("OMP_NUM_THREADS", "CPU threads per rank; unset: local ranks share the cores")


def _variable(name: str, meaning: str) -> Setting:
    return Setting(name=name, value=os.environ.get(name), meaning=meaning)


def _config_file() -> Setting:
    value = config_file_from_environment()
    meaning, is_wrong = "no file: defaults, unless a flag or argument names one", False
    if value:
        try:
            OverlapConfig.from_file(value)
            meaning = "read, and valid"
        except ConfigError as error:
            meaning, is_wrong = str(error), True
    return Setting(name=CONFIG_VARIABLE, value=value, meaning=meaning, is_wrong=is_wrong)
