"""What a user may choose, as frozen dataclasses nested by role, read from YAML.

Owns names, defaults and checks of every option, and the one environment variable that names a file. Knows nothing of
torch, groups or devices. All ranks of a group must bring equal configurations; `OverlapContext` compares them before
anything is sent.
"""

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from commfuse_megatron.errors import ConfigError

#: The only environment variable that this package reads for itself: a configuration file for unmodified scripts.
CONFIG_VARIABLE = "COMMFUSE_CONFIG"

#: The transports by name, also for what is to choose one.
Backend = Literal["auto", "gloo", "nccl", "copy_engine"]


def config_file_from_environment() -> str | None:
    """The file that COMMFUSE_CONFIG names; None if it is unset or empty."""
    return os.environ.get(CONFIG_VARIABLE) or None


#: Longer ones overflow in the stores and groups that they are passed on to. About 30 years.
_LONGEST_TIMEOUT_S = 1e9

# Keys that files may still have, and what took their place.
_FORMER_KEYS = {"cuda_graphs": "graph_memory_mib", "nccl_lanes": "nccl_communicators"}


def _within(default: Any, least: float, most: float, range_in_words: str) -> Any:
    """A field whose value, unless None, is from `least` to `most`: it "must `range_in_words`"."""
    return field(default=default, metadata={"within": (least, most, range_in_words)})


def _at_least(least: int, default: int | None) -> Any:
    return _within(default, least, math.inf, f"be at least {least}" if least else "not be negative")


