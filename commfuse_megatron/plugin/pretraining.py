"""Megatron's own training program, from the pip wheel, with the plugin as a flag.

    arguments = parse_and_validate_args(extra_args_provider=add_arguments)
    chunks = pretrain(arguments, datasets, forward_step)

Nothing of the loop is ours: model configuration, builder, optimizer, checkpoints and logging are Megatron's. What is
added: the flags reach the TransformerConfig, `--commfuse` alone puts our layers in, and the wheel starts.
"""

import inspect
import json
from pathlib import Path
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import arguments as flags
from commfuse_megatron.plugin import compat_training
from commfuse_megatron.plugin.convert import convert_model
from commfuse_megatron.plugin.hybrid_spec import hybrid_stack_spec
from commfuse_megatron.plugin.spec import gpt_layer_spec


def pretrain(arguments: Any, datasets: Any, forward_step: Any) -> list[Any]:
    """Train as the command line says; the model's chunks on this rank, for `model_report`.

    `--commfuse` overlaps every linear that can be: through our spec unless `--spec` names one, and through
    `convert_model` what specs do not reach. `--spec` with one of our specs does without the latter. Without either, or
    with `--no-commfuse`, the model is stock. `--hybrid-layer-pattern` makes it a HybridModel.

    Args:
        arguments: from Megatron's `parse_and_validate_args`.
        datasets, forward_step: what Megatron's `pretrain` takes under these names.

    Raises ConfigError for `--commfuse-config` where neither `--commfuse` nor `--spec` is given.
    """
    file, is_asked_for = getattr(arguments, "commfuse_config", None), getattr(arguments, "commfuse", None)
    if file is not None and is_asked_for is None and arguments.spec is None:
        raise ConfigError(
            f"--commfuse-config {file} is given, and nothing puts our layers in, so it would not be read: add "
            "--commfuse, name one of our specs by --spec, or leave it out"
        )
    compat_training.let_wheel_start()
    model_config = compat_training.model_config_from_arguments(arguments)
    flags.set_flags(model_config.transformer, arguments)
    if arguments.hybrid_layer_pattern is not None:
        if arguments.spec is None and is_asked_for:
            model_config.hybrid_stack_spec = hybrid_stack_spec
        if inspect.isfunction(model_config.hybrid_stack_spec):  # which Megatron calls for GPT only
            model_config.hybrid_stack_spec = model_config.hybrid_stack_spec(model_config)
    elif arguments.spec is None and is_asked_for:
        model_config.transformer_layer_spec = gpt_layer_spec
    chunks: list[Any] = []

    def take_over(models: list[Any]) -> list[Any]:
        if is_asked_for:
            convert_model(models)
        chunks.extend(models)
        return models

    model_config.pre_wrap_hooks.append(take_over)
    compat_training.pretrain(arguments, model_config, datasets, forward_step)
    return chunks


class ScalarLog:
    """Losses and norms of every step as lines of JSON; Megatron takes it for TensorBoard's writer.

    One line per step, `{"step": 1, "lm loss": 5.54, "grad-norm": 3.2, ...}`, written when the next step begins.

    Args:
        file: made with its folder.
        is_resumed: keep what the file has, for a run that goes on from a checkpoint.
    """

    def __init__(self, file: str | Path, *, is_resumed: bool = False) -> None:
        path = Path(file)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a" if is_resumed else "w", encoding="utf-8")
        self._line: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        """Remember one number of `step`; values against samples instead of steps are left out."""
        if name.endswith(" vs samples"):
            return
        if self._line.get("step", step) != step:
            self.flush()
        self._line |= {"step": step, name: float(value)}

    def add_text(self, *_: Any, **__: Any) -> None:
        """Nothing: Megatron writes the command line here."""

    def flush(self) -> None:
        """Write the step that is complete or, at the end, as far as it came."""
        if self._line:
            self._file.write(json.dumps(self._line) + "\n")
            self._file.flush()
            self._line = {}

    def close(self) -> None:
        """Write the last step and close the file."""
        self.flush()
        self._file.close()
