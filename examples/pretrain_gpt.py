"""Megatron's own pretraining from the pip wheel, with the plugin as a flag; a GPT or, with a pattern, a hybrid model.

    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --cpu --commfuse --data-path text/stdlib --vocab-size 257 ...

Every flag of Megatron's works as in its own scripts; ours are `--commfuse`, `--commfuse-config`, `--loss-log`,
`--report` and `--cpu`. Without `--commfuse` (or `--spec` with one of our specs) this is stock Megatron.
`examples/README.md` has whole command lines: `prepare_text.py` makes the data, `compare_curves.py` draws the losses of
two runs.
"""

import argparse
import functools
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from commfuse_megatron.testing.pretraining import CPU_FLAGS, cpu_pretraining
from commfuse_megatron.tools.common.output import silence_foreign_warnings, why_file_cannot_be_written
from commfuse_megatron.tools.common.ranks import require_launcher


def main() -> None:
    """Train; with `--cpu` under the shims that let Megatron do so without a GPU."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        silence_foreign_warnings()
    else:
        require_launcher()
    with ExitStack() as stack:
        if "--cpu" in sys.argv[1:]:
            silence_foreign_warnings()
            sys.argv[1:1] = CPU_FLAGS
            stack.enter_context(cpu_pretraining())
        train()
        torch.distributed.destroy_process_group()


def train() -> list[Any]:
    """One training run, from the command line to the report; the model's chunks on this rank."""
    from megatron.training.arguments import parse_and_validate_args

    from commfuse_megatron.plugin import model_report, reset_contexts
    from commfuse_megatron.plugin.compat_training import set_scalar_writer
    from commfuse_megatron.plugin.pretraining import ScalarLog, pretrain

    arguments = parse_and_validate_args(
        extra_args_provider=add_script_arguments, args_defaults={"tokenizer_type": "NullTokenizer"}
    )
    for option in ("loss_log", "report"):
        file = getattr(arguments, option)
        reason = None if file is None else why_file_cannot_be_written(file)
        if reason is not None:
            raise SystemExit(f"pretrain_gpt.py: --{option.replace('_', '-')} {file}: {reason}")
    log = None
    # As with TensorBoard, the last rank logs: with pipeline parallelism it is the one that has the loss.
    if arguments.loss_log is not None and arguments.rank == arguments.world_size - 1:
        log = ScalarLog(arguments.loss_log, is_resumed=arguments.load is not None)
        set_scalar_writer(log)
    datasets.is_distributed = True  # type: ignore[attr-defined]  # Megatron's mark of functions that every rank calls
    chunks = pretrain(arguments, datasets, forward_step)
    if log is not None:
        log.close()
    report = model_report(chunks)
    if arguments.rank == 0:
        for line in report.lines():
            print(f"commfuse: {line}")
        if arguments.report is not None:
            Path(arguments.report).parent.mkdir(parents=True, exist_ok=True)
            Path(arguments.report).write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    reset_contexts()
    return chunks


def add_script_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The plugin's flags and this script's."""
    from commfuse_megatron.plugin import add_arguments

    group = add_arguments(parser).add_argument_group("pretrain_gpt.py")
    group.add_argument(
        "--loss-log", metavar="FILE", help="losses and gradient norms of every step as lines of JSON; folders are made"
    )
    group.add_argument("--report", metavar="FILE", help="what became of every linear, as JSON; folders are made")
    group.add_argument(
        "--cpu", action="store_true", help="train on CPU ranks over gloo; implies " + " ".join(CPU_FLAGS)
    )
    return parser


def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Training, validation and test set of `--data-path`, read by every rank."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training import get_args

    arguments = get_args()
    if not arguments.data_path:
        raise SystemExit("pretrain_gpt.py: name the data with --data-path; examples/prepare_text.py makes some")
    split = arguments.split
    for prefix in get_blend_from_list(arguments.data_path)[0]:
        require_documents(prefix, [float(part) for part in split.split(",")])
    config = GPTDatasetConfig(
        random_seed=arguments.seed,
        sequence_length=arguments.seq_length,
        blend=get_blend_from_list(arguments.data_path),
        split=split,
        path_to_cache=arguments.data_cache_path,
        tokenizer=build_tokenizer(arguments),
        reset_position_ids=arguments.reset_position_ids,
        reset_attention_mask=arguments.reset_attention_mask,
        eod_mask_loss=arguments.eod_mask_loss,
        create_attention_mask=arguments.create_attention_mask_in_dataloader,
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, num_samples, lambda: True, config).build()


def require_documents(prefix: str, weights: list[float]) -> None:
    """End with a message if a part of the split gets no document: Megatron would look for its tokens for ever."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not IndexedDataset.exists(prefix):
        raise SystemExit(f"pretrain_gpt.py: --data-path: {prefix}.bin and {prefix}.idx do not exist")
    num_documents = len(IndexedDataset(prefix).document_indices) - 1
    ends = [round(sum(weights[:number]) / sum(weights) * num_documents) for number in range(len(weights) + 1)]
    for weight, start, end in zip(weights, ends, ends[1:], strict=False):
        if weight and start == end:
            raise SystemExit(
                f"pretrain_gpt.py: --split {','.join(f'{w:g}' for w in weights)} leaves a part of the"
                f" {num_documents} documents of {prefix} empty; give it more weight, or 0"
            )


def forward_step(batches: Any, model: Any, return_schedule_plan: bool = False) -> tuple[torch.Tensor, Any]:
    """The loss of every token of the next batch, and how to sum it.

    All ranks of a tensor- or context-parallel group read the same batch themselves, so nothing is broadcast.
    """
    from commfuse_megatron.plugin.compat_training import rows_of_this_rank

    if return_schedule_plan:
        raise SystemExit("pretrain_gpt.py: --overlap-moe-expert-parallel-comm needs Megatron's own script")
    batch = next(batches)
    on_device = rows_of_this_rank(
        {
            name: batch[name].cuda(non_blocking=True) if name in batch else None
            for name in ("tokens", "position_ids", "attention_mask", "labels", "loss_mask")
        }
    )
    loss_mask = on_device.pop("loss_mask")
    losses = model(
        on_device["tokens"], on_device["position_ids"], on_device["attention_mask"], labels=on_device["labels"]
    )
    return losses, functools.partial(sum_losses, loss_mask)


def sum_losses(
    loss_mask: torch.Tensor, losses: torch.Tensor, model: Any = None
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses that count, how many they are, both for Megatron's log)."""
    mask = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * mask).sum()
    num_tokens = mask.sum().detach().to(torch.int)
    return total, num_tokens, {"lm loss": torch.stack([total.detach(), num_tokens.float()])}


if __name__ == "__main__":
    main()
