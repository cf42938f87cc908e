"""`signal_matmul`: a GEMM whose tiles wait for rows that are on their way, and are counted as they are done.

Knows tensors, flags and counters; must not know who sets the flags, nor who waits for the counters. As in
`persistent_matmul.py`, all that follows from shapes, strides and dtypes is worked out once and kept as a plan, which
holds no tensor: the table of tiles is the caller's.
"""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels.launch import Launcher, View, make_launcher
from commfuse_megatron.kernels.signal_variant import (
    COUNTS_PER_TILE,
    RowChunk,
    SignalTile,
    SignalVariant,
    check_chunks,
    choose_signal_tile,
    compile_signal_variant,
    table_words,
)
from commfuse_megatron.kernels.support import (
    MATMUL_DTYPES,
    multiprocessor_count,
    raw_stream,
    signal_matmul_unavailable_reason,
)

MAX_SIZE = 2**31 - 512  # tile coordinates are 32 bits
MAX_PLANS = 4096

_Key = tuple[torch.Size, tuple[int, ...], torch.dtype, int, bool]


class TileTable:
    """In which order the tiles of one problem are computed, what they wait for and where they are counted.

    Made once per problem and passed to every call; holds a small tensor, so it must live as long as what was launched
    with it, CUDA graphs included.

    chunks: every row of `out` once, in the order of computation: for an all-gather the own rows first, then those that
        arrive; for a reduce-scatter others' first, the own rows with their partials last. No tile is in two chunks, so
        no row waits for another chunk than its own; sizes that are no multiples of a tile cost a tile each.
    M, N: of `out`. num_sms: blocks; default one for each SM. tile: instead of the chosen one; for tests, benchmarks.

    counts: for each counter, how much a call adds to it.

    >>> own, others = RowChunk(0, 4096), RowChunk(4096, 8192, flag=0)  # rank 0 of 2 multiplies what is gathered
    >>> table = TileTable((own, others), 8192, 3072, torch.device("cuda", 0))  # doctest: +SKIP

    Raises: ShapeError, UnsupportedError.
    """

    def __init__(
        self,
        chunks: Sequence[RowChunk],
        M: int,
        N: int,
        device: torch.device,
        *,
        num_sms: int | None = None,
        tile: SignalTile | None = None,
    ) -> None:
        reason = signal_matmul_unavailable_reason(device)
        if reason is not None:
            raise UnsupportedError(f"{reason}.")
        if min(M, N) < 1 or max(M, N) > MAX_SIZE:
            raise ShapeError(f"signal_matmul: out of {M}x{N}; sizes from 1 to {MAX_SIZE} are served.")
        if num_sms is not None and num_sms < 1:
            raise ShapeError(f"signal_matmul: num_sms is {num_sms}; at least 1 block is needed.")
        check_chunks(chunks, M)
        num_sms = num_sms or multiprocessor_count(device.index or 0)
        self.tile = tile or choose_signal_tile([chunk.end_row - chunk.first_row for chunk in chunks], N, num_sms)
        words, self.num_tiles = table_words(chunks, N, self.tile)
        self.words = torch.tensor(words, dtype=torch.int32, device=device)
        self.shape = (M, N)
        self.num_blocks = min(num_sms, self.num_tiles)
        self.num_partials = max(len(chunk.partials) for chunk in chunks)
        self.partial_rows = sum(chunk.end_row - chunk.first_row for chunk in chunks if chunk.partials)
        waited_for = [chunk.flag for chunk in chunks] + [flag for chunk in chunks for flag in chunk.partials]
        self.num_flags = max((flag + 1 for flag in waited_for if flag is not None), default=0)
        self.waits = any(chunk.flag is not None for chunk in chunks)
        self.counts: dict[int, int] = {}
        for chunk in chunks:
            if chunk.counter is not None:
                tiles = -(-(chunk.end_row - chunk.first_row) // self.tile.block_m) * -(-N // self.tile.block_n)
                self.counts[chunk.counter] = self.counts.get(chunk.counter, 0) + tiles * COUNTS_PER_TILE
        self.num_counters = max(self.counts, default=-1) + 1
        if min(self.counts, default=0) < 0 or any(flag is not None and flag < 0 for flag in waited_for):
            raise ShapeError("signal_matmul: indices of flags and counters start at 0; None stands for none.")
        # What a plan depends on.
        self.key = (
            self.tile, self.shape, self.num_tiles, self.num_blocks, self.num_partials, self.partial_rows,
            self.num_flags, self.num_counters, self.waits, self.words.get_device(),
        )  # fmt: skip


def signal_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor,
    table: TileTable,
    flags: torch.Tensor | None = None,
    counters: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    flag_value: int = 1,
) -> torch.Tensor:
    """`a @ b`, plus the partials in the rows that have some, computed chunk by chunk as rows come and go.

    Equals `a.float() @ b.float() (+ partials[0].float() + partials[1].float() ...)`, added in that order and rounded
    once. Bit-identical from run to run, whenever flags are set, for every number of blocks and every order of chunks of
    equal sizes. Not differentiable.

    A chunk's rows of `a` are read once its flag equals `flag_value` (acquire, system scope), and its partials once
    theirs do. Its counter grows by `table.counts` in all, each time when the counted rows are in memory (release,
    system scope): what waits for that value, a stream (`cuStreamWaitValue32`) or a kernel on any GPU, may read them.

    Beware: until its flags are set the call keeps its SMs, so what sets them must not need one of these: a copy, a
    stream memory operation, or a kernel for which `num_sms` leaves room and which has been launched before (CUDA loads
    it then, and waits for the device to do so). Flags must be unset, and counters zero, before the call; whoever waits
    for them makes them so again, as the copy engine does.

    Shapes:
        a         [M, K]      bfloat16 or float16; rows contiguous
        b         [K, N]      same dtype and device; one of its strides is 1
        out       [M, N]      dtype of a; rows contiguous
        flags     [F]         int32, contiguous; at least as many as chunks name
        counters  [C]         int32, contiguous
        partials  [P, R, N]   dtype of a; rows contiguous and equally far apart; R: rows of all chunks that have some
    M, N, K are any sizes from 1; a, b, out and partials start at multiples of 16 bytes, and so do their rows. fprop is
    (x, w.t()), dgrad (dy, w).

    Returns: `out`.

    Raises, before anything is launched: ShapeError, UnsupportedError.

    Cost: docs/results/gemm_h100_h200_202612.json; rows of `a` that are not multiples of the tile cost a whole tile.
    """
    a_at, b_at, out_at = a.data_ptr(), b.data_ptr(), out.data_ptr()
    operand_keys, word_keys = (_key(a), _key(b), _key(out)), (_key_of(flags), _key_of(counters), _key_of(partials))
    key = (operand_keys, word_keys, table.key)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(operand_keys, word_keys, table)
        if len(_plans) >= MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    partials_at = None if partials is None else partials.data_ptr()
    plan.check_apart(a_at, b_at, partials_at, out_at)
    addresses = (
        a_at, b_at, out_at, out_at, partials_at, table.words.data_ptr(),
        None if flags is None else flags.data_ptr(), None if counters is None else counters.data_ptr(),
    )  # fmt: skip
    device_index = plan.device_index
    if device_index == torch.cuda.current_device():
        plan.launch(flag_value, addresses)
    else:
        with torch.cuda.device(device_index):
            plan.launch(flag_value, addresses)
    return out


