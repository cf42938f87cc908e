"""The gradient of a qkv projection that groups of heads give one after the other, and the weight's made of it.

Must not know what the heads are for, nor that anything travels.
"""

import torch

from commfuse_megatron.ops.qkv_rows import QkvRows, joined, put_blocks
from commfuse_megatron.ops.weight_grad import DeferredWeightGrad, WeightGrad, compute_weight_gradient, target_of
from commfuse_megatron.runtime.prepared import PreparedPass


class GradProjected:
    """The gradient of what the qkv projection gave, while groups add theirs: [M, rows of the weight].

    total: where weight gradients go. The weight's gradient is computed for all groups that are there when it is asked
    for: those that are there already cover the transfer of the last one.
    """

    def __init__(self, p: PreparedPass, rows: QkvRows, weight_grad: WeightGrad) -> None:
        self._p, self._rows, self._weight_grad = p, rows, weight_grad
        self.grad: torch.Tensor | None = None
        self._missing = set(range(len(rows.groups)))
        self._waiting: list[int] = []  # groups whose rows of the weight have no gradient yet
        self._total: torch.Tensor | None = None

    def put(self, number: int, grad: torch.Tensor) -> None:
        """Add that of a group: [M, features]."""
        self._waiting.append(number)
        self._missing.discard(number)
        if len(self._rows.groups) == 1:
            self.grad = grad.contiguous()
            return
        if self.grad is None:
            self.grad = grad.new_empty(grad.size(0), self._rows.num_rows)
        put_blocks(self.grad, self._rows.blocks[number], grad)

    def complete(self) -> torch.Tensor:
        """The gradient of all groups; those that were asked for none have zeros."""
        assert self.grad is not None
        for number in self._missing:
            for block in self._rows.blocks[number]:
                self.grad[:, block.start : block.stop].zero_()
        self._waiting += self._missing
        self._missing.clear()
        return self.grad

    def multiply(self, x: torch.Tensor) -> None:
        """Compute the weight's gradient of the groups that wait for it. x: [M, K]."""
        blocks = sorted(
            (block for number in self._waiting for block in self._rows.blocks[number]), key=lambda b: b.start
        )
        self._waiting.clear()
        assert self.grad is not None
        target, gemm = target_of(self._weight_grad), self._p.gemm
        if target is None and self._total is None:
            self._total = self.grad.new_empty(self._rows.num_rows, x.size(1))
        for block in joined(blocks):
            rows, factor = slice(block.start, block.stop), self.grad[:, block.start : block.stop].t()
            if target is not None:
                gemm.accumulate(factor, x, target.accumulate[rows])
            else:
                assert self._total is not None
                gemm.multiply(factor, x, self._total[rows])
            gemm.join()

    def finish(self, x: torch.Tensor) -> torch.Tensor | None:
        """The weight's gradient as autograd is given it, computed as far as it is not, or left to be computed later."""
        assert self.grad is not None
        if isinstance(self._weight_grad, DeferredWeightGrad):
            return compute_weight_gradient(self._p, self.grad, x, self._weight_grad)
        if self._waiting:
            self.multiply(x)
        target = target_of(self._weight_grad)
        return self._total if target is None else target.result()
