"""`commfuse doctor`: what this machine has, what will run on it, what will not, and why."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.markup import escape

from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.candidates import buffer_needs, merge_needs
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.common.cases import CASE_NAMES, linear_case
from commfuse_megatron.tools.common.output import make_table, results, status, write_json
from commfuse_megatron.tools.common.ranks import is_speaker

if TYPE_CHECKING:
    from commfuse_megatron.tools.doctor.machine import Machine

SUMMARY = "show versions, GPUs and links, what will run here and what not, and why"
EXAMPLE = "commfuse doctor --json doctor.json"

# Tokens of a sequence (times batch) that the buffers are worked out for.
_TOKENS = 8192


def add_options(parser: argparse.ArgumentParser) -> None:
    """`commfuse doctor` takes none of its own."""


def run(arguments: argparse.Namespace) -> int:
    """Print the tables. 0: overlapped operations can run here; 2: no transport can.

    A wrong setting, which every other command would refuse, is said before the tables, and when all is printed and
    written raises ConfigError.
    """
    from commfuse_megatron.tools.doctor.machine import inspect_machine

    with status("looking at this machine"):
        machine = inspect_machine()
    wrong = [f"{setting.name} is wrong: {setting.meaning}" for setting in machine.settings if setting.is_wrong]
    if is_speaker():
        if arguments.json:
            write_json(arguments.json, machine.to_dict() | {"buffers": _buffers(_group_size(machine))})
        for each in wrong:
            results().print(f"[red]{escape(each)}[/]\n")
        _print(machine)
    if wrong:
        raise ConfigError("; ".join(wrong))
    transports = [ability for ability in machine.abilities if ability.name.endswith("transport")]
    return 0 if any(ability.will_run for ability in transports) else 2


def _print(machine: Machine) -> None:
    console = results()
    versions = [(name, version or "[yellow]none[/]") for name, version in machine.versions.items()]
    console.print(make_table("versions", ("what", "version"), versions))
    if machine.gpus:
        gpus = [
            (str(gpu.index), gpu.name, f"{gpu.memory_gib:.1f}", str(gpu.multiprocessors), gpu.compute_capability)
            for gpu in machine.gpus
        ]
        console.print(make_table("GPUs", ("index", "name", "memory GiB", "SMs", "capability"), gpus))
        links = [
            (f"{link.first} - {link.second}", link.kind, str(link.nvlinks), "yes" if link.can_access_peer else "no")
            for link in machine.links
        ]
        if links:
            console.print(make_table("links", ("pair", "kind", "NVLinks", "peer access"), links))
    else:
        console.print("GPUs: none that PyTorch can use\n")
    abilities = [
        (each.name, each.needs, "[green]yes[/]" if each.will_run else "[yellow]no[/]", escape(each.missing or ""))
        for each in machine.abilities
    ]
    console.print(make_table("what will run", ("what", "for", "here", "why not"), abilities))
    settings = [
        (
            each.name,
            "unset" if each.value is None else escape(each.value),
            ("[red]wrong:[/] " if each.is_wrong else "") + escape(each.meaning),
        )
        for each in machine.settings
    ]
    console.print(make_table("environment", ("variable", "value", "meaning"), settings))
    _print_buffers(_group_size(machine))


def _group_size(machine: Machine) -> int:
    return max(2, len(machine.gpus))


def _buffers(group_size: int) -> dict[str, float]:
    """MiB on one rank by model: what one context's buffers grow to when all linears of that model are sliced."""
    needs: dict[str, dict[str, int]] = {}
    for name in CASE_NAMES:
        if name.startswith("paper"):  # its tokens are given
            continue
        try:
            case = linear_case(name, _TOKENS, group_size)
        except ConfigError:  # sizes that so many ranks do not divide
            continue
        for pass_name, needed in (("fprop", ""), ("backward", "input+weight")):
            problem = GemmProblem(case.op, pass_name, _TOKENS, 1, case.N, case.K, "bfloat16", group_size, needs=needed)
            plan = PassPlan("sliced", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
            model = name.split(".")[0]
            needs[model] = merge_needs(needs.get(model, {}), buffer_needs(problem, plan))
    return {model: round(sum(parts.values()) / 2**20, 1) for model, parts in needs.items()}


def _print_buffers(group_size: int) -> None:
    try:
        file = config_file_from_environment()
        config = OverlapConfig() if file is None else OverlapConfig.from_file(file)
    except ConfigError:  # said above, among the settings
        config = OverlapConfig()
    limit_mib = config.transport.max_buffer_mib
    rows = [
        (
            model,
            str(group_size),
            str(_TOKENS),
            f"{size_mib:.0f}",
            "yes" if size_mib <= limit_mib else "no: what does not fit runs sequentially",
        )
        for model, size_mib in _buffers(group_size).items()
    ]
    columns = ("model", "ranks", "tokens", "MiB", f"within max_buffer_mib {limit_mib}")
    results().print(make_table("buffers of one context on one rank", columns, rows))
