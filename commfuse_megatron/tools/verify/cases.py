"""The cases of `commfuse verify`: sizes, dtypes, layouts and configurations under which the operations must be right.

And in which modes their calls can run: see `modes_of`. Beware: all ranks build the same list in the same order.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

import torch

from commfuse_megatron.config import (
    Backend,
    OverlapConfig,
    PassConfig,
    TransportConfig,
)
from commfuse_megatron.kernels.attention_cudnn import cudnn_attention_unavailable_reason
from commfuse_megatron.problem import chunk_ranges
from commfuse_megatron.tools.common.modes import MODES, Mode
from commfuse_megatron.tools.verify.calls import (
    ALL_REDUCES,
    OPS,
    AttentionCall,
    BlockCall,
    Call,
    EmbeddingCall,
    LinearCall,
    UlyssesCall,
)

TIMEOUT_S = 60.0

# cuBLASLt takes rows that begin on 16 bytes.
_ROW_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Case:
    """Calls under one configuration, forward and backward.

    variant: what is special, for people. call: what comes most often; other_rows: S of further calls.
    """

    variant: str
    call: LinearCall | EmbeddingCall | AttentionCall | UlyssesCall
    other_rows: tuple[int, ...]
    path: Literal["sliced", "grouped", "sequential", "query_split", "overlapped"] = "sliced"
    backward_path: Literal[
        "sliced", "grouped", "bulk", "async", "sequential", "query_split", "row_parallel", "overlapped"
    ] = "sliced"
    algorithm: Literal["ring", "direct"] = "direct"
    chunks_per_shard: int = 1
    keep_gathered_input: bool = False
    transport: Backend = "auto"
    group_size: int

    @property
    def op(self) -> str:
        """The operation's name."""
        return self.call.op

    @property
    def dtype_name(self) -> str:
        """E.g. "bfloat16"."""
        return str(self.call.dtype).removeprefix("torch.")

    @property
    def rows(self) -> tuple[int, ...]:
        """S of all calls."""
        return (*self.other_rows, self.call.rows)

    def call_of(self, rows: int, seed: int) -> Call:
        """The call with so many rows."""
        return dataclasses.replace(self.call, rows=rows, seed=seed)

    def expected_path(self, pass_name: str) -> str:
        """The path that the report must name; a group of one rank sends nothing, and some passes have nothing to."""
        sends = not isinstance(self.call, LinearCall) or self.call.sends(pass_name)
        return self._asked_path(pass_name) if sends and self.group_size > 1 else "local"

    def config(self) -> OverlapConfig:
        """The configuration that a context for this case must have; equal for many cases."""
        transport = TransportConfig(timeout_s=TIMEOUT_S, backend=self.transport)
        options: dict[str, Any] = {}
        match self.call:
            case UlyssesCall():
                groups = self.chunks_per_shard if self.path == "overlapped" else None
                options["ulysses"] = {"path": self.path, "head_groups": groups}
            case AttentionCall():
                linear = {"path": "sliced", "algorithm": "direct", "chunks_per_shard": 1}  # where it runs alone
                options["linear"] = {"fprop": linear, "dgrad": linear}
                splits = {"splits_per_shard": self.chunks_per_shard}
                options["attention"] = {"path": "query_split", "backward": self.backward_path, **splits}
            case _:
                pieces = {"algorithm": self.algorithm, "chunks_per_shard": self.chunks_per_shard}
                options["linear"] = {
                    "fprop": {"path": self.path, **pieces},
                    "dgrad": {"path": self.backward_path, **pieces},
                    "wgrad": {"keep_gathered_input": self.keep_gathered_input},
                }
        return dataclasses.replace(OverlapConfig.from_dict(options, source=self.variant), transport=transport)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        own = asdict(self)
        return own.pop("call") | own | {"op": self.op, "K": self.call.K, "dtype": self.dtype_name, "rows": self.rows}

    def _asked_path(self, pass_name: str) -> str:
        return self.path if pass_name == "fprop" else self.backward_path


_SLICED = PassConfig(path="sliced", algorithm="direct", chunks_per_shard=1)


def modes_of(case: Case, pass_name: str, rows: int, transport: str, device: torch.device) -> tuple[Mode, ...]:
    """Which modes a pass of a call of so many rows can take; none where the group's collectives carry it.

    By the case and what is installed, whatever the program does: a tape serves direct schedules of the copy engine in
    16 bits, whose GEMMs cuBLASLt takes and whose attention cuDNN does.
    """
    path, call = case.expected_path(pass_name), case.call
    is_whole = path == "local" and (isinstance(call, UlyssesCall) or call.op in ALL_REDUCES)
    if path in ("sequential", "async") or is_whole:
        return ()
    is_direct = transport == "copy_engine" and path != "local" and case.algorithm == "direct"
    if not is_direct or call.dtype.itemsize != 2:
        return MODES[:1]
    has_whole_rows = all(features * call.dtype.itemsize % _ROW_BYTES == 0 for features in (call.N, call.K))
    match call:
        case EmbeddingCall():
            is_served = pass_name == "backward"  # PyTorch looks entries up; back, rows are only gathered
        case UlyssesCall():
            is_served = _is_on_tape(case, call, pass_name, rows, device)
        case AttentionCall():
            # After a backward pass of the projection alone, attention may be anybody's.
            is_served = has_whole_rows and (path == "row_parallel" or _is_cudnns(case, call, rows, device))
        case _:
            is_served = has_whole_rows
    if not is_served:
        return MODES[:1]
    return MODES[:2] if isinstance(call, BlockCall) else MODES  # what goes part by part is no graph


