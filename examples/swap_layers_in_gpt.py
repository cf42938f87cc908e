"""A Megatron GPT that is already built, switched to overlapped linears; on CPU ranks.

    torchrun --nproc-per-node 2 examples/swap_layers_in_gpt.py

On GPUs the same two lines do it (`convert_model`, `model_report`), without `cpu_megatron`, which is what lets
unmodified Megatron run on a CPU.
"""

import argparse

import torch
from torch import distributed as dist

from commfuse_megatron.testing import cpu_megatron
from commfuse_megatron.tools.common.output import silence_foreign_warnings
from commfuse_megatron.tools.common.ranks import require_launcher


def main() -> None:
    """Build, convert, run, report."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    require_launcher()
    silence_foreign_warnings()
    dist.init_process_group("gloo")
    with cpu_megatron():
        from commfuse_megatron.plugin import convert_model, model_report, reset_contexts
        from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, tensor_parallel, transformer_config

        group_size = dist.get_world_size()
        with tensor_parallel(group_size):
            gpt = SmallGPT()
            model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
            tokens = torch.arange(2 * 65).view(2, 65) % gpt.vocab_size
            stock_loss = loss_of(model, tokens).item()

            convert_model(model)
            loss = loss_of(model, tokens)
            loss.backward()
            report = model_report(model)  # of every layer what became of it, and why
            if dist.get_rank() == 0:
                print(f"loss, stock {stock_loss:.6f}, overlapped {loss.item():.6f}")
                print(report)
            reset_contexts()  # while the group is there: below it is destroyed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
