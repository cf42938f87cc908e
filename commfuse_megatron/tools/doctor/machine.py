"""What this machine has, and what of this package will run on it or not, and why.

Works without GPU, driver, Megatron or Transformer Engine. Foreign packages are imported in a process of their own,
since importing one that does not fit the machine may end the process.
"""

from __future__ import annotations

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
from commfuse_megatron.problem import AttentionProblem
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


def _nccl_version() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    version = torch.cuda.nccl.version()
    return ".".join(map(str, version)) if isinstance(version, tuple) else str(version)


def _abilities(gpus: tuple[Gpu, ...], links: tuple[GpuLink, ...]) -> tuple[Ability, ...]:
    gloo = None if dist.is_available() and dist.is_gloo_available() else "this PyTorch was built without gloo"
    megatron = _why_import_fails("megatron.core", "megatron-core")
    transformer_engine = _why_import_fails("transformer_engine.pytorch", "transformer-engine")
    if transformer_engine is None and not gpus:
        transformer_engine = "installed, but its layers need a CUDA device"
    matplotlib = (
        None if importlib.util.find_spec("matplotlib") else "not installed: pip install 'commfuse-megatron[plot]'"
    )
    return (
        Ability(name="gloo transport", needs="ranks on the CPU", missing=gloo),
        Ability(name="nccl transport", needs="ranks on GPUs, one rank per GPU", missing=_why_no_nccl(gpus)),
        Ability(
            name="copy engine transport",
            needs="ranks on GPUs of one host that address each other's memory; else NCCL",
            missing=_why_no_copy_engine(gpus, links),
        ),
        Ability(
            name="persistent GEMM (Triton)",
            needs="slices in bf16 and fp16 beside NCCL; torch.mm otherwise",
            missing=persistent_matmul_unavailable_reason("cuda", torch.bfloat16),
        ),
        Ability(
            name="query-split attention (cuDNN)",
            needs="self-attention split by queries, and the exchange of context parallelism (a2a) around it; else"
            " Megatron's own, or flash kernels where they serve",
            missing=_why_no_cudnn_attention(gpus),
        ),
        Ability(name="Megatron-Core plugin", needs="layers, specs, the demo", missing=megatron),
        Ability(name="Transformer Engine layers", needs="specs with Transformer Engine", missing=transformer_engine),
        Ability(name="timeline picture", needs="the demo's picture", missing=matplotlib),
    )


def _why_no_cudnn_attention(gpus: tuple[Gpu, ...]) -> str | None:
    if not gpus:
        return "PyTorch can use no GPU"
    usual = AttentionProblem(
        pass_name="fprop",
        rows=8192,
        batch=1,
        heads=16,
        kv_heads=4,
        head_dim=128,
        value_dim=128,
        N=4096,
        dtype="bfloat16",
        group_size=2,
        right=0,
    )
    return cudnn_attention_unavailable_reason(usual, torch.device("cuda", gpus[0].index))


def _why_no_nccl(gpus: tuple[Gpu, ...]) -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
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
    yield _connections(gpus)
    value = os.environ.get("NCCL_P2P_DISABLE")
    slow = "NCCL sends through host memory, which is much slower than NVLink"
    yield Setting(
        name="NCCL_P2P_DISABLE",
        value=value,
        meaning=slow if value not in (None, "0") else "NCCL sends directly between GPUs where it can",
    )
    yield _config_file()
    for name, meaning in (
        ("CUDA_VISIBLE_DEVICES", "GPUs that this process may use; unset: all"),
        ("NCCL_SOCKET_IFNAME", "network interface of NCCL; unset: NCCL chooses"),
        (
            "GLOO_SOCKET_IFNAME",
            "network interface of gloo; unset: the one of the host's name; local ranks take loopback",
        ),
        ("OMP_NUM_THREADS", "CPU threads per rank; unset: local ranks share the cores"),
    ):
        yield Setting(name=name, value=os.environ.get(name), meaning=meaning)


def _connections(gpus: tuple[Gpu, ...]) -> Setting:
    value = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    meaning = "any value gives right results: order is kept by events"
    if gpus and int(gpus[0].compute_capability.split(".")[0]) < 10:
        meaning += "; Megatron's training scripts require 1 with tensor parallelism on these GPUs"
    return Setting(name="CUDA_DEVICE_MAX_CONNECTIONS", value=value, meaning=meaning)


def _config_file() -> Setting:
    name, value = CONFIG_VARIABLE, config_file_from_environment()
    if not value:
        return Setting(name=name, value=value, meaning="no file: defaults, unless a flag or argument names one")
    try:
        OverlapConfig.from_file(value)
    except ConfigError as error:
        return Setting(name=name, value=value, meaning=str(error), is_wrong=True)
    return Setting(name=name, value=value, meaning="read, and valid")