def _is_cudnns(case: Case, call: AttentionCall, rows: int, device: torch.device) -> bool:
    """Whether cuDNN computes all splits: one query that sees one key it does not."""
    problem = dataclasses.replace(call, rows=rows).problem(case.group_size)
    shards = chunk_ranges(rows, case.group_size, case.chunks_per_shard)
    splits = [split for shard in shards for split in shard]
    has_one_key = any(split.size == problem.visible_keys(split).keys.size == 1 for split in splits)
    return not has_one_key and cudnn_attention_unavailable_reason(problem, device) is None


def _is_on_tape(case: Case, call: UlyssesCall, pass_name: str, rows: int, device: torch.device) -> bool:
    """Whether cuDNN computes everything: but one query that sees one key, and statistics of rows that kernels cannot
    load; nor does a tape add up gradients of keys that several groups or ranks share."""
    problem = dataclasses.replace(call, rows=rows).problem(case.group_size)
    if rows == 1 or cudnn_attention_unavailable_reason(problem.attention(), device) is not None:
        return False
    if pass_name == "backward":
        is_shared_by_groups = problem.own_kv_heads == 1 and len(problem.head_groups(case.chunks_per_shard)) > 1
        return not is_shared_by_groups and problem.kv_heads % case.group_size == 0
    runs = [run for rank in range(case.group_size) for run in problem.kept_rows(rank) if run.size]
    seen = [problem.attention().visible_keys(run).keys.size for run in runs]
    has_one_key = any(run.size == keys == 1 for run, keys in zip(runs, seen, strict=True))
    return not has_one_key and not any(run.start % 4 for run in runs)


def make_cases(
    group_size: int, device_type: str, dtype: torch.dtype | None = None, transport: Backend = "auto"
) -> list[Case]:
    """All cases for a group (those of one dtype, if given) over `transport`, those of one configuration together.

    Exact cases keep every sum within the 256 integers that bfloat16 holds exactly: |x| <= 2, |weight|, |grad| <= 1.
    """
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    if device_type == "cpu":
        dtypes.insert(1, torch.float64)
    if dtype is not None:
        dtypes = [dtype]
    cases = [
        dataclasses.replace(case, transport=transport)
        for each in dtypes
        for case in (
            *_linear_cases(group_size, device_type, each),
            *_embedding_cases(group_size, each),
            *_attention_cases(group_size, each),
            *_ulysses_cases(group_size, each),
        )
    ]
    by_config: dict[OverlapConfig, list[Case]] = defaultdict(list)
    for case in cases:
        by_config[case.config()].append(case)
    return [case for same in by_config.values() for case in same]


def _linear_cases(group_size: int, device_type: str, dtype: torch.dtype) -> Iterator[Case]:
    variants = list(_linear_variants(group_size, device_type))
    ways: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"algorithm": algorithm, "chunks_per_shard": chunks}, variants)
        for algorithm, chunks in product(("ring", "direct"), (1, 2, 3))
    ]
    ways.append(({"backward_path": "bulk"}, variants))
    if group_size > 2:
        ways.append((_way("grouped"), variants))
    kept, asked_for = ({**variants[0], "variant": f"even, {what}"} for what in ("input kept", "sequential, asked for"))
    ways += [({"keep_gathered_input": True}, [kept]), (_way("sequential"), [asked_for])]
    for (way, chosen), op in product(ways, OPS):
        yield from _cases(LinearCall, chosen, [way], group_size, op=op, dtype=dtype)
    ways = [({"chunks_per_shard": chunks}, variants) for chunks in (1, 2, 3)]
    ways += [(_way("sequential"), [asked_for]), ({"path": "sequential", "backward_path": "async"}, [asked_for])]
    for (way, chosen), op in product(ways, ALL_REDUCES):
        yield from _cases(LinearCall, chosen, [way], group_size, op=op, dtype=dtype)