class _Checked:
    """A part of the configuration whose values fit their annotations and ranges, however it was built."""

    def __post_init__(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            value = getattr(self, name)
            if not dataclasses.is_dataclass(hint):
                object.__setattr__(self, name, _check_value(hint, value, name))
            elif not isinstance(value, typing.cast(type, hint)):
                wanted = typing.cast(type, hint).__name__
                raise ConfigError(f"{name} must be a {wanted}, got {value!r}; from_dict takes nested dicts")
        for each in dataclasses.fields(typing.cast(Any, self)):
            value = getattr(self, each.name)
            if "within" in each.metadata and value is not None:
                least, most, range_in_words = each.metadata["within"]
                if not least <= value <= most:
                    raise ConfigError(f"{each.name} must {range_in_words}, got {value}")


@dataclass(frozen=True, kw_only=True)
class PassConfig(_Checked):
    """How one communicating pass of a linear is run.

    What is "auto" (or None) the planner chooses; the rest is forced.

    path: "sliced": partial GEMMs over point-to-point transfers, one for every shard; "grouped", of more than two ranks:
    one for several shards, as many as have arrived by the cost model (of a reduce-scatter the other way round); "bulk",
    backward passes only: as few GEMMs as possible, the weight gradient put where it covers the transfer; "async": the
    group's own collectives beside whole GEMMs, as Megatron's own layers do in backward; "sequential": the plain
    collective followed by (or following) one GEMM.
    algorithm: "direct" sends between owner and user, "ring" hop by hop through the neighbours.
    chunks_per_shard: pieces that one rank's shard is cut into; more start the transfer earlier on slow links and make
    the GEMMs smaller.
    """

    path: Literal["auto", "sliced", "grouped", "bulk", "async", "sequential"] = "auto"
    algorithm: Literal["auto", "ring", "direct"] = "auto"
    chunks_per_shard: int | None = _at_least(1, None)


@dataclass(frozen=True, kw_only=True)
class WgradConfig(_Checked):
    """The weight gradient of an all-gather linear.

    keep_gathered_input: keep the gathered input for the backward pass instead of gathering it again: one all-gather
    less, at the price of [S, B, K] elements per layer held between forward and backward.
    """

    keep_gathered_input: bool = False


@dataclass(frozen=True, kw_only=True)
class LinearConfig(_Checked):
    """The three GEMMs of a linear: `fprop`, `dgrad` (the backward pass that communicates) and `wgrad`."""

    fprop: PassConfig = field(default_factory=PassConfig)
    dgrad: PassConfig = field(default_factory=PassConfig)
    wgrad: WgradConfig = field(default_factory=WgradConfig)


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(_Checked):
    """Attention with its output projection.

    path: "query_split": the queries of one owner after the other go through attention and projection, each partial
    output on its way while the next is computed; "row_parallel": attention at once, then the projection over the
    reduce-scatter as a linear of its own; "sequential": attention, projection, collective. "auto", the default, leaves
    it to the planner, which times them; where nothing is timed, as on the CPU, it is "row_parallel".
    splits_per_shard: pieces that one owner's queries are cut into; None: the planner chooses.
    backward: what follows a forward pass with split queries. "query_split": its splits backward, each as its rows of
    the gradient arrive; "row_parallel": the projection's backward pass as a linear of its own, then attention at once.
    With dropout it is always the first, since splits have masks of their own, and where only the weight needs a
    gradient, since attention has no backward pass then. "auto": the planner chooses.
    kernel: what computes attention in `ops`. "auto" takes the first that can of cuDNN's front end ("cudnn"), PyTorch's
    flash attention ("flash") and "math", which keeps a split's scores in memory and takes everything. In Megatron,
    "row_parallel" and "sequential" run Megatron's own attention.
    """

    path: Literal["auto", "query_split", "row_parallel", "sequential"] = "auto"
    splits_per_shard: int | None = _at_least(1, None)
    backward: Literal["auto", "query_split", "row_parallel"] = "auto"
    kernel: Literal["auto", "cudnn", "flash", "math"] = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path in ("row_parallel", "sequential"):
            for name, value, unset in (
                ("splits_per_shard", self.splits_per_shard, None),
                ("backward", self.backward, "auto"),
            ):
                if value != unset:
                    raise ConfigError(
                        f"{name} = {value} is about split queries, which path "
                        f'"{self.path}" does not have; set path to "query_split" or "auto"'
                    )


@dataclass(frozen=True, kw_only=True)
class UlyssesConfig(_Checked):
    """Attention over a sequence that is split over ranks.

    path: "overlapped": heads travel in groups, each attended while the next one travels, and the rows of one owner
    after the other go home; "sequential": all-to-all, attention, all-to-all. "auto", the default, leaves it to the
    planner, which times them; where nothing is timed, as on the CPU, it is "overlapped". In Megatron's layers
    (`cp_comm_type: a2a`) "auto" on GPUs keeps Transformer Engine's own exchange, unless `plan.measure` is "always":
    then both are timed, and ours is taken where it is faster. (That trial has not run on GPUs yet.) "stock" keeps it
    anyway. Megatron's local attention has none: there "auto" is ours, and "stock" raises. Our operation itself takes
    "stock" for "auto".
    head_groups: into how many groups a rank's own heads are cut, at most as many as heads of keys and values, or of
    queries where there is only one of those; None: the planner chooses.
    with_projections: "on": in Megatron's layers the exchanges hide under the projections around attention, too, where
    they can; "off", the default, since over NVLink the other gained nothing: under attention alone.
    `ops.ulysses_block` asks for it itself.
    """

    path: Literal["auto", "overlapped", "sequential", "stock"] = "auto"
    head_groups: int | None = _at_least(1, None)
    with_projections: Literal["off", "on"] = "off"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_groups is not None and self.path == "sequential":
            raise ConfigError(
                f'head_groups = {self.head_groups} is about groups that travel apart, which path "sequential" does not '
                'have; set path to "overlapped" or "auto"'
            )


@dataclass(frozen=True, kw_only=True)
class TransportConfig(_Checked):
    """How bytes reach another rank.

    backend: "auto" takes gloo where the group has no CUDA backend, else "copy_engine" if all GPUs are of one host and
    address each other's memory (it takes no SM from the GEMMs), else "nccl"; also "nccl" under NCCL_P2P_DISABLE=1.
    max_buffer_mib: most memory that one context's buffers may take on a rank; a problem that needs more runs
    sequentially, and the report says so.
    timeout_s: how long a transfer, or a peer's word on a new problem, may take before TransportTimeoutError.
    nccl_channels: most blocks of NCCL's point-to-point kernel, hence SMs it occupies; None: 20, or 2 through host
    memory. 2 x H200, November 2026: 64 MiB each way take 0.82 ms with 8 channels, 0.43 with 16, 0.25 with 20 and no
    less with more; through host memory 2.9 ms with any number from 2.
    nccl_communicators: how many share the messages; None: 1, or 2 through host memory, where one does not fill the
    link (64 MiB in 2.3 ms with two).
    graph_memory_mib: what the copy engine of one context may take of GPU memory to keep calls as CUDA graphs, each
    launched by one call of the driver when its addresses come again; 0: none. A graph takes 0.3 to 1.5 MiB: a step of
    32 layers, both passes, has some 430 of them, which is 130 to 640 MiB.
    """

    backend: Backend = "auto"
    timeout_s: float = _within(
        600.0, math.ulp(0.0), _LONGEST_TIMEOUT_S, f"be positive and at most {_LONGEST_TIMEOUT_S:g}"
    )
    max_buffer_mib: int = _at_least(1, 4096)
    nccl_channels: int | None = _within(None, 1, 64, "be between 1 and 64")
    nccl_communicators: int | None = _within(None, 1, 8, "be between 1 and 8")
    graph_memory_mib: int = _at_least(0, 768)


@dataclass(frozen=True, kw_only=True)
class KernelConfig(_Checked):
    """Which GEMM computes the slices.

    gemm: "auto" takes the persistent Triton GEMM beside NCCL (whose kernels need SMs of their own) and cuBLAS
    elsewhere; "persistent" and "torch" force one.
    reserved_sms: SMs that a slice leaves to the transfers; None reserves one for each channel of each communicator.
    regain_sms: give those SMs back to a large slice once the transfer beside it is done; None: unless messages go
    through host memory. Where transfers take longer than slices nothing is left to regain, and slices would wait.
    """

    gemm: Literal["auto", "persistent", "torch"] = "auto"
    reserved_sms: int | None = _at_least(0, None)
    regain_sms: bool | None = None


@dataclass(frozen=True, kw_only=True)
class PlanConfig(_Checked):
    """How the planner chooses between paths.

    measure: "auto" times the candidates of a new problem on the GPU, once, where the cost model cannot tell them apart;
    "always" wherever there is more than one; "never" trusts the model with assumed figures, so that plans are the same
    in every run. On the CPU nothing is measured.
    margin: predicted times of two paths closer than this fraction count as undecided.
    file: where plans are kept for later runs: what fits (device, link, ranks, versions, problem, what is forced) is
    taken from there, measured or not, and what is chosen anew is added. Group rank 0 alone reads and writes it.
    To fill it for a model of your own, run one step of the job with it; `commfuse bench --write-plans` knows the
    linears of a few published models.
    """

    measure: Literal["auto", "always", "never"] = "auto"
    margin: float = _within(0.15, 0, 10, "be between 0 and 10")
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class FallbackConfig(_Checked):
    """What happens to a layer that cannot be overlapped.

    unsupported: "stock" runs Megatron's own path, logs the reason once and reports it; "raise" raises UnsupportedError
    with the same sentence, unless the layer is switched off or its group has one rank.
    """

    unsupported: Literal["stock", "raise"] = "stock"


@dataclass(frozen=True, kw_only=True)
class OverlapConfig(_Checked):
    """Everything a user may choose. See the classes of the parts.

    check_agreement: compare the problem on all ranks at every call, not only when it is new; None means on with gloo
    and off on GPUs, where it would cost a host round trip per call.
    check_decisions: compare at every call of a Megatron layer whether all ranks overlap it or take Megatron's own path,
    and why. Ranks that differ would hang; with this, all of them raise ShapeError. For debugging: also costs a host
    round trip per call.
    record: keep one interval per slice and transfer of the latest calls, for `tools.trace` and the exposed time of
    `OverlapContext.report()`.
    """

    linear: LinearConfig = field(default_factory=LinearConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    ulysses: UlyssesConfig = field(default_factory=UlyssesConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    fallback: FallbackConfig = field(default_factory=FallbackConfig)
    check_agreement: bool | None = None
    check_decisions: bool = False
    record: bool = False

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a YAML file; unknown keys and wrong values raise ConfigError naming the file and the key."""
        source = str(path)
        try:
            data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error
        return cls.from_dict({} if data is None else data, source=source)

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, source: str = "OverlapConfig") -> Self:
        """Build from nested dicts, as read from YAML; `source` names the origin in errors."""
        return _build(cls, data, source, "")

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dicts: `from_dict(config.to_dict()) == config`."""
        return dataclasses.asdict(self)


def describe_differences(configurations: Sequence[dict[str, Any]]) -> str:
    """What differs between the configurations that group ranks bring, as `to_dict` gives them, by dotted key and rank.

    "" where they are equal.
    """
    by_rank = [_flatten(configuration) for configuration in configurations]
    found = []
    for key in dict.fromkeys(key for values in by_rank for key in values):
        ranks_of: dict[str, list[str]] = {}
        for rank, values in enumerate(by_rank):
            value = json.dumps(values[key]) if key in values else "no key"  # null, true: as YAML has them
            ranks_of.setdefault(value, []).append(str(rank))
        if len(ranks_of) > 1:
            said = (
                f"{value} on group rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
                for value, ranks in ranks_of.items()
            )
            found.append(f"{key} is {' and '.join(said)}")
    return "; ".join(found)


def _flatten(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        flat |= _flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _build(cls: type, data: Any, source: str, prefix: str) -> Any:
    if not isinstance(data, dict):
        where = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{source}: {where} must be a mapping of keys to values, got {data!r}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cls)]
    values = {}
    for key, value in data.items():
        if key not in names:
            near = difflib.get_close_matches(_FORMER_KEYS.get(key, str(key)), names, n=1)
            advice = f' Did you mean "{near[0]}"?' if near else f" Known keys: {', '.join(names)}."
            raise ConfigError(f'{source}: unknown key "{prefix}{key}".{advice}')
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(typing.cast(type, hint), value, source, f"{prefix}{key}.")
        else:
            values[key] = _check_value(hint, value, f"{source}: {prefix}{key}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{source}: {prefix}{error}") from None


def _check_value(hint: Any, value: Any, where: str) -> Any:
    """Return `value` if it fits the annotation `hint` (int to float is widened), else raise ConfigError."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices or isinstance(value, bool):
            raise ConfigError(f"{where} must be one of {', '.join(map(str, choices))}; got {value!r}")
        return value
    allowed = typing.get_args(hint) if origin is types.UnionType else (hint,)
    if value is None and types.NoneType in allowed:
        return None
    if isinstance(value, bool):
        if bool in allowed:
            return value
    elif isinstance(value, int) and float in allowed:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(
                f"{where} must be a number that a float can hold; got one of {len(str(value))} digits"
            ) from None
    elif isinstance(value, tuple(t for t in allowed if t not in (bool, types.NoneType))):
        return value
    expected = " or ".join("null" if t is types.NoneType else t.__name__ for t in allowed)
    raise ConfigError(f"{where} must be {expected}; got {value!r}")
