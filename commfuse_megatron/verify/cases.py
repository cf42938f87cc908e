"""The cases of `commfuse verify`: sizes, dtypes, layouts and configurations under which the operations must be right.

Knows no transport and no tensors' values. The contract that bites: all ranks build the same list in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import torch

from commfuse_megatron.config import LinearConfig, OverlapConfig, PassConfig, TransportConfig, WgradConfig

__all__ = ["OPS", "Case", "make_cases", "TIMEOUT_S"]

OPS = ("all_gather_linear", "linear_reduce_scatter")
Layout = Literal["contiguous", "x transposed", "x strided", "gradient expanded"]
TransportName = Literal["auto", "gloo", "nccl", "copy_engine"]
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """One or more calls in a row, forward and backward, under one configuration.

    variant: what is special, for people. rows: S of each call. exact: small integers, compared with no tolerance.
    needs_x, needs_weight: whether these require a gradient. expected_path: what the report must say.
    """

    op: str
    variant: str
    algorithm: Literal["ring", "direct"]
    chunks_per_shard: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    batch: int
    N: int
    K: int
    exact: bool = True
    has_bias: bool = True
    layout: Layout = "contiguous"
    needs_x: bool = True
    needs_weight: bool = True
    keep_gathered_input: bool = False
    path: Literal["sliced", "sequential"] = "sliced"
    transport: TransportName = "auto"
    group_size: int

    @property
    def expected_path(self) -> str:
        """The path that the report must name; a group of one rank sends nothing."""
        return "local" if self.group_size == 1 else self.path

    @property
    def expected_backward_path(self) -> str:
        """The same of the backward pass."""
        return self.expected_path

    @property
    def dtype_name(self) -> str:
        """E.g. "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    def config(self) -> OverlapConfig:
        """The configuration that a context for this case must have; equal for many cases."""
        chosen = PassConfig(path=self.path, algorithm=self.algorithm, chunks_per_shard=self.chunks_per_shard)
        return OverlapConfig(
            linear=LinearConfig(
                fprop=chosen, dgrad=chosen, wgrad=WgradConfig(keep_gathered_input=self.keep_gathered_input)
            ),
            transport=TransportConfig(timeout_s=TIMEOUT_S, backend=self.transport),
        )


def make_cases(
    group_size: int, device_type: str, dtype: torch.dtype | None = None, transport: TransportName = "auto"
) -> list[Case]:
    """All cases for a group (those of one dtype, if given) over `transport`, those of one configuration together.

    Exact cases keep every sum within the 256 integers that bfloat16 holds exactly: |x| <= 2, |weight|, |grad| <= 1.
    """
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if device_type == "cpu":
        dtypes.insert(1, torch.float64)
    if dtype is not None:
        dtypes = [dtype]
    cases: list[Case] = []
    for algorithm, chunks in product(("ring", "direct"), (1, 2, 3)):
        for op, dtype in product(OPS, dtypes):
            base: dict[str, Any] = {
                "op": op,
                "algorithm": algorithm,
                "chunks_per_shard": chunks,
                "dtype": dtype,
                "group_size": group_size,
            }
            cases.extend(Case(**base, **special) for special in _variants(group_size, device_type))
    for op, dtype in product(OPS, dtypes):
        base = {"op": op, "algorithm": "direct", "chunks_per_shard": 1, "dtype": dtype, "group_size": group_size}
        plain = _sizes(group_size, 4 * group_size)
        cases.append(Case(**base, **plain, variant="input kept", keep_gathered_input=True))
        cases.append(Case(**base, **plain, variant="sequential, asked for", path="sequential"))
    cases = [dataclasses.replace(case, transport=transport) for case in cases]
    return sorted(cases, key=lambda case: (case.algorithm, case.chunks_per_shard, case.path, case.keep_gathered_input))


def _sizes(group_size: int, *rows: int) -> dict[str, Any]:
    # Features are bounded so that exact sums over all ranks are: 2 * K * group_size <= 256.
    features = max(2, min(16, 128 // group_size))
    return {"rows": rows, "batch": 2, "N": features - 3 if features > 8 else features, "K": features}


def _variants(group_size: int, device_type: str) -> Iterator[dict[str, Any]]:
    even = 4 * group_size
    yield {"variant": "even", **_sizes(group_size, even)}
    yield {"variant": "even, random", **_sizes(group_size, even), "exact": False}
    yield {"variant": "uneven", **_sizes(group_size, 3 * group_size + 1)}
    yield {"variant": "uneven, random", **_sizes(group_size, 4 * group_size - 1), "exact": False}
    yield {"variant": "one row", **_sizes(group_size, 1)}
    yield {"variant": "S changes", **_sizes(group_size, even, group_size, even + 1, 2, even)}
    yield {"variant": "no bias", **_sizes(group_size, even), "has_bias": False}
    yield {"variant": "frozen weight", **_sizes(group_size, even), "needs_weight": False}
    yield {"variant": "input needs no gradient", **_sizes(group_size, even), "needs_x": False}
    for layout in ("x transposed", "x strided", "gradient expanded"):
        yield {"variant": layout, **_sizes(group_size, even), "layout": layout}
    large: dict[str, Any] = (
        {"batch": 1, "N": 136, "K": 200} if device_type == "cpu" else {"batch": 1, "N": 1280, "K": 2048}
    )
    rows = (64 if device_type == "cpu" else 512) * group_size
    yield {"variant": "larger, random", "rows": (rows,), **large, "exact": False}
