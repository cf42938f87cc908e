"""Which variants stand beside each other, and where: all of them at two sizes, the basic ones everywhere."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.bench import attention, bounds, emulate, peers, ulysses
from commfuse_megatron.tools.bench.operands import Pool, Work, draw
from commfuse_megatron.tools.bench.ours import Ours, PathOptions, forced_paths
from commfuse_megatron.tools.bench.rows import has_word_prefix
from commfuse_megatron.tools.bench.variant import Plain, Variant, backends_of
from commfuse_megatron.tools.common.cases import PASSES, Case

#: Without these (or what begins so) a case has no rows.
BOUNDS = ("compute_only", "comm_only collective", "sequential")

_PIECES = (2, 4, 8)


def make_work(case: Case, pass_name: str, group: dist.ProcessGroup, pool: Pool, *, is_emulated: bool = False) -> Work:
    """Operands, and the results that every variant must give. Collective.

    Raises UnsupportedError where larger groups cannot be emulated.
    """
    work = Work(case, pass_name, group, pool, draw(case, pool))
    of_blocks = {"query_split_attention": attention.expected, "ulysses_attention": ulysses.expected}
    find = emulate.expected if is_emulated else of_blocks.get(case.op, lambda work: bounds.sequential(work).results())
    work.expected = find(work)
    return work


def make_variants(
    kind: str, device: torch.device, group_size: int, chunks: tuple[int, ...], config_files: Sequence[str] = ()
) -> list[Variant]:
    """One object for everything that can be asked for on `device`; nothing is allocated yet.

    kind, chunks: as in `Settings`. Raises ConfigError for a file with mistakes, or named like another variant.
    """
    planned = Ours(PathOptions(path="auto", kind=kind))
    forced = [Ours(options) for options in forced_paths(kind, device, group_size, chunks)]
    if kind == "ulysses":
        collectives = Plain("comm_only collective", "transfers", ulysses.all_to_alls)
        exchange = ulysses.TransformerEngineExchange(device)
        return [Plain("compute_only", "compute", ulysses.compute), collectives, exchange, *forced, planned]
    collectives = Plain("comm_only collective", "transfers", bounds.collectives)
    comm_only = [collectives, *map(bounds.CommOnly, backends_of(device))]
    if kind == "attention":
        pieces = _slicing(attention.PIECES, attention.sliced, ("fprop",))
        return [Plain("compute_only", "compute", attention.compute), *comm_only, *pieces, *forced, planned]
    files = [Ours(PathOptions(path="auto"), OverlapConfig.from_file(file), Path(file).stem) for file in config_files]
    variants: list[Variant] = [
        *_compute_only(device),
        *comm_only,
        Plain("sequential", "sequential", lambda work: bounds.sequential(work).call, is_compared=True),
        peers.Megatron(),
        planned,
        *files,
        *_slices_only(device, chunks),
        *_slicing(_PIECES, bounds.sliced),
        *forced,
        peers.AsyncTP(),
        peers.Userbuffers(),
    ]
    if kind == "all-reduce":  # what the others have only for gathers and scatters
        others = (peers.AsyncTP, peers.Userbuffers)
        variants = [v for v in variants if not isinstance(v, others) and not v.name.startswith("slicing ")]
    names = [variant.name for variant in variants]
    taken = [str(file) for file in config_files if names.count(Path(file).stem) > 1]
    if taken:
        raise ConfigError(
            f"a row of {taken[0]} would be called as that of another variant or file: give the file another name"
        )
    return variants


def make_emulated_variants(kind: str, device: torch.device, splits: tuple[int, ...] = ()) -> list[Variant]:
    """The same for groups that are emulated. splits: of one shard's queries, for query_split over the copy engine; of a
    split sequence groups of a rank's heads."""
    backends = backends_of(device)
    if kind == "ulysses":
        bounds_of_blocks = [
            Plain("compute_only", "compute", ulysses.compute),
            Plain("comm_only collective", "transfers", emulate.exchanges_alone),
            Plain("sequential", "sequential", emulate.exchanged),
        ]
        return bounds_of_blocks + [emulate.EmulatedPath("overlapped", b, m) for b in backends for m in splits]
    collective = Plain("comm_only collective", "transfers", emulate.collective_alone)
    comm_only = [collective, *map(emulate.Transfers, backends)]
    if kind == "attention":
        variants: list[Variant] = [Plain("compute_only", "compute", attention.compute), *comm_only]
        variants.append(Plain("sequential", "sequential", emulate.sliced))
        for n in attention.PIECES:
            variants.append(Plain(f"slicing C={n}", "slicing", partial(emulate.sliced, num_pieces=n)))
        for backend in backends:
            counts = splits if backend == "copy_engine" else (1,)
            variants.append(emulate.EmulatedPath("row_parallel", backend))
            variants += [emulate.EmulatedPath("query_split", backend, count) for count in counts]
        return variants
    sequential = Plain("sequential", "sequential", emulate.sequential)
    paths = ("sliced", "grouped", "bulk")
    ours = [emulate.EmulatedPath(path, backend) for path in paths for backend in backends]
    return [*_compute_only(device), *comm_only, sequential, *_slices_only(device, (1,)), *ours]


def choose(
    variants: Iterable[Variant], op: str, pass_name: str, *, is_full: bool, prefixes: Sequence[str]
) -> list[Variant]:
    """Those for one pass of one case of `op`. prefixes: only names that begin with these words; lower bounds always."""

    def is_asked_for(variant: Variant) -> bool:
        wanted = ("comm_only", *BOUNDS, *prefixes)
        return not prefixes or any(has_word_prefix(variant.name, prefix) for prefix in wanted)

    return [v for v in variants if v.serves(op, pass_name) and (is_full or v.is_basic) and is_asked_for(v)]


def _gemms(device: torch.device) -> tuple[bounds.Gemm, ...]:
    return ("torch", "persistent") if device.type == "cuda" else ("torch",)


def _compute_only(device: torch.device) -> list[Variant]:
    names = {"torch": "compute_only", "persistent": "compute_only persistent"}
    return [Plain(names[gemm], "compute", partial(bounds.compute, gemm=gemm)) for gemm in _gemms(device)]


def _slices_only(device: torch.device, chunks: tuple[int, ...]) -> list[Variant]:
    found: list[Variant] = []
    for m in chunks:
        for gemm in _gemms(device):
            make_call = partial(bounds.slices, gemm=gemm, chunks_per_shard=m)
            found.append(Plain(f"slices_only m={m} {gemm}", "slices", make_call, chunks_per_shard=m))
    return found


def _slicing(
    counts: Iterable[int], make_call: Callable[..., Callable[[], object]], passes: tuple[str, ...] = PASSES
) -> list[Variant]:
    found: list[Variant] = []
    for n in counts:
        call = partial(make_call, num_pieces=n)
        found.append(Plain(f"slicing C={n}", "slicing", call, passes=passes, is_compared=True, chunks_per_shard=n))
    return found
