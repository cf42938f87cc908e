"""Run on every rank: `examples/pretrain_gpt.py` again and again in one process, since starting Megatron takes long."""

import functools
import importlib.util
import inspect
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.testing.pretraining import CPU_FLAGS, cpu_pretraining

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

# fmt: off
SIZES = [
    "--num-layers=2", "--hidden-size=32", "--ffn-hidden-size=64", "--num-attention-heads=4", "--swiglu",
    "--group-query-attention", "--num-query-groups=2", "--disable-bias-linear", "--normalization=RMSNorm",
    "--position-embedding-type=rope", "--untie-embeddings-and-output-weights", "--attention-dropout=0",
    "--hidden-dropout=0", "--seq-length=32", "--max-position-embeddings=32",
]
SCHEDULE = [
    "--tensor-model-parallel-size=2", "--sequence-parallel", "--micro-batch-size=2", "--global-batch-size=4",
    "--train-iters=2", "--lr=1e-3", "--lr-decay-style=constant", "--eval-iters=0", "--eval-interval=100",
    "--log-interval=100",
    "--vocab-size=257", "--split=95,5,0", "--make-vocab-size-divisible-by=2",
]
# fmt: on


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run. `script` is a function of this module that takes the example's place."""

    flags: list[str] = field(default_factory=list)
    variable: str | None = None
    script: str | None = None


def load_example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_all(group: dist.ProcessGroup, _: torch.device, folder: str, runs: dict[str, Run]) -> dict[str, Any]:
    """By name of the run: the lines of its loss log and this rank's report, as the script wrote them."""
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank()), str(group.size())
    os.environ["LOCAL_RANK"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "0", "1"
    warnings.simplefilter("ignore")
    # Megatron reads the help of every flag out of sources, again for every run.
    with cpu_pretraining(), mock.patch.object(inspect, "getsource", functools.cache(inspect.getsource)):
        from tests.megatron.models import plain_checkpoints

        with plain_checkpoints():
            return {name: _run(Path(folder), name, run) for name, run in runs.items()}


def _run(folder: Path, name: str, run: Run) -> dict[str, Any]:
    from megatron.training.training import destroy_global_state

    log, report = folder / f"{name}.jsonl", folder / f"{name}-{dist.get_rank()}.json"
    data = [f"--data-path={folder}/text", f"--data-cache-path={folder}/cache"]
    sys.argv = ["pretrain_gpt.py", *CPU_FLAGS, *SIZES, *SCHEDULE, *data, *run.flags]
    os.environ.pop("COMMFUSE_CONFIG", None)
    if run.variable is not None:
        os.environ["COMMFUSE_CONFIG"] = run.variable
    example = load_example("pretrain_gpt")
    try:
        if run.script is None:
            sys.argv += [f"--loss-log={log}"]
            chunks = example.train()
        else:
            chunks = globals()[run.script](example, log)
        from commfuse_megatron.plugin import model_report

        found = model_report(chunks).to_dict()
        report.write_text(json.dumps(found))
    finally:
        from commfuse_megatron.plugin import reset_contexts

        reset_contexts()
        destroy_global_state()
    dist.barrier()
    return {"steps": [json.loads(line) for line in log.read_text().splitlines()], **found}


def unmodified_script(example: ModuleType, log: Path) -> Any:
    """As Megatron's own scripts: it knows nothing of the plugin."""
    return _train(example, log)


def unmodified_script_that_refuses_the_last_flag(example: ModuleType, log: Path) -> Any:
    """And trains without it."""
    with pytest.raises(SystemExit, match="2"):
        unmodified_script(example, log)
    sys.argv.pop()
    return unmodified_script(example, log)


def script_with_our_flags(example: ModuleType, log: Path) -> Any:
    """As Megatron's own scripts with `add_arguments` passed on, which is all it knows of the plugin."""
    from commfuse_megatron.plugin import add_arguments

    return _train(example, log, add_arguments)


def script_that_sets_attributes(example: ModuleType, log: Path) -> Any:
    return _train(example, log, commfuse=True, commfuse_config=str(log.parent / "attribute.yaml"))


def script_that_switches_off(example: ModuleType, log: Path) -> Any:
    return _train(example, log, commfuse=False)


def _train(
    example: ModuleType, log: Path, extra_arguments: Callable[..., Any] | None = None, **attributes: Any
) -> list[Any]:
    """attributes: set on Megatron's configuration before the model is built."""
    from megatron.training.arguments import parse_and_validate_args

    from commfuse_megatron.plugin import compat_training
    from commfuse_megatron.plugin.pretraining import ScalarLog

    arguments = parse_and_validate_args(extra_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    writer = ScalarLog(log)
    compat_training.set_scalar_writer(writer if arguments.rank == arguments.world_size - 1 else None)
    compat_training.let_wheel_start()
    example.datasets.is_distributed = True
    config = compat_training.model_config_from_arguments(arguments)
    for name, value in attributes.items():
        setattr(config.transformer, name, value)
    chunks: list[Any] = []
    config.pre_wrap_hooks.append(lambda models: chunks.extend(models) or models)
    compat_training.pretrain(arguments, config, example.datasets, example.forward_step)
    writer.close()
    return chunks
