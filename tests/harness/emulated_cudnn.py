"""cuDNN's Python front end on the CPU: as much of it as attention needs, computing on raw addresses.

Graphs are built in the steps that the front end asks for, and compute what its manual says with what they are given:
the backward pass takes the probabilities from the statistics and the output, so wrong ones show. Everything is added
up in fp32. What it cannot show: what the real one refuses, and how long it takes.
"""

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from commfuse_megatron.kernels import attention_cudnn_backward
from tests.harness import emulated_gpu

__all__ = ["EmulatedCudnn", "Launch", "emulate_cudnn"]

_DTYPES = {"BFLOAT16": torch.bfloat16, "HALF": torch.float16, "FLOAT": torch.float32}
_STEPS = ("validate", "build_operation_graph", "create_execution_plans", "check_support", "build_plans")
_ALIGNMENT = 16
_GARBAGE = 0xFF  # NaN in every dtype


class Launch(NamedTuple):
    """What a graph computed: "forward" or "backward", its mask, how many queries and keys."""

    kind: str
    mask: str
    queries: int
    keys: int


def emulate_cudnn(monkeypatch: pytest.MonkeyPatch) -> "EmulatedCudnn":
    """Let `CudnnAttention` work on the CPU."""
    cudnn = EmulatedCudnn()
    monkeypatch.setitem(sys.modules, "cudnn", cudnn)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(attention_cudnn_backward, "bind_sum", emulated_gpu._bind_sum)
    return cudnn


