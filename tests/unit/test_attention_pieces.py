"""The calls that make up a split's attention cover what a causal mask shows, each score once, and little else."""

import itertools

import pytest

from commfuse_megatron.kernels import attention_pieces
from commfuse_megatron.kernels.attention_pieces import Mask, Piece, SplitSizes, backward_pieces, forward_piece
from commfuse_megatron.problem import RowRange

LARGE = SplitSizes(4096, 8192, 1, 16, 128, 128, is_causal=True)
SMALL = LARGE._replace(queries=256, keys=512)


def sizes_of(queries: int, keys: int, is_causal: bool = True) -> SplitSizes:
    return SplitSizes(queries, keys, 2, 4, 8, 8, is_causal)


def seen_by(piece: Piece, queries: int) -> set[tuple[int, int]]:
    """(query, key) of every score that the piece does not hide."""
    keys = piece.keys.size
    furthest = {Mask.NONE: keys, Mask.TOP_LEFT: 0, Mask.BOTTOM_RIGHT: keys - queries}[piece.mask]
    return {
        (query, piece.keys.start + key)
        for query, key in itertools.product(range(queries), range(keys))
        if key <= query + furthest
    }


@pytest.mark.parametrize("worth", [0, 1e30])
@pytest.mark.parametrize("is_causal", [True, False])
def test_pieces_see_every_score_of_the_split_once(worth: float, is_causal: bool, monkeypatch) -> None:
    monkeypatch.setattr(attention_pieces, "_WORTH_A_CALL", worth)
    for queries, keys in itertools.product(range(1, 7), repeat=2):
        sizes = sizes_of(queries, keys, is_causal)
        wanted = {
            (query, key)
            for query, key in itertools.product(range(queries), range(keys))
            if key <= query + keys - queries or not is_causal
        }
        pieces = backward_pieces(sizes)
        found = [seen_by(piece, queries) for piece in pieces]
        assert set().union(*found) == wanted
        assert sum(map(len, found)) == len(wanted)
        assert [piece.keys.start for piece in pieces[1:]] == [piece.keys.stop for piece in pieces[:-1]]
        assert (pieces[0].keys.start, pieces[-1].keys.stop) == (0, keys)
        # cuDNN takes no query that sees one key alone, and computes what a mask aligned bottom right hides.
        assert all((queries, piece.keys.size) != (1, 1) for piece in pieces if (queries, keys) != (1, 1))
        if worth == 0 and 1 < queries <= keys:
            assert all(piece.mask != Mask.BOTTOM_RIGHT for piece in pieces)
        forward = forward_piece(sizes)
        assert forward.keys == RowRange(0, keys)
        assert seen_by(forward, queries) == wanted


def test_a_second_call_must_save_enough() -> None:
    assert LARGE.hidden_flops == 4096 * 4095 // 2 * 16 * 5 * 128 * 2
    assert backward_pieces(LARGE) == (Piece(RowRange(0, 4096), Mask.NONE), Piece(RowRange(4096, 8192), Mask.TOP_LEFT))
    assert backward_pieces(SMALL) == (Piece(RowRange(0, 512), Mask.BOTTOM_RIGHT),)
    # A square costs no second call.
    assert backward_pieces(SMALL._replace(keys=256)) == (Piece(RowRange(0, 256), Mask.TOP_LEFT),)


def test_values_and_keys_of_other_sizes_count_as_their_gemms_do() -> None:
    latent = LARGE._replace(head_dim=192, value_dim=128, batch=3)
    assert latent.hidden_flops / LARGE.hidden_flops == 3 * (3 * 192 + 2 * 128) / (5 * 128)
