"""Which calls of cuDNN make up the attention of one split, so that little is computed of what a causal mask hides.

Plain numbers, no torch. A split is n queries against k keys, causal, the last query aligned to the last key. cuDNN's
backward kernel skips what a mask hides if it is aligned top left, first query to first key; aligned bottom right it
computes all keys for all queries (H200, November 2026: 2.6 ms against 1.44 of 8192 x 8192). So a split is cut:

    keys         0 ........ k-n ...... k
    query 0      [ rectangle |#        ]      #: seen
                 [ all seen  |# #      ]
    query n-1    [           |# # # #  ]

The square's mask is the same from either corner; the rectangle needs none. Both are given what the forward pass left
for ALL keys, output and logarithm of the softmax's denominator. Then their gradients of the queries add up, and each
key belongs to one of them.
"""

import enum
from typing import NamedTuple

from commfuse_megatron.problem import RowRange

# What a call must save before a second one, and the sum of two gradients, cost less: 43 GFLOP saved -9 to 27 us of a
# split's backward pass, 21 lost 30 to 37, 86 saved 25 to 103 (H200, cuDNN 9.19, bf16, 1 x 16/4, 8 x 16/16 and 1 x 32/4
# heads of 128, November 2026).
_WORTH_A_CALL = 5e10  # flops


class Mask(enum.Enum):
    """What a call hides: nothing, or later keys, with the first of queries and keys aligned, or the last."""

    NONE = enum.auto()
    TOP_LEFT = enum.auto()
    BOTTOM_RIGHT = enum.auto()


# The mask of a square's forward pass, where either is right: 473 us with this one and 475 with BOTTOM_RIGHT, of 8192 x
# 8192, 16 heads (as above).
_FORWARD_SQUARE = Mask.TOP_LEFT


class SplitSizes(NamedTuple):
    """Sizes of one split. is_causal: else every query sees all keys."""

    queries: int
    keys: int
    batch: int
    heads: int
    head_dim: int
    value_dim: int
    is_causal: bool

    @property
    def hidden_flops(self) -> int:
        """What the backward pass computes in vain if it computes all keys for all queries: five GEMMs."""
        hidden = self.queries * (self.queries - 1) // 2
        return 2 * hidden * self.batch * self.heads * (3 * self.head_dim + 2 * self.value_dim)


class Piece(NamedTuple):
    """All queries of a split against some of its keys."""

    keys: RowRange
    mask: Mask


def one_piece(sizes: SplitSizes) -> Piece:
    """The whole split in one call, for any number of queries and keys."""
    return Piece(RowRange(0, sizes.keys), Mask.BOTTOM_RIGHT if sizes.is_causal else Mask.NONE)


def forward_piece(sizes: SplitSizes) -> Piece:
    """The forward pass, one call: its kernel skips what is hidden with either mask."""
    whole = one_piece(sizes)
    return whole._replace(mask=_FORWARD_SQUARE) if sizes.is_causal and sizes.queries == sizes.keys else whole


def backward_pieces(sizes: SplitSizes) -> tuple[Piece, ...]:
    """The calls of the backward pass, one or two."""
    whole = one_piece(sizes)
    before = sizes.keys - sizes.queries
    if not sizes.is_causal or before < 0:
        return (whole,)
    if before == 0:
        return (whole._replace(mask=Mask.TOP_LEFT),)
    if sizes.hidden_flops <= _WORTH_A_CALL:
        return (whole,)
    return Piece(RowRange(0, before), Mask.NONE), Piece(RowRange(before, sizes.keys), Mask.TOP_LEFT)
