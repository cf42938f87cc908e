"""Which tile for which problem: a small table and a count of waves. Deterministic; nothing is measured at run time.

Knows sizes only; must not know tensors.
"""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes at once, and with what.

    speed: relative to the first of the table, at equal area. min_parts: store in at least so many parts (more where
    shared memory asks for it). flatten: fuse the loop over tiles with the loop over K, so that the next tile's loads
    fly during this one's stores; by TMA and in static order only.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int
    speed: float
    min_parts: int = 1
    flatten: bool = True

    def count(self, M: int, N: int) -> int:
        """Number of tiles of an M x N output."""
        return -(-M // self.block_m) * -(-N // self.block_n)


# Speed: TFLOP/s over the first tile's, median over six shapes of 4096x4096x2048 .. 8192x8192x14336, bf16, H100,
# November 2026. The rows, with what lost to these tiles, are in docs/results/gemm_h100_h200_202612.json.
TILES = (
    Tile(128, 256, 64, num_warps=8, num_stages=3, group_m=8, speed=1.00),
    Tile(128, 128, 64, num_warps=4, num_stages=4, group_m=8, speed=0.94),
    Tile(64, 128, 64, num_warps=4, num_stages=6, group_m=8, speed=0.74),
    Tile(64, 64, 64, num_warps=4, num_stages=6, group_m=8, speed=0.41),
)
# Masked pointer loads go through registers where they are not aligned: not measured beyond being right.
POINTER_TILE = Tile(128, 128, 32, num_warps=8, num_stages=3, group_m=8, speed=0.50, flatten=False)


@functools.lru_cache(maxsize=4096)
def choose_tile(M: int, N: int, num_sms: int) -> Tile:
    """The tile with the least estimated time: full waves over `num_sms` blocks, times the time of one tile.

    Ties go to the earlier entry of the table.
    """

    def estimated_time(tile: Tile) -> float:
        waves = -(-tile.count(M, N) // num_sms)
        return waves * tile.block_m * tile.block_n / tile.speed

    return min(TILES, key=estimated_time)
