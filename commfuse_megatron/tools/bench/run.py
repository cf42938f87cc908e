"""Runs a grid of cases: builds, checks and times the variants of each, and hands on its rows as they come.

Beware: every decision that could differ between ranks (what is left out, whether time is up, what was done before) is
agreed on by all of them before anyone acts on it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import distributed as dist

from commfuse_megatron.errors import CommFuseError, ConfigError, UnsupportedError, VerificationError
from commfuse_megatron.tools.bench import catalog
from commfuse_megatron.tools.bench.assemble import make_rows, this_commit
from commfuse_megatron.tools.bench.operands import Pool, Work, check_results
from commfuse_megatron.tools.bench.ours import Ours
from commfuse_megatron.tools.bench.rows import Row, has_word_prefix
from commfuse_megatron.tools.bench.tail import TailMeter
from commfuse_megatron.tools.bench.timing import Timed, measure, measure_host_us
from commfuse_megatron.tools.bench.variant import Ready, Variant
from commfuse_megatron.tools.common.cases import FULL_M, KINDS, LINEARS, PASSES, Case, all_reduce_pass, tokens_of
from commfuse_megatron.tools.common.turns import largest_of_ranks

# Host time is measured where 30 calls take no longer than about 0.1 s.
_LONGEST_CALL_FOR_HOST_MS = 3.0

# What is said to be possible where the group that is there is not.
_SIZES_TO_PROPOSE = (2, 3, 4, 8, 16)

_CHUNKS = (1, 2, 4)

_MOST_UNUSED_BYTES = 16 << 30
_LEAST_FREE_BYTES = 24 << 30


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to run. See `commfuse bench --help`. kind: one of `KINDS`.

    chunks: those forced, with all variants in every case; empty: `_CHUNKS`, of linears where all variants are measured.
    """

    models: tuple[str, ...]
    linears: tuple[str, ...] = LINEARS
    tokens: tuple[int, ...] = KINDS["linears"].tokens
    passes: tuple[str, ...] = PASSES
    variants: tuple[str, ...] = ()
    chunks: tuple[int, ...] = ()
    config_files: tuple[str, ...] = ()
    virtual_ranks: tuple[int, ...] = ()
    rounds: int = 9
    case_s: float = 1.5
    budget_s: float | None = None
    shrink: int = 1
    commit: str | None = None
    kind: str = "linears"


@dataclass(frozen=True, slots=True)
class Piece:
    """One pass of one case of the grid; `group_size` is that of the real group or the emulated one."""

    name: str
    M: int
    pass_name: str
    group_size: int
    is_emulated: bool

    def __str__(self) -> str:
        emulated = f", {self.group_size} ranks emulated" if self.is_emulated else ""
        return f"{self.name} M={self.M} {self.pass_name}{emulated}"


@dataclass(slots=True)
class Outcome:
    """What came of a run besides rows. left_out: variant -> why. failures: results that were wrong, paths not taken."""

    missing: list[str] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def grid(settings: Settings, group_size: int) -> list[Piece]:
    """Everything that `settings` asks for, what matters most first."""
    known, is_emulated = KINDS[settings.kind].case_names, bool(settings.virtual_ranks)
    names = [name for name in known if name.split(".")[0] in settings.models]
    if settings.kind in ("linears", "all-reduce"):
        asked = (f"{model}.{linear}" for model in settings.models for linear in settings.linears)
        names = [name for name in asked if name in known]
    sizes = settings.virtual_ranks or (group_size,)
    pieces = [
        Piece(name, M, pass_name, size, is_emulated)
        for size in sizes
        for pass_name in (("fprop",) if is_emulated and settings.kind != "linears" else settings.passes)
        for name in names
        for M in tokens_of(name, settings.tokens)
        if settings.kind != "all-reduce" or pass_name == all_reduce_pass(name)
    ]

    def place(piece: Piece) -> tuple[int, ...]:
        """By length, then by model; the paper's cases, which have one length, come last."""
        has_own = bool(tokens_of(piece.name, ()))
        of_name = (1 + names.index(piece.name), 0) if has_own else (0, settings.tokens.index(piece.M))
        return sizes.index(piece.group_size), *of_name, settings.models.index(piece.name.split(".")[0])

    return sorted(pieces, key=place) if settings.kind == "linears" else pieces


