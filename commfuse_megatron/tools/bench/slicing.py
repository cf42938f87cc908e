"""Data slicing, the classic overlap: cut M, and run the collective of one piece beside the GEMM of another.

    AG + GEMM   collective  [piece 0][piece 1][piece 2]...
                compute              [piece 0][piece 1][piece 2]     the first collective is exposed
    GEMM + RS   compute     [piece 0][piece 1][piece 2]
                collective           [piece 0][piece 1][piece 2]     the last one is: the tail

A piece holds the same rows of every rank's shard, so that its collective needs no other order. The GEMM of a piece is
one batched `torch.bmm` that reads or writes those rows where they lie: no copy on the way.
"""

from typing import override

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work
from commfuse_megatron.tools.bench.variant import Ready, Results, Variant, collective_name


class DataSlicing(Variant):
    """Both passes of both linears in `num_pieces` pieces of M."""

    def __init__(self, num_pieces: int) -> None:
        self.name = f"slicing C={num_pieces}"
        self._num_pieces = num_pieces

    @override
    def build(self, work: Work) -> Ready:
        case = work.case
        shard_rows = case.M // case.group_size
        if shard_rows % self._num_pieces:
            raise UnsupportedError(f"{shard_rows} rows of a shard cannot be cut into {self._num_pieces} equal pieces")
        sliced = _Sliced(work, self._num_pieces)
        if work.pass_name == "fprop":
            call = sliced.fprop_gather if case.gathers else sliced.fprop_scatter
        else:
            call = sliced.backward_gather if case.gathers else sliced.backward_scatter
        return Ready(
            call=call,
            results=call,
            path="slicing",
            transport=collective_name(work.pool.device),
            chunks_per_shard=self._num_pieces,
        )


class _Sliced:
    def __init__(self, work: Work, num_pieces: int) -> None:
        self.group = work.group
        self.operands = work.operands
        self.x = work.operands.x.detach()
        self.weight = work.operands.weight.detach()
        self.size = work.case.group_size
        self.num_pieces = num_pieces
        self.piece_rows = work.case.M // self.size // num_pieces

    def _by_piece(self, full: torch.Tensor) -> torch.Tensor:
        """[M, features] -> [pieces, ranks, rows, features], a view."""
        return full.view(self.size, self.num_pieces, self.piece_rows, -1).transpose(0, 1)

    def _gather_pieces(self, shard: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """Start the collectives of all pieces of `shard` [M_r, features]; [pieces, ranks, rows, features]."""
        pieces = shard.view(self.num_pieces, self.piece_rows, -1)
        arrived = shard.new_empty(self.num_pieces, self.size * self.piece_rows, shard.size(-1))
        works = [
            dist.all_gather_into_tensor(target, source, group=self.group, async_op=True)
            for target, source in zip(arrived, pieces, strict=True)
        ]
        return arrived.view(self.num_pieces, self.size, self.piece_rows, -1), works

    def _gather_matmul(self, shard: torch.Tensor, b: torch.Tensor, full: torch.Tensor | None = None) -> torch.Tensor:
        """[M, N] = all-gather(shard) @ b; the gathered rows in their order into `full`, if given."""
        arrived, works = self._gather_pieces(shard)
        out = shard.new_empty(self.size * shard.size(0), b.size(1))
        batched = b.expand(self.size, *b.shape)
        outs = self._by_piece(out)
        fulls = None if full is None else self._by_piece(full)
        for piece, work in enumerate(works):
            work.wait()
            torch.bmm(arrived[piece], batched, out=outs[piece])
            if fulls is not None:
                fulls[piece].copy_(arrived[piece])
        return out

    def _matmul_scatter(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, list[dist.Work]]:
        """[M_r, N] = reduce-scatter(a @ b), complete once the works are waited for."""
        out = a.new_empty(self.num_pieces, self.piece_rows, b.size(1))
        batched = b.expand(self.size, *b.shape)
        works = []
        for piece, rows in enumerate(self._by_piece(a)):
            partial = torch.bmm(rows, batched).flatten(0, 1)
            works.append(dist.reduce_scatter_tensor(out[piece], partial, group=self.group, async_op=True))
        return out.flatten(0, 1), works

    def fprop_gather(self) -> Results:
        y = self._gather_matmul(self.x.flatten(0, -2), self.weight.t())
        return {"y": y.view(-1, self.x.size(1), y.size(-1))}

    def fprop_scatter(self) -> Results:
        y, works = self._matmul_scatter(self.x.flatten(0, -2), self.weight.t())
        for work in works:
            work.wait()
        return {"y": y.view(-1, self.x.size(1), y.size(-1))}

    def backward_gather(self) -> Results:
        """Gather x again under dgrad, whose partials are scattered piece by piece; then wgrad beside the last one."""
        grad = self.operands.grad_full
        x = self.x.flatten(0, -2)
        x_full = x.new_empty(grad.size(0), x.size(1))
        regather = dist.all_gather_into_tensor(x_full, x, group=self.group, async_op=True)
        grad_x, works = self._matmul_scatter(grad, self.weight)
        regather.wait()
        grad_weight = grad.t() @ x_full
        for work in works:
            work.wait()
        return {"x.grad": grad_x.view(self.x.shape), "weight.grad": grad_weight}

    def backward_scatter(self) -> Results:
        """Gather dy piece by piece under dgrad; then wgrad."""
        shard = self.operands.grad_y.flatten(0, -2)
        grad = shard.new_empty(self.size * shard.size(0), shard.size(1))
        grad_x = self._gather_matmul(shard, self.weight, grad)
        grad_weight = grad.t() @ self.x.flatten(0, -2)
        return {"x.grad": grad_x.view(self.x.shape), "weight.grad": grad_weight}
