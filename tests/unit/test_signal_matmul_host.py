"""`signal_matmul` without a GPU: its kernels compile for Hopper as they must, and tables hold every tile once."""

import itertools
import subprocess

import pytest
import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels import RowChunk, TileTable, signal_variant
from commfuse_megatron.kernels.matmul_variant import SHARED_BYTES
from commfuse_megatron.kernels.signal_variant import (
    NO_PARTIALS,
    SIGNAL_TILES,
    SignalVariant,
    check_chunks,
    choose_signal_tile,
    compile_signal_variant,
    table_words,
)

BF16, FP16 = torch.bfloat16, torch.float16
KINDS = {
    "plain": (False, False, 0), "waits": (True, False, 0), "counts": (False, True, 0), "adds": (False, True, 1),
    "all": (True, True, 7),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b_k_inner", [True, False])
@pytest.mark.parametrize("tile", SIGNAL_TILES, ids=lambda tile: str(tile.block_n))
def test_compiles_for_hopper(tile, b_k_inner, kind, tmp_path) -> None:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    waits, counts, partials = KINDS[kind]
    variant = SignalVariant(tile, b_k_inner, waits, counts, partials, FP16 if kind == "counts" else BF16)
    compiled = compile_signal_variant(variant, GPUTarget("cuda", 90, 32))
    from commfuse_megatron.kernels.signal_matmul_kernel import signal_matmul_kernel

    assert list(compiled.src.signature) == signal_matmul_kernel.arg_names, "launchers pass arguments by position"
    assert compiled.metadata.shared <= SHARED_BYTES
    assert compiled.metadata.global_scratch_size == 0, "descriptors must come from the host"
    ptx = compiled.asm["ptx"]
    assert ("ld.acquire.sys.global" in ptx) == (waits or partials > 0)
    assert ("atom.global.sys.release.add" in ptx) == counts
    assert ("cp.async.bulk.wait_group 0" in ptx) == counts, "counted are rows in memory, not rows that have been read"
    # What ptxas says of the code: that every wgmma waits for the one before costs a tenth of the speed.
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    ptxas = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    said = subprocess.run(ptxas, check=True, capture_output=True, text=True).stderr
    assert "serialized" not in said
    assert "0 bytes spill stores" in said


# ---- tables ----


def cells(chunks, N, tile):
    """(row range, column range, chunk) of every tile, in order."""
    words, num_tiles = table_words(chunks, N, tile)
    assert len(words) == 4 * num_tiles + len(chunks) * (3 + max(len(chunk.partials) for chunk in chunks))
    for row, end_row, col, chunk in itertools.batched(words[: 4 * num_tiles], 4):
        yield range(row, min(end_row, row + tile.block_m)), range(col, min(N, col + tile.block_n)), chunk


@pytest.mark.parametrize("tile", SIGNAL_TILES, ids=lambda tile: str(tile.block_n))
@pytest.mark.parametrize("ends", [(1,), (128, 256), (5, 6, 1000), (2048, 2049, 4096, 4100)], ids=str)
def test_every_element_is_in_one_tile_of_its_chunk(ends, tile) -> None:
    chunks = [RowChunk(*rows) for rows in itertools.pairwise([0, *ends])][::-1]
    seen = torch.zeros(ends[-1], 600, dtype=torch.int32)
    order = []
    for rows, cols, chunk in cells(chunks, 600, tile):
        seen[rows.start : rows.stop, cols.start : cols.stop] += 1
        assert chunks[chunk].first_row <= rows.start < rows.stop <= chunks[chunk].end_row
        order.append(chunk)
    assert (seen == 1).all()
    assert order == sorted(order), "a chunk's tiles come before those of the next"


def test_words_of_chunks() -> None:
    chunks = [
        RowChunk(300, 400, flag=3),
        RowChunk(0, 100, counter=2),
        RowChunk(100, 200, partials=(5, None)),
        RowChunk(200, 300, partials=(6, 7)),
    ]
    words, num_tiles = table_words(chunks, 64, SIGNAL_TILES[0])
    assert num_tiles == 4
    assert words[16:] == [
        *(3, -1, NO_PARTIALS, -1, -1),
        *(-1, 2, NO_PARTIALS, -1, -1),
        *(-1, -1, -100, 5, -1),
        *(-1, -1, -100, 6, 7),
    ]


def test_refuses_chunks_that_are_no_partition() -> None:
    for chunks, words in (
        ([RowChunk(0, 10), RowChunk(12, 20)], "follows row 10"),
        ([RowChunk(0, 10), RowChunk(9, 20)], "follows row 10"),
        ([RowChunk(0, 10), RowChunk(10, 10)], "none may be empty"),
        ([RowChunk(0, 10)], "the chunks end at row 10, and there are 20 rows"),
        ([RowChunk(0, 5, partials=(0,)), RowChunk(5, 10), RowChunk(10, 20, partials=(0,))], "one range"),
        ([RowChunk(0, 5, partials=(0,)), RowChunk(5, 20, partials=(0, 1))], "equally many"),
    ):
        with pytest.raises(ShapeError, match=words):
            check_chunks(chunks, 20)


def test_small_tiles_where_large_ones_leave_a_wave_empty() -> None:
    wide, narrow = SIGNAL_TILES
    assert choose_signal_tile([1024] * 8, 28672, 132) is wide
    assert choose_signal_tile([1024] * 8, 768, 132) is narrow
    assert choose_signal_tile([1] * 8, 64, 132) is narrow


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(UnsupportedError, match="needs a CUDA device, not 'cpu'"):
        TileTable([RowChunk(0, 8)], 8, 8, torch.device("cpu"))


def test_pieces_fill_a_tile() -> None:
    assert all(tile.block_n % signal_variant.PIECE_N == 0 for tile in SIGNAL_TILES)