def require_work(settings: Settings, device: torch.device, group_size: int) -> None:
    """Raise ConfigError where nothing of the grid can run, or a variant that is asked for is none of its variants.

    Some pieces that cannot run are no error: they are listed as missing.
    """
    pieces = grid(settings, group_size)
    if not pieces:
        cases = [name for name in KINDS[settings.kind].case_names if name.split(".")[0] in settings.models]
        passes = f", or none that sends in {' and '.join(settings.passes)}," if settings.kind == "all-reduce" else ""
        asked_for = f"there is no {', '.join(settings.linears)}{passes} among the cases of these models"
        raise ConfigError(f"{asked_for}, which are {', '.join(cases)}")
    possible, reasons = _sort_out(settings, pieces)
    if not possible:
        sizes = [str(size) for size in _SIZES_TO_PROPOSE if _sort_out(settings, grid(settings, size))[0]]
        others = f"; with these options groups of {', '.join(sizes)} can" if sizes else ""
        more = f"; and {len(reasons) - 2} more" if len(reasons) > 2 else ""
        raise ConfigError(f"nothing of this can run: {'; '.join(reasons[:2])}{more}{others}")
    for piece, case in possible:
        shard_rows = case.M // case.batch // case.group_size
        if max(settings.chunks, default=1) > shard_rows:
            raise ConfigError(
                f"{max(settings.chunks)} chunks of a shard were asked for; of {piece} it has {shard_rows} rows"
            )
    variants = _make_variants(settings, device, group_size)
    found = [variant.name for piece, case in possible for variant in _choose(variants, settings, case, piece, ())]
    for prefix in settings.variants:
        if not any(has_word_prefix(name, prefix) for name in found):
            names = ", ".join(dict.fromkeys(found))
            is_full = settings.kind != "linears" or any(_is_full(settings, piece) for piece, _ in possible)
            more = "" if is_full else f" (and more at M {' and '.join(map(str, FULL_M))})"
            raise ConfigError(f'no variant of these cases is called "{prefix}"; there are {names}{more}')
    kept = [name for name in found if any(has_word_prefix(name, prefix) for prefix in settings.variants)]
    if settings.chunks and settings.variants and not any(" m=" in name for name in kept):
        having = ", ".join(dict.fromkeys(name for name in found if " m=" in name))
        raise ConfigError(f"none of the variants that are asked for has chunks to force; those that have: {having}")


def _sort_out(settings: Settings, pieces: list[Piece]) -> tuple[list[tuple[Piece, Case]], list[str]]:
    """The pieces that can run, with their cases, and why the others cannot, each reason once."""
    possible: list[tuple[Piece, Case]] = []
    reasons: dict[str, None] = {}
    for piece in pieces:
        try:
            possible.append((piece, make_case(settings, piece)))
        except ConfigError as error:
            reasons[str(error)] = None
    return possible, list(reasons)


def make_case(settings: Settings, piece: Piece) -> Case:
    """The case of a piece; ConfigError where it cannot run."""
    return KINDS[settings.kind].make_case(piece.name, piece.M, piece.group_size, settings.shrink)