def _key_of(tensor: torch.Tensor | None) -> _Key | None:
    return None if tensor is None else _key(tensor)


def _key(tensor: torch.Tensor) -> _Key:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), not tensor.data_ptr() & 15


@dataclass(slots=True)
class _Plan:
    """Everything about a call but its addresses and the value of flags."""

    variant: SignalVariant
    device_index: int
    num_blocks: int
    spans: tuple[int, int, int, int]  # bytes from start to end of a, b, partials, out
    views: tuple[View | None, ...]
    tail: tuple[Any, ...]  # the kernel's arguments after the value of flags
    launchers: dict[int, Launcher]  # by that value: launchers take addresses only

    def launch(self, flag_value: int, addresses: tuple[int | None, ...]) -> None:
        """Launch on the current stream of the current device, which is the tensors' device."""
        launcher = self.launchers.get(flag_value)
        if launcher is None:
            compiled = _load(self.device_index, self.variant)
            if len(self.launchers) >= MAX_PLANS:
                self.launchers.clear()
            launcher = make_launcher(compiled, self.num_blocks, self.views, (flag_value, *self.tail))
            self.launchers[flag_value] = launcher
        launcher(raw_stream(self.device_index), *addresses)

    def check_apart(self, a_at: int, b_at: int, partials_at: int | None, out_at: int) -> None:
        """Refuse an `out` that overlaps an operand."""
        operands = (("a", a_at), ("b", b_at), ("partials", partials_at))
        end = out_at + self.spans[3]
        for (name, at), span in zip(operands, self.spans[:3], strict=True):
            if at is not None and at < end and out_at < at + span:
                raise ShapeError(
                    f"signal_matmul: out overlaps {name} in memory ({name} starts {at - out_at} bytes behind out, "
                    f"which has {self.spans[3]}). Pass another out."
                )


