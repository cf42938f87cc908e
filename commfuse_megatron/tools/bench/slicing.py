"""Data slicing, the classic overlap: cut M, and run the collective of one piece beside the GEMM of another.

    AG + GEMM   collective  [piece 0][piece 1][piece 2]...
                compute              [piece 0][piece 1][piece 2]     the first collective is exposed
    GEMM + RS   compute     [piece 0][piece 1][piece 2]
                collective           [piece 0][piece 1][piece 2]     the last one is: the tail

A piece holds the same rows of every rank's shard, so that its collective needs no other order. The GEMM of a piece is
one batched `torch.bmm` that reads or writes those rows where they lie: no copy on the way.
"""

from collections.abc import Callable

import torch
from torch import distributed as dist

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.tools.bench.operands import Work


def require_equal_pieces(shard_rows: int, num_pieces: int) -> None:
    """Raise UnsupportedError where the rows of a shard cannot be cut so."""
    if shard_rows % num_pieces:
        raise UnsupportedError(f"{shard_rows} rows of a shard cannot be cut into {num_pieces} equal pieces")


def linear(work: Work, num_pieces: int) -> Callable[[], object]:
    """Both passes of both linears in pieces of M."""
    require_equal_pieces(work.case.M // work.case.group_size, num_pieces)
    sliced = _Sliced(work, num_pieces)
    if work.pass_name == "fprop":
        return sliced.fprop_gather if work.case.gathers else sliced.fprop_scatter
    return sliced.backward_gather if work.case.gathers else sliced.backward_scatter


class _Sliced:
    def __init__(self, work: Work, num_pieces: int) -> None:
        self.group = work.group
        self.x, self.weight = work.operands.x.detach(), work.operands.weight.detach()
        self.grad_y, self.grad_full = work.operands.grad_y, work.operands.grad_full
        self.size = work.case.group_size
        self.num_pieces = num_pieces
        self.piece_rows = work.case.M // self.size // num_pieces

    def _by_piece(self, full: torch.Tensor) -> torch.Tensor:
        """[M, features] -> [pieces, ranks, rows, features], a view."""
        return full.view(self.size, self.num_pieces, self.piece_rows, -1).transpose(0, 1)

    def _gather_matmul(self, shard: torch.Tensor, b: torch.Tensor, full: torch.Tensor | None = None) -> torch.Tensor:
        """[M, N] = all-gather(shard [M_r, K]) @ b; the gathered rows in their order into `full`, if given."""
        pieces = shard.view(self.num_pieces, self.piece_rows, -1)
        targets = shard.new_empty(self.num_pieces, self.size * self.piece_rows, shard.size(-1))
        works = [
            dist.all_gather_into_tensor(target, source, group=self.group, async_op=True)
            for target, source in zip(targets, pieces, strict=True)
        ]
        arrived = targets.view(self.num_pieces, self.size, self.piece_rows, -1)
        out = shard.new_empty(self.size * shard.size(0), b.size(1))
        batched, outs = b.expand(self.size, *b.shape), self._by_piece(out)
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

    def fprop_gather(self) -> torch.Tensor:
        return self._gather_matmul(self.x.flatten(0, -2), self.weight.t()).unflatten(0, (-1, self.x.size(1)))

    def fprop_scatter(self) -> torch.Tensor:
        y, works = self._matmul_scatter(self.x.flatten(0, -2), self.weight.t())
        for work in works:
            work.wait()
        return y.unflatten(0, (-1, self.x.size(1)))

    def backward_gather(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather x again under dgrad, whose partials are scattered piece by piece; then wgrad beside the last one."""
        x = self.x.flatten(0, -2)
        x_full = x.new_empty(self.grad_full.size(0), x.size(1))
        regather = dist.all_gather_into_tensor(x_full, x, group=self.group, async_op=True)
        grad_x, works = self._matmul_scatter(self.grad_full, self.weight)
        regather.wait()
        grad_weight = self.grad_full.t() @ x_full
        for work in works:
            work.wait()
        return grad_x.view(self.x.shape), grad_weight

    def backward_scatter(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather dy piece by piece under dgrad; then wgrad."""
        shard = self.grad_y.flatten(0, -2)
        grad = shard.new_empty(self.size * shard.size(0), shard.size(1))
        grad_x = self._gather_matmul(shard, self.weight, grad)
        return grad_x.view(self.x.shape), grad.t() @ self.x.flatten(0, -2)