def dtype_of(device: torch.device) -> torch.dtype:
    """Of all operands: float32 on the CPU, where 16-bit GEMMs are slow and nothing is compared."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _make_variants(settings: Settings, device: torch.device, group_size: int) -> list[Variant]:
    chunks = settings.chunks or _CHUNKS
    if settings.virtual_ranks:
        return catalog.make_emulated_variants(settings.kind, device, chunks)
    return catalog.make_variants(settings.kind, device, group_size, chunks, settings.config_files)


def _choose(
    variants: list[Variant], settings: Settings, case: Case, piece: Piece, prefixes: tuple[str, ...]
) -> list[Variant]:
    is_full = _is_full(settings, piece)
    chosen = catalog.choose(variants, case.op, piece.pass_name, is_full=is_full, prefixes=prefixes)
    if settings.kind != "linears" or not _is_paper(piece):
        return chosen
    # Large ones: without those of ours that only differ in the number of chunks, as contexts keep buffers of their own.
    return [variant for variant in chosen if not isinstance(variant, Ours) or variant.options.chunks_per_shard == 1]


def _is_paper(piece: Piece) -> bool:
    return piece.name.startswith("paper")


def _is_full(settings: Settings, piece: Piece) -> bool:
    # Of the paper's case all variants run what the paper measured.
    is_papers_pass = _is_paper(piece) and piece.pass_name == "fprop"
    is_of_linears = settings.kind == "linears"
    return bool(settings.chunks) or not is_of_linears or piece.M in FULL_M or piece.is_emulated or is_papers_pass


def run_grid(
    pieces: Iterable[Piece],
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
    *,
    on_rows: Callable[[Piece, list[Row]], None] = lambda piece, rows: None,
    on_note: Callable[[str], None] = lambda note: None,
) -> Outcome:
    """Run all `pieces`, in order, until the time is up; collective over `group`."""
    runner = _Runner(group, device, settings, on_note)
    deadline = None if settings.budget_s is None else time.monotonic() + settings.budget_s
    recent_s: deque[float] = deque(maxlen=4)  # the first piece also makes what all of them use
    try:
        pieces = list(pieces)
        for position, piece in enumerate(pieces):
            is_late = deadline is not None and time.monotonic() + max(recent_s, default=0.0) > deadline
            if runner.any_rank(is_late):
                runner.outcome.missing += [f"{late}: no time left" for late in pieces[position:]]
                break
            started = time.monotonic()
            on_rows(piece, runner.run(piece))
            recent_s.append(time.monotonic() - started)
    finally:
        runner.close()
    return runner.outcome


class _Runner:
    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, settings: Settings, on_note: Callable[[str], None]
    ) -> None:
        self.outcome = Outcome()
        self._group, self._device, self._settings, self._on_note = group, device, settings, on_note
        self._pool = Pool(device, dtype_of(device), seed=group.rank())
        self._tails = TailMeter()
        self._variants = _make_variants(settings, device, group.size())

    def run(self, piece: Piece) -> list[Row]:
        settings = self._settings
        try:
            case = make_case(settings, piece)
        except ConfigError as error:
            self.outcome.missing.append(f"{piece}: {error}")
            return []
        self._return_memory()
        work = catalog.make_work(case, piece.pass_name, self._group, self._pool, is_emulated=piece.is_emulated)
        chosen = _choose(self._variants, settings, case, piece, settings.variants)
        measured = {variant.name: ready for variant in chosen if (ready := self._build(variant, work)) is not None}
        lacking = [name for name in catalog.BOUNDS if not any(has_word_prefix(found, name) for found in measured)]
        if lacking:
            self.outcome.missing.append(f"{piece}: nothing to compare with: there is no {', no '.join(lacking)}")
            return []
        timed = {name: Timed(ready.call, ready.before_burst) for name, ready in measured.items()}
        samples = measure(timed, self._group, rounds=settings.rounds, limit_s=settings.case_s, device=self._device)
        for variant in chosen:
            ready = measured.get(variant.name)
            if ready is None or ready.read is None:
                continue
            if not piece.is_emulated and samples[variant.name].median_ms <= _LONGEST_CALL_FOR_HOST_MS:
                ready.host_us = measure_host_us(timed[variant.name], self._group, self._device)
            if isinstance(variant, Ours) and _is_full(settings, piece) and not _is_paper(piece):
                ready.tail_ms = self._tails.measure_ms(work, ready)
        commit = settings.commit or this_commit()
        return make_rows(work, measured, samples, is_emulated=piece.is_emulated, commit=commit)

    def any_rank(self, claim: bool) -> bool:
        """Whether any rank claims it."""
        return bool(largest_of_ranks([float(claim)], self._device, self._group)[0])

    def close(self) -> None:
        self._tails.close()
        for variant in self._variants:
            variant.close()

    def _return_memory(self) -> None:
        """Give back what PyTorch holds and nobody uses: windows of the copy engine are allocated beside it.

        Where that leaves too little, all contexts go, and are made anew by those that need them.
        """
        if self._device.type != "cuda":
            return
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        if unused > _MOST_UNUSED_BYTES:
            torch.cuda.empty_cache()
        if self.any_rank(torch.cuda.mem_get_info(self._device)[0] + unused < _LEAST_FREE_BYTES):
            self.close()
            torch.cuda.empty_cache()

    def _build(self, variant: Variant, work: Work) -> Ready | None:
        """The variant, built and found right on all ranks; None when it is left out, with the reason noted once."""
        name, name_in_pass = variant.name, f"{variant.name}, {work.pass_name}"
        if name in self.outcome.left_out or name_in_pass in self.outcome.left_out:
            return None
        ready: Ready | None = None
        failure: Exception | None = None
        try:
            ready = variant.build(work)
            results = ready.results()
            if results:
                ready.max_error = check_results(work, name, results)
                variant.check_path(work, ready)
        except Exception as error:
            if not variant.is_foreign and not isinstance(error, UnsupportedError | ConfigError | VerificationError):
                raise
            failure = error
        if not self.any_rank(failure is not None):
            return ready
        # What is left out from now on must be the same on all ranks, also on those where nothing failed.
        is_wrong = self.any_rank(isinstance(failure, VerificationError) and not variant.is_foreign)
        is_impossible = self.any_rank(isinstance(failure, UnsupportedError | ConfigError))
        reason = "it failed on another rank" if failure is None else _describe(failure)
        if is_wrong:
            self.outcome.failures.append(f"{name}: {reason}")
            self._on_note(f"wrong: {name}: {reason}")
        else:
            key = name if is_impossible else name_in_pass  # what failed may yet work in the other pass
            self.outcome.left_out[key] = reason
            self._on_note(f"left out: {key}: {reason}")
        return None


def _describe(error: Exception) -> str:
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, CommFuseError) else f"{type(error).__name__}: {first}"
