"""What became of every linear, embedding and attention of a model: the path its calls took, or why not.

Reads what the layers counted; changes nothing.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from commfuse_megatron import OpRecord
from commfuse_megatron.plugin import compat
from commfuse_megatron.plugin.arguments import checked_model, is_switched_on
from commfuse_megatron.plugin.classes import ATTENTIONS, CORE_ATTENTIONS, LINEARS_AND_EMBEDDING
from commfuse_megatron.plugin.decision import kept_reason_of, state_of
from commfuse_megatron.plugin.stand_in import OURS, class_name, reason_in_class
from commfuse_megatron.plugin.support import SWITCHED_OFF, unsupported_reason


@dataclass(frozen=True, slots=True)
class LayerReport:
    """One linear, embedding, core attention or self-attention.

    Forward passes are counted; what the backward passes of a problem did is in `ModelReport.ops`. What goes into a CUDA
    graph is counted when it is captured; replays are not seen.

    path: "overlapped" (of an attention: query-split), "sequential" (by our operation, without overlap) or "stock" where
    all calls agree, "mixed" where they don't, "not called yet" before the first.
    reasons: why calls took Megatron's path, each once; before the first call, why they will, where that is known; for
        a layer that is none of ours, why it stayed (its calls are not seen).
    sequential_reasons: why the planner had calls run without overlap, each once.
    """

    name: str
    layer: str
    path: str
    overlapped_calls: int
    stock_calls: int
    reasons: tuple[str, ...]
    sequential_calls: int = 0
    sequential_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Layers of a model in the order of its modules, lines of the contexts they used, self-attentions.

    Layers are linears, embeddings and, under context parallelism, core attentions, which then exchange rows and heads.

    Printed, it lists all of them with their paths and reasons, and counts forward passes last.

    Where an attention was query-split, its projection's call counts as overlapped too. An attention that was not may be
    followed by an overlapped projection.
    """

    layers: tuple[LayerReport, ...]
    ops: tuple[OpRecord, ...]
    attentions: tuple[LayerReport, ...] = ()

    @property
    def overlapped_calls(self) -> int:
        """Calls of all layers whose transfers ran beside what was computed."""
        return sum(layer.overlapped_calls for layer in self.layers)

    @property
    def sequential_calls(self) -> int:
        """Calls of all layers that ran through our operations, without overlap."""
        return sum(layer.sequential_calls for layer in self.layers)

    @property
    def stock_calls(self) -> int:
        """Calls of all layers that took Megatron's own path, as far as our classes saw them."""
        return sum(layer.stock_calls for layer in self.layers)

    def lines(self) -> list[str]:
        """For people: how many forward passes ran how, then every reason once."""
        found = [self._summary()]
        if self.attentions:
            split = [attention for attention in self.attentions if attention.overlapped_calls]
            calls = sum(attention.overlapped_calls for attention in split)
            why = sorted({reason for attention in self.attentions for reason in attention.reasons})
            found.append(
                f"{len(split)} of {len(self.attentions)} self-attentions query-split, in {calls} forward passes"
                + (f"; Megatron's own: {'; '.join(why)}" if why else "")
            )
        for kind, field in (("sequential", "sequential_reasons"), ("stock", "reasons")):
            names: dict[str, list[str]] = {}
            for layer in self.layers:
                for reason in getattr(layer, field):
                    names.setdefault(reason.removeprefix("sequential: "), []).append(layer.name)
            found += [f"{kind}: {reason} ({_some(names[reason])})" for reason in sorted(names)]
        return found

    def __str__(self) -> str:
        listed = [*self.layers, *self.attentions]
        width = max((len(each.name) for each in listed), default=0)
        rows = []
        for title, group in (
            ("", self.layers),
            ("self-attentions: query splits only, their linears are listed above:", self.attentions),
        ):
            rows += [title] if title and group else []
            for each in group:
                why = "; ".join((*each.sequential_reasons, *each.reasons))
                rows.append(f"{each.name:{width}}  {each.path}" + (f": {why}" if why else ""))
        return "\n".join([*rows, self._summary()])

    def _summary(self) -> str:
        stock = [layer for layer in self.layers if layer.path == "stock"]
        # Ours are called stock after the first call that they counted.
        unseen = sum(layer.stock_calls == 0 for layer in stock)
        whole = f"{len(self.layers)} layers ({len(stock)} of them stock)"
        if unseen and unseen == len(self.layers):
            return f"{whole}: Megatron's own classes, whose calls are not counted"
        more = f"; calls of {unseen} layers of Megatron's own classes are not counted" if unseen else ""
        return (
            f"{whole}: {self.overlapped_calls} forward passes overlapped, {self.sequential_calls} sequential,"
            f" {self.stock_calls} on Megatron's own path{more}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists and dicts, for JSON."""
        return dataclasses.asdict(self)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def model_report(model: Any) -> ModelReport:
    """Report on `model`, or on a list of model chunks. Raises ConfigError for anything else."""
    chunks = checked_model(model, "model_report")
    layers: list[LayerReport] = []
    attentions: list[LayerReport] = []
    contexts = {}
    for chunk in chunks:
        taken = _taken_by_fused_operations(chunk)
        for name, module in chunk.named_modules():
            if isinstance(module, compat.CORE_ATTENTIONS):
                is_listed = compat.context_parallel_group(module) is not None
            else:
                is_listed = isinstance(module, _OURS_OR_MEGATRONS) or compat.is_transformer_engine_linear(module)
            if is_listed:
                layers.append(_report(name, module, taken.get(module) or _reason_not_ours(module)))
            if isinstance(module, compat.Attention) and module.attention_type == "self":
                attentions.append(_report(name, module, _reason_not_paired(module)))
            if _counts_calls(module) and (context := state_of(module).context) is not None:
                contexts[id(context)] = context
    ops = tuple(record for context in contexts.values() for record in context.report())
    return ModelReport(tuple(layers), ops, tuple(attentions))


def _taken_by_fused_operations(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The linears of Megatron's MLP for `use_transformer_engine_op_fuser`, which calls none of them, and why."""
    return {
        child: f"{type(parent).__name__} takes the layer's parameters into a fused operation of its own"
        for parent in model.modules()
        if type(parent).__name__.startswith("TEFusedMLP")
        for child in parent.children()
    }


def _counts_calls(module: torch.nn.Module) -> bool:
    """Whether `module` is one of our layers, or derives from one."""
    return isinstance(module, tuple(OURS))


_OURS_OR_MEGATRONS = (compat.ColumnParallelLinear, compat.RowParallelLinear, compat.VocabParallelEmbedding)


def _report(name: str, module: torch.nn.Module, why_stock: str | None) -> LayerReport:
    """why_stock: of what is none of ours, which counts no calls."""
    if why_stock is not None:
        return LayerReport(name, class_name(module), "stock", 0, 0, (why_stock,))
    state = state_of(module)
    overlapped, sequential, stock = state.overlapped_calls, state.sequential_calls, state.stock_calls
    calls = {"overlapped": overlapped, "sequential": sequential.total(), "stock": stock.total()}
    paths = [path for path, count in calls.items() if count]
    if paths:
        path = paths[0] if len(paths) == 1 else "mixed"
        reasons = tuple(stock)
    else:
        # Whoever derives from ours may call the stock function by its class, which nobody counts.
        is_derived = _counts_calls(module) and reason_in_class(module) is not None
        path, reason = "stock" if is_derived else "not called yet", unsupported_reason(module)
        reasons = () if reason is None else (reason,)
    layer, why_sequential = class_name(module), tuple(sequential)
    return LayerReport(name, layer, path, overlapped, stock.total(), reasons, sequential.total(), why_sequential)


def _reason_not_ours(module: torch.nn.Module) -> str | None:
    if _counts_calls(module):
        return None
    known = LINEARS_AND_EMBEDDING | CORE_ATTENTIONS
    which = "classes that are replaced"
    return kept_reason_of(module) or _reason_to_be_stock(module, known, which, " is Megatron's own class: it")


def _reason_not_paired(module: torch.nn.Module) -> str | None:
    if type(module) in ATTENTIONS.values():
        return None
    return _reason_to_be_stock(module, ATTENTIONS, "attentions that are paired with their projection")


def _reason_to_be_stock(module: Any, known: dict[type, Any], which: str, remark: str = "") -> str:
    """which: what those `known` are. Nobody replaces one in a model that was built with the plugin switched off."""
    layer = class_name(module)
    if type(module) not in known:
        return f"{layer} is not among the {which} ({', '.join(each.__name__ for each in known)})"
    if "forward" in vars(module) and type(module) not in LINEARS_AND_EMBEDDING:
        return f"{layer} has a forward of its own in the instance, which ours would not be asked for"
    if not is_switched_on(module.config):
        return SWITCHED_OFF
    return f"{layer}{remark} was neither in the spec given to apply_to_spec nor converted"