def _linear_variants(group_size: int, device_type: str) -> Iterator[dict[str, Any]]:
    # Features are bounded so that exact sums over all ranks are: 2 * K * group_size <= 256.
    K = max(2, min(16, 128 // group_size))
    N = max(8, K - 8) if K >= 8 else K
    even, few = 4 * group_size, (group_size,)
    plain = {"rows": even, "N": N, "K": K, "other_rows": few}
    yield {"variant": "even", **plain}
    yield {"variant": "even, random", **plain, "exact": False}
    yield {"variant": "uneven", **plain, "rows": 3 * group_size + 1}
    yield {"variant": "uneven, random", **plain, "rows": 4 * group_size - 1, "exact": False}
    yield {"variant": "one row", **plain, "rows": 1}
    yield {"variant": "S changes", **plain, "other_rows": (even + 1, *few, 2)}
    yield {"variant": "no bias", **plain, "has_bias": False}
    yield {"variant": "frozen weight", **plain, "needs": ("x", "bias")}
    yield {"variant": "input needs no gradient", **plain, "needs": ("weight", "bias")}
    yield {"variant": "odd output features", **plain, "N": max(1, N - 3)}
    yield {"variant": "odd input features", **plain, "K": max(1, K - 3)}
    for layout in ("x transposed", "x strided", "gradient expanded"):
        yield {"variant": layout, **plain, "layout": layout}
    rows, N, K = (64, 136, 200) if device_type == "cpu" else (512, 1280, 2048)
    larger = {"rows": rows * group_size, "batch": 1, "N": N, "K": K, "other_rows": few}
    yield {"variant": "larger, random", **larger, "exact": False}


def _embedding_cases(group_size: int, dtype: torch.dtype) -> Iterator[Case]:
    plain = {"rows": 4 * group_size, "N": 16, "other_rows": (group_size,)}
    variants = [
        {"variant": "even", **plain},
        {"variant": "uneven", **plain, "rows": 4 * group_size + 1},
        {"variant": "odd output features", **plain, "N": 13},
    ]
    ways: list[dict[str, Any]] = [
        {},
        {"algorithm": "ring", "chunks_per_shard": 2},
        {"chunks_per_shard": 2},
        {"backward_path": "bulk"},
    ]
    return _cases(EmbeddingCall, variants, ways, group_size, dtype=dtype)


def _attention_cases(group_size: int, dtype: torch.dtype) -> Iterator[Case]:
    variants = [
        *_attention_variants(group_size),
        {"variant": "window", "causal": False, "window": (3, 6)},
        {"variant": "one head per group", "kv_heads": 4},
        {"variant": "one group, no bias", "kv_heads": 1, "has_bias": False},
    ]
    variants = [{"N": 8 * number, "rows": 8 * group_size} | each for number, each in enumerate(variants, start=1)]
    backward = ((1, "query_split"), (2, "query_split"), (2, "row_parallel"))
    ways = [{**_way("query_split", splits), "backward_path": path} for splits, path in backward]
    return _cases(AttentionCall, variants, ways, group_size, dtype=dtype)


def _ulysses_cases(group_size: int, dtype: torch.dtype) -> Iterator[Case]:
    variants = [
        *_attention_variants(group_size),
        {"variant": "one key for all heads", "kv_heads": 1},
        {"variant": "as many keys as heads", "kv_heads": 4 * group_size},
        {"variant": "zigzag", "order": "zigzag"},
        {"variant": "zigzag, one key for all heads", "order": "zigzag", "kv_heads": 1},
    ]
    plain = {"heads": 4 * group_size, "kv_heads": 2 * group_size, "rows": 8 * group_size}
    variants = [{**plain, "head_dim": 8 * number} | each for number, each in enumerate(variants, start=1)]
    ways = [_way("overlapped", 1), _way("overlapped", 2), _way("sequential")]
    yield from _cases(UlyssesCall, variants, ways, group_size, dtype=dtype)
    names = ("zigzag", "one key for all heads", "causal", "uneven", "S changes", "one row")
    blocks = [{**each, "N": 24} for each in variants if each["variant"] in names]
    yield from _cases(BlockCall, blocks, ways, group_size, dtype=dtype, exact=False)


def _attention_variants(group_size: int) -> list[dict[str, Any]]:
    """Of both ways to split attention; callers give each sizes of its own, so that the report tells them apart."""
    even = 8 * group_size
    return [
        {"variant": "causal"},
        {"variant": "full", "causal": False},
        {"variant": "causal window", "window": (5, 0)},
        {"variant": "fused projection", "is_fused": True},
        {"variant": "uneven", "rows": even + 1},
        {"variant": "one row", "rows": 1},
        {"variant": "S changes", "other_rows": (even + 1, 4 * group_size, 2)},
    ]


def _way(path: str, chunks_per_shard: int = 1) -> dict[str, Any]:
    return {"path": path, "backward_path": path, "chunks_per_shard": chunks_per_shard}


def _cases(
    call: type[LinearCall | EmbeddingCall | AttentionCall | UlyssesCall],
    variants: Iterable[dict[str, Any]],
    ways: Iterable[dict[str, Any]],
    group_size: int,
    **common: Any,
) -> Iterator[Case]:
    """Every variant of a call on every way. A variant also says its name and, else 4 to a rank, S of further calls."""
    for way, given in product(ways, variants):
        special = dict(given)
        variant, other_rows = special.pop("variant"), special.pop("other_rows", (4 * group_size,))
        made = call(**common, **special)
        yield Case(variant=variant, call=made, other_rows=other_rows, group_size=group_size, **way)