class EmulatedCudnn(types.ModuleType):
    """The module.

    launches: of all graphs, in the order in which they ran. is_deterministic: of backward graphs, as they were built.
    refused: what it says not to support, for tests to fill; takes_stats_among_others: whether it writes the statistics
    of fewer rows than lie there.
    """

    data_type = types.SimpleNamespace(**{name: name for name in _DTYPES})
    heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")

    def __init__(self) -> None:
        super().__init__("cudnn")
        self.launches: list[Launch] = []
        self.is_deterministic: list[bool] = []
        self.refused: set[Launch] = set()
        self.takes_stats_among_others = True

    def create_handle(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(stream=None)

    def set_stream(self, handle: types.SimpleNamespace, stream: int) -> None:
        handle.stream = stream

    def pygraph(self, **arguments: Any) -> "_Graph":
        return _Graph(self, **arguments)


class _Tensor:
    """A tensor of a graph in the front end's order [B, H, S, D]."""

    def __init__(self, dim=None, stride=None, uid=None, data_type=None, name="") -> None:
        self.dim, self.stride, self.uid, self.data_type = dim, stride, uid, data_type
        self.is_output = False

    def __getattr__(self, name: str) -> Callable[[Any], "_Tensor"]:
        attribute = {"set_output": "is_output"}.get(name, name.removeprefix("set_"))
        if attribute == name or attribute not in vars(self):
            raise AttributeError(name)

        def set_attribute(value: Any) -> "_Tensor":
            setattr(self, attribute, value)
            return self

        return set_attribute

    def at(self, address: int) -> torch.Tensor:
        assert address % _ALIGNMENT == 0, f"tensor {self.uid} at {address:#x}"
        dtype = _DTYPES[self.data_type]
        count = sum((size - 1) * stride for size, stride in zip(self.dim, self.stride, strict=True)) + 1
        memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(self.dim, self.stride)


class _Graph:
    def __init__(
        self, cudnn: EmulatedCudnn, *, handle, io_data_type, intermediate_data_type, compute_data_type
    ) -> None:
        assert handle.stream is not None
        assert intermediate_data_type == compute_data_type == "FLOAT"
        self._cudnn = cudnn
        self._io_type = io_data_type
        self._tensors: dict[str, _Tensor] = {}
        self._compute: Callable[[dict[str, torch.Tensor]], None] | None = None
        self._launch: Launch | None = None
        self._steps: list[str] = []

    def tensor(self, *, dim, stride, uid, name, data_type=None) -> _Tensor:
        return _Tensor(dim, stride, uid, data_type or self._io_type, name)

    def sdpa(self, *, q, k, v, generate_stats, attn_scale, **masks) -> tuple[_Tensor, _Tensor]:
        assert generate_stats
        self._set("forward", q, k, **masks)
        out, stats = _Tensor(), _Tensor()
        self._tensors = {"q": q, "k": k, "v": v, "out": out, "stats": stats}

        def compute(given: dict[str, torch.Tensor]) -> None:
            scores = self._scores(given, attn_scale)
            logsumexp = scores.logsumexp(-1, keepdim=True)
            probabilities = (scores - logsumexp).exp().nan_to_num(0.0)  # of a query that sees nothing
            given["out"].copy_(probabilities @ _shared(given["v"], given["q"]))
            given["stats"].copy_(logsumexp)

        self._compute = compute
        return out, stats

    def sdpa_backward(
        self, *, q, k, v, o, dO, stats, attn_scale, use_deterministic_algorithm, **masks
    ) -> tuple[_Tensor, _Tensor, _Tensor]:
        self._cudnn.is_deterministic.append(use_deterministic_algorithm)
        self._set("backward", q, k, **masks)
        gradients = _Tensor(), _Tensor(), _Tensor()
        inputs = {"q": q, "k": k, "v": v, "out": o, "stats": stats, "grad_out": dO}
        self._tensors = inputs | dict(zip(("grad_q", "grad_k", "grad_v"), gradients, strict=True))

        def compute(given: dict[str, torch.Tensor]) -> None:
            probabilities = (self._scores(given, attn_scale) - given["stats"]).exp().nan_to_num(0.0)
            out, grad_out = given["out"].float(), given["grad_out"].float()
            delta = (out * grad_out).sum(-1, keepdim=True)
            grad_probabilities = grad_out @ _shared(given["v"], given["q"]).mT
            grad_scores = probabilities * (grad_probabilities - delta) * attn_scale
            given["grad_q"].copy_(grad_scores @ _shared(given["k"], given["q"]))
            for name, of_heads in (
                ("grad_k", grad_scores.mT @ given["q"].float()),
                ("grad_v", probabilities.mT @ grad_out),
            ):
                given[name].copy_(of_heads.unflatten(1, (given["k"].size(1), -1)).sum(2))

        self._compute = compute
        return gradients

    def _set(
        self, kind: str, q: _Tensor, k: _Tensor, *, use_causal_mask=False, use_causal_mask_bottom_right=False
    ) -> None:
        assert not (use_causal_mask and use_causal_mask_bottom_right)
        queries, keys = q.dim[2], k.dim[2]
        assert (queries, keys) != (1, 1), "refused: one query that sees one key"
        mask = "top left" if use_causal_mask else "bottom right" if use_causal_mask_bottom_right else "none"
        self._launch = Launch(kind, mask, queries, keys)

    def _scores(self, given: dict[str, torch.Tensor], scale: float) -> torch.Tensor:
        """[B, H, S_q, S_k], -inf where it is hidden."""
        scores = given["q"].float() @ _shared(given["k"], given["q"]).mT * scale
        assert self._launch is not None
        _, mask, queries, keys = self._launch
        if mask == "none":
            return scores
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries if mask == "bottom right" else 0)
        return scores.masked_fill(~seen, float("-inf"))

    def __getattr__(self, step: str) -> Callable[..., None]:
        if step not in _STEPS:
            raise AttributeError(step)

        def take(*arguments: Any) -> None:
            assert step == _STEPS[len(self._steps)], f"{step} after {self._steps}"
            if step == "validate":
                self._check()
            if step == "check_support" and self._launch in self._cudnn.refused:
                raise RuntimeError(f"{self._launch} is not supported")
            if step == "check_support" and not self._cudnn.takes_stats_among_others:
                stats = self._tensors["stats"]
                if stats.stride[1] != stats.dim[2]:
                    raise RuntimeError("statistics must be packed")
            self._steps.append(step)

        return take

    def _check(self) -> None:
        uids = [tensor.uid for tensor in self._tensors.values()]
        assert None not in uids, "a tensor without a number"
        assert len(set(uids)) == len(uids)
        for name, tensor in self._tensors.items():
            assert tensor.stride[3] == 1, name
            assert all(stride % 8 == 0 for stride in tensor.stride[:3]) or name == "stats", name
            assert tensor.is_output == (name.startswith("grad_") and name != "grad_out") or name in ("out", "stats")
        sizes = {name: tensor.dim for name, tensor in self._tensors.items()}
        batch, heads, queries, head_dim = sizes["q"]
        _, kv_heads, keys, value_dim = sizes["v"]
        assert heads % kv_heads == 0
        wanted = {
            "q": (batch, heads, queries, head_dim), "k": (batch, kv_heads, keys, head_dim),
            "v": (batch, kv_heads, keys, value_dim), "out": (batch, heads, queries, value_dim),
            "stats": (batch, heads, queries, 1),
        }  # fmt: skip
        for name, dim in sizes.items():
            assert tuple(dim) == wanted[name.removeprefix("grad_")], name

    def get_workspace_size(self) -> int:
        assert len(self._steps) == len(_STEPS)
        assert self._launch is not None
        return 1000 + self._launch.queries  # of no alignment

    def execute(self, pack: Mapping[int, int], workspace_at: int, *, handle: types.SimpleNamespace) -> None:
        size_bytes = self.get_workspace_size()
        assert workspace_at % _ALIGNMENT == 0
        views = {name: tensor.at(pack[tensor.uid]) for name, tensor in self._tensors.items()}
        assert len(views) == len(pack)

        def run() -> None:
            assert self._compute is not None
            assert self._launch is not None
            self._compute(views)
            ctypes.memset(workspace_at, _GARBAGE, size_bytes)
            self._cudnn.launches.append(self._launch)

        emulated_gpu._submit(handle.stream, run)


def _shared(of_keys: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values of every query head, in fp32: heads that share them are side by side."""
    return of_keys.float().repeat_interleave(q.size(1) // of_keys.size(1), dim=1)