_plans: dict[Any, _Plan] = {}
_load_lock = threading.RLock()


def _load(device_index: int, variant: SignalVariant) -> Any:
    """The variant's compiled kernel; ranks may be threads, so one at a time."""
    with _load_lock:
        return _load_once(device_index, variant)


@functools.cache
def _load_once(device_index: int, variant: SignalVariant) -> Any:
    from triton.runtime.driver import driver

    return compile_signal_variant(variant, driver.active.get_current_target())  # loaded on one device


# ---- checks and choices, once per kind of call ----


def _make_plan(
    operands: tuple[_Key, _Key, _Key], words: tuple[_Key | None, _Key | None, _Key | None], table: TileTable
) -> _Plan:
    (a, b, out), (flags, counters, partials) = operands, words
    for name, key in (("a", a), ("b", b), ("out", out)):
        _check_matrix(name, key, a, table)
    (M, N), K = table.shape, a[0][1]
    if a[0][0] != M or b[0] != (K, N) or out[0] != (M, N):
        raise ShapeError(
            f"signal_matmul: a is {tuple(a[0])}, b {tuple(b[0])} and out {tuple(out[0])}; the table of tiles is for an "
            f"out of {M}x{N}."
        )
    _check_words("flags", flags, table.num_flags, table)
    _check_words("counters", counters, table.num_counters, table)
    _check_partials(partials, a, table)
    b_strides = b[1]
    b_k_inner = b_strides[0] == 1 and b_strides[1] != 1
    a_stride, b_stride, out_stride = a[1][0], b_strides[1] if b_k_inner else b_strides[0], out[1][0]
    variant = SignalVariant(
        tile=table.tile,
        b_k_inner=b_k_inner,
        waits=table.waits,
        counts=table.num_counters > 0,
        partials=table.num_partials,
        dtype=a[2],
    )
    itemsize = a[2].itemsize
    b_rows, b_cols = (N, K) if b_k_inner else (K, N)
    partial_view, partial_span, partial_rows = None, 0, 0
    if partials is not None:
        (P, rows, _), (copy_stride, row_stride, _) = partials[0], partials[1]
        partial_rows = copy_stride // row_stride
        partial_view = View(((P - 1) * partial_rows + rows, N), (row_stride, 1))  # one tall matrix
        partial_span = ((partial_view.shape[0] - 1) * row_stride + N) * itemsize
    spans = (
        ((M - 1) * a_stride + K) * itemsize,
        ((b_rows - 1) * b_stride + b_cols) * itemsize,
        partial_span,
        ((M - 1) * out_stride + N) * itemsize,
    )
    views = (
        View((M, K), (a_stride, 1)),
        View((b_rows, b_cols), (b_stride, 1)),
        View((M, N), (out_stride, 1)),
        None,
        partial_view,
        *(None,) * 3,
    )
    tail = (table.num_tiles, N, K, partial_rows, out_stride, None)
    return _Plan(variant, a[3], table.num_blocks, spans, views, tail, {})


