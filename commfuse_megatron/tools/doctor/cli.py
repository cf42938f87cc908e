"""`commfuse doctor`: what this machine has, what will run on it, what will not, and why."""

import argparse

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.candidates import buffer_needs, merge_needs
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import GemmProblem
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.common.cases import CASE_NAMES, linear_case
from commfuse_megatron.tools.common.output import results, status, write_json
from commfuse_megatron.tools.common.ranks import is_speaker
from commfuse_megatron.tools.doctor.machine import Machine, inspect_machine

# Tokens of a sequence (times batch) that the buffers are worked out for.
_TOKENS = 8192


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the tables. 0: overlapped operations can run here; 2: no transport can.

    Raises ConfigError, when all is printed and written, if a setting is wrong: every other command would refuse it.
    """
    with status("looking at this machine"):
        machine = inspect_machine()
    if is_speaker():
        if arguments.json:
            write_json(arguments.json, machine.to_dict() | {"buffers": _buffers(_group_size(machine))})
        _print(machine)
    wrong = [f"{setting.name} is wrong: {setting.meaning}" for setting in machine.settings if setting.is_wrong]
    if wrong:
        raise ConfigError("; ".join(wrong))
    transports = [ability for ability in machine.abilities if ability.name.endswith("transport")]
    return 0 if any(ability.will_run for ability in transports) else 2


def _print(machine: Machine) -> None:
    console = results()
    versions = Table(title="versions", title_justify="left")
    versions.add_column("what")
    versions.add_column("version")
    for name, version in machine.versions.items():
        versions.add_row(name, version or "[yellow]none[/]")
    console.print(versions)
    if machine.gpus:
        _print_gpus(machine)
    else:
        console.print("GPUs: none that PyTorch can use\n")
    abilities = Table(title="what will run", title_justify="left")
    for column in ("what", "for", "here", "why not"):
        abilities.add_column(column)
    for ability in machine.abilities:
        verdict = "[green]yes[/]" if ability.will_run else "[yellow]no[/]"
        abilities.add_row(ability.name, ability.needs, verdict, escape(ability.missing or ""))
    console.print(abilities)
    settings = Table(title="environment", title_justify="left")
    for column in ("variable", "value", "meaning"):
        settings.add_column(column)
    for setting in machine.settings:
        meaning = ("[red]wrong:[/] " if setting.is_wrong else "") + escape(setting.meaning)
        settings.add_row(setting.name, "unset" if setting.value is None else escape(setting.value), meaning)
    console.print(settings)
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
    table = Table(title="buffers of one context on one rank", title_justify="left")
    for column in ("model", "ranks", "tokens", "MiB", f"within max_buffer_mib {limit_mib}"):
        table.add_column(column)
    for model, size_mib in _buffers(group_size).items():
        verdict = "yes" if size_mib <= limit_mib else "no: what does not fit runs sequentially"
        table.add_row(model, str(group_size), str(_TOKENS), f"{size_mib:.0f}", verdict)
    results().print(table)


def _print_gpus(machine: Machine) -> None:
    console = results()
    gpus = Table(title="GPUs", title_justify="left")
    for column in ("index", "name", "memory GiB", "SMs", "capability"):
        gpus.add_column(column)
    for gpu in machine.gpus:
        gpus.add_row(
            str(gpu.index), gpu.name, f"{gpu.memory_gib:.1f}", str(gpu.multiprocessors), gpu.compute_capability
        )
    console.print(gpus)
    links = Table(title="links", title_justify="left")
    for column in ("pair", "kind", "NVLinks", "peer access"):
        links.add_column(column)
    for link in machine.links:
        access = "yes" if link.can_access_peer else "no"
        links.add_row(f"{link.first} - {link.second}", link.kind, str(link.nvlinks), access)
    if machine.links:
        console.print(links)
