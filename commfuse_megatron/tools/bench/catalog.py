"""Which variants stand beside each other, and where: all of them at two sizes, the basic ones everywhere."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.bench.bounds import CommOnly, CommOnlyCollective, ComputeOnly, Sequential, SlicesOnly
from commfuse_megatron.tools.bench.emulate import (
    EmulatedCollective,
    EmulatedSequential,
    EmulatedSliced,
    EmulatedTransfers,
)
from commfuse_megatron.tools.bench.ours import Ours, PathOptions, forced_paths
from commfuse_megatron.tools.bench.peers import AsyncTP, Megatron, Userbuffers
from commfuse_megatron.tools.bench.rows import has_word_prefix
from commfuse_megatron.tools.bench.slicing import DataSlicing
from commfuse_megatron.tools.bench.variant import Variant, backends_of

#: Without these (or what begins so) a case has no rows.
BOUNDS = ("compute_only", "comm_only collective", "sequential")

_PIECES = (2, 4, 8)


def make_variants(
    device: torch.device, group_size: int, chunks: tuple[int, ...], config_files: Sequence[str] = ()
) -> list[Variant]:
    """One object for everything that can be asked for on `device`; nothing is allocated yet.

    Raises ConfigError for a file with mistakes, or named like another variant.
    """
    gemms = _gemms(device)
    files = [Ours(PathOptions(path="auto"), OverlapConfig.from_file(file), Path(file).stem) for file in config_files]
    variants: list[Variant] = [
        *(ComputeOnly(gemm) for gemm in gemms),
        CommOnlyCollective(),
        *(CommOnly(backend) for backend in backends_of(device)),
        Sequential(),
        Megatron(),
        Ours(PathOptions(path="auto")),
        *files,
        *(SlicesOnly(m, gemm) for m in chunks for gemm in gemms),
        *(DataSlicing(pieces) for pieces in _PIECES),
        *(Ours(options) for options in forced_paths(device, group_size, chunks)),
        AsyncTP(),
        Userbuffers(),
    ]
    names = [variant.name for variant in variants]
    taken = [str(file) for file in config_files if names.count(Path(file).stem) > 1]
    if taken:
        raise ConfigError(
            f"a row of {taken[0]} would be called as that of another variant or file: give the file another name"
        )
    return variants


def make_emulated_variants(device: torch.device) -> list[Variant]:
    """The same for groups that are emulated."""
    gemms = _gemms(device)
    return [
        *(ComputeOnly(gemm) for gemm in gemms),
        EmulatedCollective(),
        *(EmulatedTransfers(backend) for backend in backends_of(device)),
        EmulatedSequential(),
        *(SlicesOnly(1, gemm) for gemm in gemms),
        *(EmulatedSliced(backend) for backend in backends_of(device)),
    ]


def choose(
    variants: Iterable[Variant], op: str, pass_name: str, *, is_full: bool, prefixes: Sequence[str]
) -> list[Variant]:
    """Those for one pass of one case of `op`. prefixes: only names that begin with these words; lower bounds always."""

    def is_asked_for(variant: Variant) -> bool:
        is_bound = any(has_word_prefix(variant.name, bound) for bound in ("comm_only", *BOUNDS))
        return is_bound or not prefixes or any(has_word_prefix(variant.name, prefix) for prefix in prefixes)

    return [v for v in variants if v.serves(op, pass_name) and (is_full or v.is_basic) and is_asked_for(v)]


def for_large(variants: Iterable[Variant]) -> list[Variant]:
    """Without those of ours that only differ in the number of chunks: every context keeps buffers of its own."""
    return [v for v in variants if not isinstance(v, Ours) or v.options.is_attention or v.options.chunks_per_shard == 1]


def _gemms(device: torch.device) -> tuple[Literal["torch", "persistent"], ...]:
    return ("torch", "persistent") if device.type == "cuda" else ("torch",)