def _check_matrix(name: str, key: _Key, a: _Key, table: TileTable) -> None:
    shape, strides, dtype, device_index, is_aligned = key
    if len(shape) != 2 or min(shape) < 1 or max(shape) > MAX_SIZE:
        raise ShapeError(f"signal_matmul: {name} has shape {tuple(shape)}; a matrix with sizes from 1 is needed.")
    if dtype not in MATMUL_DTYPES or dtype != a[2]:
        raise UnsupportedError(f"signal_matmul: {name} is {dtype}, a is {a[2]}; all must be bfloat16, or all float16.")
    if device_index != table.key[-1]:
        raise ShapeError(
            f"signal_matmul: {name} is on CUDA device {device_index}, the table on {table.key[-1]} (-1: none)."
        )
    inner = 1 if strides[1] == 1 or name != "b" else 0
    outer_stride = strides[1 - inner]
    fits = strides[inner] == 1 and outer_stride * dtype.itemsize % 16 == 0 and outer_stride >= shape[inner]
    if not fits or not is_aligned:
        raise UnsupportedError(
            f"signal_matmul: {name} has shape {tuple(shape)} and strides {tuple(strides)}; it must be contiguous along "
            f"{'one dim' if name == 'b' else 'its rows'}, and start, as each row, at a multiple of 16 bytes. Pass a "
            "padded copy, or use persistent_matmul."
        )


def _check_words(name: str, key: _Key | None, number: int, table: TileTable) -> None:
    """Flags or counters: int32, as many as the table names."""
    if key is None and number == 0:
        return
    if key is None or len(key[0]) != 1 or key[0][0] < number or key[1] != (1,) or key[2] != torch.int32:
        found = "none" if key is None else f"{key[2]} of shape {tuple(key[0])}"
        raise ShapeError(f"signal_matmul: {name} are {found}; contiguous int32, at least {number}, are needed.")
    if key[3] != table.key[-1]:
        raise ShapeError(f"signal_matmul: {name} are on CUDA device {key[3]}, the table on {table.key[-1]}.")


def _check_partials(key: _Key | None, a: _Key, table: TileTable) -> None:
    wanted = (table.num_partials, table.partial_rows, table.shape[1])
    if key is None and table.num_partials == 0:
        return
    if key is None or table.num_partials == 0 or tuple(key[0]) != wanted:
        found = "none" if key is None else f"of shape {tuple(key[0])}"
        needed = f"shape {wanted}" if table.num_partials else "none, as no chunk has some"
        raise ShapeError(f"signal_matmul: partials are {found}; needed is {needed}.")
    (_, rows, N), strides, dtype, device_index, is_aligned = key
    if dtype != a[2]:
        raise UnsupportedError(f"signal_matmul: partials are {dtype}, a is {a[2]}; they must be the same.")
    if device_index != table.key[-1]:
        raise ShapeError(f"signal_matmul: partials are on CUDA device {device_index}, the table on {table.key[-1]}.")
    fits = strides[2] == 1 and strides[1] >= N and strides[1] * dtype.itemsize % 16 == 0
    if not fits or not is_aligned or strides[0] % strides[1] or strides[0] < rows * strides[1]:
        raise UnsupportedError(
            f"signal_matmul: partials have shape {tuple(key[0])} and strides {tuple(strides)}; each row must be "
            "contiguous and start at a multiple of 16 bytes, and all rows lie equally far apart. Pass a padded copy."
        )
