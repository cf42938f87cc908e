"""The switches a user sets: command-line flags, plain attributes of a TransformerConfig, one environment variable.

Owns their names and how they are read. Megatron's configuration classes do not know our names, so everything is read
with `getattr`, and nothing but scalars is ever put on a Megatron configuration.
"""

import argparse
import reprlib
from pathlib import Path
from typing import Any

import torch

from commfuse_megatron.config import CONFIG_VARIABLE, OverlapConfig, config_file_from_environment
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import compat_training


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--commfuse` / `--no-commfuse` and `--commfuse-config FILE`; usable as Megatron's `extra_args_provider`.

    Help texts that the parser has and argparse cannot print are corrected: Megatron's `--help` works.
    """
    compat_training.make_help_printable(parser)
    group = parser.add_argument_group("commfuse", "tensor-parallel communication hidden under partial GEMMs")
    group.add_argument(
        "--commfuse",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="overlap in layers built through our specs; on unless --no-commfuse is given",
    )
    group.add_argument(
        "--commfuse-config",
        metavar="FILE",
        type=_file_of_a_config,
        default=None,
        help=f"YAML file with an OverlapConfig; without it, the one named by {CONFIG_VARIABLE}, else the defaults",
    )
    return parser


def _file_of_a_config(file: str) -> str:
    try:
        read_config(file)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return file


def set_flags(transformer_config: Any, arguments: argparse.Namespace) -> None:
    """Copy the flags that were given on the command line onto a TransformerConfig, as plain attributes."""
    for name in ("commfuse", "commfuse_config"):
        value = getattr(arguments, name, None)
        if value is not None:
            setattr(transformer_config, name, value)


def adopt_flags(transformer_config: Any) -> None:
    """Copy the flags of the command line that `megatron.training` has parsed, where it is in use."""
    given = compat_training.training_arguments()
    if given is not None:
        set_flags(transformer_config, given)


def is_switched_on(transformer_config: Any) -> bool:
    """Whether layers built with our classes overlap: unless `transformer_config.commfuse` is set to False.

    Raises ConfigError if it is neither.
    """
    flag = getattr(transformer_config, "commfuse", None)
    if flag not in (None, True, False):  # "false" would be true
        raise ConfigError(f"commfuse of the transformer configuration is True or False; got {flag!r}")
    return flag is None or bool(flag)


def config_file(transformer_config: Any) -> str | None:
    """The YAML file to read: `transformer_config.commfuse_config`, else the environment variable, else None."""
    file = getattr(transformer_config, "commfuse_config", None)
    return str(file) if file else config_file_from_environment()


def read_config(file: str | None) -> OverlapConfig:
    """The configuration in `file`, or the defaults without one. Raises ConfigError naming the file and the key."""
    return OverlapConfig() if file is None else OverlapConfig.from_file(file)


def checked_config(config: Any, caller: str) -> OverlapConfig | None:
    """`config`, read if it is the name of a file. Raises ConfigError for anything that is no configuration."""
    if config is None or isinstance(config, OverlapConfig):
        return config
    if isinstance(config, str | Path) and config:
        return OverlapConfig.from_file(config)
    found = f"a {type(config).__name__}"
    if isinstance(config, torch.nn.Module):
        found += "; a model is the first argument of convert_model"
    else:
        found += f": {reprlib.repr(config)}"
    if isinstance(config, dict):
        found += "; OverlapConfig.from_dict makes one of a dict"
    raise ConfigError(f"{caller} takes an OverlapConfig, the name of its YAML file, or None for the flags; got {found}")


def checked_model(model: Any, caller: str) -> list[torch.nn.Module]:
    """The chunks of `model`, one or a list of them. Raises ConfigError for anything that is no torch module."""
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    for chunk in chunks:
        if not isinstance(chunk, torch.nn.Module):
            hint = "; the configuration is the second argument" if isinstance(chunk, OverlapConfig) else ""
            raise ConfigError(f"{caller} takes a torch module or a list of them, got a {type(chunk).__name__}{hint}")
    return chunks
