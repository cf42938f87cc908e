"""What `commfuse doctor` prints, and how large the buffers are that known models need."""

from rich.markup import escape

from commfuse_megatron.config import OverlapConfig, config_file_from_environment
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.candidates import buffer_needs, merge_needs
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.schedule import Algorithm
from commfuse_megatron.tools.common.cases import CASE_NAMES, linear_case
from commfuse_megatron.tools.common.output import make_table, results
from commfuse_megatron.tools.doctor.machine import Machine

# Tokens of a sequence (times batch) that the buffers are worked out for.
_TOKENS = 8192


def show(machine: Machine, buffers_mib: dict[str, float]) -> None:
    """Print the tables."""
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
    _print_buffers(_group_size(machine), buffers_mib)


def _group_size(machine: Machine) -> int:
    return max(2, len(machine.gpus))


def buffers_of(machine: Machine) -> dict[str, float]:
    """MiB on one rank by model: what one context's buffers grow to when all linears of that model are sliced."""
    needs: dict[str, dict[str, int]] = {}
    group_size = _group_size(machine)
    plan = PassPlan("sliced", "", Algorithm.DIRECT, 1, keep_gathered_input=False)
    for name in CASE_NAMES:
        if name.startswith("paper"):  # its tokens are given
            continue
        try:
            case = linear_case(name, _TOKENS, group_size)
        except ConfigError:  # sizes that so many ranks do not divide
            continue
        model = name.split(".")[0]
        for pass_name in ("fprop", "backward"):
            needed = buffer_needs(case.problem(pass_name, "bfloat16"), plan)
            needs[model] = merge_needs(needs.get(model, {}), needed)
    return {model: round(sum(parts.values()) / 2**20, 1) for model, parts in needs.items()}


def _print_buffers(group_size: int, buffers_mib: dict[str, float]) -> None:
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
        for model, size_mib in buffers_mib.items()
    ]
    columns = ("model", "ranks", "tokens", "MiB", f"within max_buffer_mib {limit_mib}")
    results().print(make_table("buffers of one context on one rank", columns, rows))
