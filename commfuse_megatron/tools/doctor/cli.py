"""`commfuse doctor`: what this machine has, what will run on it, what will not, and why."""

import argparse

from rich.markup import escape

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.tools.common.output import results, status, write_json
from commfuse_megatron.tools.common.ranks import is_speaker

SUMMARY = "show versions, GPUs and links, what will run here and what not, and why"
EXAMPLE = "commfuse doctor --json doctor.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """`commfuse doctor` takes none of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the tables. 0: overlapped operations can run here; 2: no transport can.

    A wrong setting, which every other command would refuse, is said before the tables, and when all is printed and
    written raises ConfigError.
    """
    with status("looking at this machine"):
        from commfuse_megatron.tools.doctor.machine import inspect_machine
        from commfuse_megatron.tools.doctor.report import buffers_of, show

        machine = inspect_machine()
    wrong = [f"{setting.name} is wrong: {setting.meaning}" for setting in machine.settings if setting.is_wrong]
    if is_speaker():
        buffers_mib = buffers_of(machine)
        if arguments.json:
            write_json(arguments.json, machine.to_dict() | {"buffers": buffers_mib})
        for each in wrong:
            results().print(f"[red]{escape(each)}[/]\n")
        show(machine, buffers_mib)
    if wrong:
        raise ConfigError("; ".join(wrong))
    transports = [ability for ability in machine.abilities if ability.name.endswith("transport")]
    return 0 if any(ability.will_run for ability in transports) else 2
