"""Your own training, traced: what every rank computed and sent in one step, and how much was hidden; on CPU ranks.

    torchrun --nproc-per-node 2 examples/trace_a_step.py

Writes a trace for ui.perfetto.dev and, with matplotlib, a picture into trace_output/. Layers of the Megatron plugin
share their contexts: `trace.record(plugin.contexts.open_contexts)` records those.
"""

import argparse

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.runtime.meter import measure_calls, measure_overlap
from commfuse_megatron.tools import trace
from commfuse_megatron.tools.common.ranks import require_launcher

SEQUENCE, BATCH, HIDDEN, FFN = 480, 2, 256, 1152  # sequence and FFN are divisible by 2, 3, 4, 6 and 8 ranks
WARM_UP_STEPS = 2


def main() -> None:
    """Train a tensor-parallel MLP for a few steps and record the last one."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    require_launcher()
    dist.init_process_group("gloo")
    rank, group_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    x_shard_m = torch.randn(SEQUENCE // group_size, BATCH, HIDDEN)
    up = torch.randn(FFN // group_size, HIDDEN).div_(HIDDEN**0.5).requires_grad_()
    down = torch.randn(HIDDEN, FFN // group_size).div_(FFN**0.5).requires_grad_()
    optimizer = torch.optim.SGD([up, down], lr=0.1)

    with OverlapContext(dist.group.WORLD, OverlapConfig(record=True)) as context:

        def step() -> None:
            y = torch.relu(ops.all_gather_linear(x_shard_m, up, context=context))
            loss = ops.linear_reduce_scatter(y, down, context=context).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        for _ in range(WARM_UP_STEPS):
            step()
        with trace.record(context) as recording:
            step()

    if rank == 0:
        for number, intervals in recording.by_rank.items():
            whole = measure_overlap(intervals)
            print(
                f"rank {number}: {len(measure_calls(intervals))} operations, "
                f"transfers {whole.transfer_us / 1e3:.2f} ms, of which {whole.exposed_us / 1e3:.2f} ms exposed"
            )
        for file in trace.export(recording.by_rank, "trace_output", name="step", title="One step of an MLP"):
            print(f"wrote {file}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
