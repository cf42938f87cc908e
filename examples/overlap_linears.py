"""A tensor-parallel MLP out of the two overlapped linears, in plain PyTorch, on CPU ranks; no Megatron.

    torchrun --nproc-per-node 2 examples/overlap_linears.py

Shows the shapes, the report, and that output and gradients equal the sequential program's.
"""

import argparse

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.tools.common.ranks import require_launcher

SEQUENCE, BATCH, HIDDEN, FFN = 96, 2, 128, 576  # sequence and FFN are divisible by 2, 3, 4, 6 and 8 ranks


def mlp(x_shard_m: torch.Tensor, up: torch.Tensor, down: torch.Tensor, first, second) -> torch.Tensor:
    """[S/R, B, H] -> [S/R, B, H]; `first` gathers the sequence, `second` sums over ranks and scatters it again."""
    return second(torch.relu(first(x_shard_m, up)), down)


def main() -> None:
    """Run the MLP both ways on this rank and compare."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    require_launcher()
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    rank, group_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # every rank has its own rows of x and its own part of the weights
    x_shard_m = torch.randn(SEQUENCE // group_size, BATCH, HIDDEN, requires_grad=True)
    # Weights of 1 / sqrt(inputs) keep outputs near 1, where fp32 sums in another order still agree to 1e-5.
    up = torch.randn(FFN // group_size, HIDDEN).div_(HIDDEN**0.5).requires_grad_()
    down = torch.randn(HIDDEN, FFN // group_size).div_(FFN**0.5).requires_grad_()
    leaves = (x_shard_m, up, down)

    with OverlapContext(group, OverlapConfig()) as context:
        y_shard_m = mlp(
            *leaves,
            lambda x, w: ops.all_gather_linear(x, w, context=context),
            lambda x, w: ops.linear_reduce_scatter(x, w, context=context),
        )
        grads = torch.autograd.grad(y_shard_m.square().mean(), leaves)
        report = context.report()

    expected = mlp(
        *leaves,
        lambda x, w: ops.reference.all_gather_linear(x, w, group=group),
        lambda x, w: ops.reference.linear_reduce_scatter(x, w, group=group),
    )
    expected_grads = torch.autograd.grad(expected.square().mean(), leaves)
    torch.testing.assert_close(y_shard_m, expected)
    torch.testing.assert_close(grads, expected_grads)
    if rank == 0:
        print(f"output {list(y_shard_m.shape)} per rank; output and gradients equal the sequential program's")
        for record in report:
            print(record)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
