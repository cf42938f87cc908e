"""`commfuse doctor`: what this machine has, what will run on it, what will not, and why."""

import argparse

from rich.markup import escape
from rich.table import Table

from commfuse_megatron.cli.launch import is_speaker
from commfuse_megatron.cli.output import results, status, write_json
from commfuse_megatron.verify.machine import Machine, inspect_machine

__all__ = ["run_doctor"]


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the tables. 0: overlapped operations can run here; 1: a setting is wrong; 2: no transport can run here."""
    with status("looking at this machine"):
        machine = inspect_machine()
    if is_speaker():
        _print(machine)
        if arguments.json:
            write_json(arguments.json, machine.to_dict())
    transports = [ability for ability in machine.abilities if ability.name.endswith("transport")]
    if not any(ability.will_run for ability in transports):
        return 2
    return 1 if any(setting.is_wrong for setting in machine.settings) else 0


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
