"""Writes `docs/configuration.md` from the docstrings of `commfuse_megatron/config.py`.

python docs/make_configuration.py
"""

import dataclasses
import inspect
import json
import re
import types
import typing
from pathlib import Path

from commfuse_megatron.config import OverlapConfig

FILE = Path(__file__).parent / "configuration.md"

HEAD = """\
# Configuration

Made from the docstrings of `commfuse_megatron/config.py` by `python docs/make_configuration.py`; change those.

A configuration is a YAML file, or an `OverlapConfig` in a program. A layer takes the first of these that there is:

1. what `apply_to_spec(spec, config)` or `convert_model(model, config)` was given: an `OverlapConfig` or a file;
2. `transformer_config.commfuse_config`, which `--commfuse-config FILE` sets in scripts that pass `add_arguments`;
3. the file that the environment variable `COMMFUSE_CONFIG` names, the only one that this package has;
4. the defaults below, which are those of `configs/default.yaml`.

Every rank of a group must bring an equal configuration: they are compared before anything is sent. What a file leaves
out keeps its default, and an unknown key is an error with the nearest known one. `--no-commfuse`, or
`config.commfuse = False` on a TransformerConfig, switches all layers to Megatron's own path. Files for some machines
are in [configs](../configs/README.md). Most users need none.

    linear:
      fprop: {path: sliced, chunks_per_shard: 2}
    transport: {backend: nccl, timeout_s: 120}
    plan: {file: plans.json}
"""


def write_page() -> str:
    """The whole page: keys of the top level last, since most are parts."""
    return "\n".join([HEAD, *_sections(OverlapConfig, "")])


def _sections(config: type, prefix: str) -> list[str]:
    hints = typing.get_type_hints(config)
    parts = {field.name for field in dataclasses.fields(config) if dataclasses.is_dataclass(hints[field.name])}
    found: list[str] = []
    done: dict[type, list[str]] = {}
    for name in (field.name for field in dataclasses.fields(config) if field.name in parts):
        done.setdefault(hints[name], []).append(f"{prefix}{name}")
    for part, names in done.items():
        found += [f"## {' and '.join(f'`{name}`' for name in names)}", "", *_options(part)]
        found += _sections(part, f"{names[0]}.")
    if not prefix:
        found += ["## Top level", "", *_options(config)]
    return found


def _options(config: type) -> list[str]:
    """What the class says of itself, then one item per option."""
    names = [field.name for field in dataclasses.fields(config)]
    text = inspect.cleandoc(config.__doc__ or "")
    pieces = re.split(rf"(?:^|(?<=\s))({'|'.join(names)}): ", text)
    intro, said = pieces[0], dict(zip(pieces[1::2], pieces[2::2], strict=True))
    hints = typing.get_type_hints(config)
    lines = [_one_line(intro.replace(" See the classes of the parts.", "")), ""]
    items = [
        f"- **`{field.name}`** ({_values(hints[field.name])}; default `{_default(field)}`):"
        f" {_one_line(said[field.name])}"
        for field in dataclasses.fields(config)
        if not dataclasses.is_dataclass(hints[field.name])
    ]
    return [*lines, *items, ""] if items else lines


def _values(hint: typing.Any) -> str:
    """What YAML may say."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(hint))
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    words = {bool: "true or false", int: "integer", float: "number", str: "text", types.NoneType: "null"}
    return " or ".join(words[each] for each in allowed)


def _default(field: "dataclasses.Field[typing.Any]") -> str:
    return field.default if isinstance(field.default, str) else json.dumps(field.default)


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    FILE.write_text(write_page(), encoding="utf-8")
