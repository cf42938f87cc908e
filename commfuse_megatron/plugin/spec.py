"""Megatron specs with our layers in them.

    spec = apply_to_spec(get_gpt_layer_local_spec())                                   # any spec tree, on a copy
    torchrun ... pretrain_gpt.py ... --spec commfuse_megatron.plugin.spec gpt_layer_spec          # a callable
    torchrun ... pretrain_gpt.py ... --spec commfuse_megatron.plugin.spec gpt_layer_spec_te       # a ready object
    torchrun ... pretrain_gpt.py ... --spec commfuse_megatron.plugin.spec gpt_layer_spec_local    # another

Owns the table from Megatron's classes to ours and the walk over spec trees. Beware: Megatron shares spec objects
between models and rewrites some while it builds, so a spec that was handed in is never changed.
"""

import copy
import dataclasses
import functools
import inspect
import logging
from pathlib import Path
from typing import Any

import torch

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import arguments, compat, compat_training
from commfuse_megatron.plugin.classes import ATTENTIONS, CONFIGURED_BY_SPECS, CORE_ATTENTIONS, LINEARS_AND_EMBEDDING
from commfuse_megatron.plugin.norm import CommFuseNorm

logger = logging.getLogger(__name__)

#: Megatron's class -> ours. Classes are compared by identity: a subclass of somebody else keeps its behaviour.
REPLACEMENTS: dict[type, type] = {
    **LINEARS_AND_EMBEDDING,
    **ATTENTIONS,
    **CORE_ATTENTIONS,
    compat.WrappedTorchNorm: CommFuseNorm,
}

_TRANSFORMER_ENGINE = "megatron.core.extensions.transformer_engine"

#: Leaves whose exact class Megatron checks while it builds latent attention; `convert_model` reaches them afterwards.
_KEPT_FIELDS = ("linear_q_down_proj", "linear_kv_down_proj", "linear_qkv_down_proj")


def apply_to_spec(spec: Any, config: OverlapConfig | str | Path | None = None) -> Any:
    """A copy of `spec` in which Megatron's tensor-parallel linears, attentions and torch norms are ours.

    Args:
        spec: a ModuleSpec, TransformerBlockSubmodules or any tree of dataclasses, partials, lists, tuples, dicts and
            classes, as Megatron's spec builders return them.
        config: given to every linear and core attention, or the YAML file that it is read from; None lets the layers
            read the flags.

    What a spec cannot reach (the output layer, the down-projections of latent attention, the layers of multi-token
    prediction) stays Megatron's until `convert_model`. Transformer Engine's norms stay.

    Raises ConfigError for what is no spec and for what is no configuration.
    """
    for each in spec if isinstance(spec, list | tuple) else [spec]:
        _require_spec(each, is_part=each is not spec)
    return our_spec(spec, arguments.checked_config(config, "apply_to_spec"))


def _require_spec(spec: Any, *, is_part: bool) -> None:
    is_tree = dataclasses.is_dataclass(spec) or isinstance(spec, type | functools.partial | dict | list | tuple)
    is_other = isinstance(spec, OverlapConfig | compat.ModelParallelConfig | torch.nn.Module)
    if not is_other and (is_tree or is_part or spec is None):  # None: a model without such layers
        return
    hint = f"; call it: {spec.__name__}(...)" if inspect.isfunction(spec) else ""
    hint = "; the configuration is the second argument" if isinstance(spec, OverlapConfig) else hint
    raise ConfigError(
        "apply_to_spec takes a ModuleSpec, or another tree of specs as Megatron's builders return them, got a"
        f" {type(spec).__name__}{hint}. A built model is converted by convert_model"
    )


def our_spec(spec: Any, config: OverlapConfig | None = None) -> Any:
    """The same of what may be no spec at all, such as the None of a backend that lacks a layer."""
    return _Mapping(REPLACEMENTS, config).map(spec)


class CommFuseSpecProvider:
    """A backend for those who assemble specs with Megatron's own builders.

        get_mlp_module_spec_for_backend(backend=CommFuseSpecProvider(LocalSpecProvider()))   # or TESpecProvider()

    Answers like `fallback`, with our classes in place of Megatron's linears, core attention and torch norms.
    """

    def __init__(self, fallback: Any) -> None:
        self._fallback = fallback

    def column_parallel_linear(self) -> Any:
        """Our column-parallel linear where the fallback has Megatron's."""
        return our_spec(self._fallback.column_parallel_linear())

    def row_parallel_linear(self) -> Any:
        """Our row-parallel linear where the fallback has Megatron's."""
        return our_spec(self._fallback.row_parallel_linear())

    def column_parallel_layer_norm_linear(self) -> Any:
        """Our norm and linear in one where the fallback has Transformer Engine's; None where it has none."""
        return our_spec(self._fallback.column_parallel_layer_norm_linear())

    def core_attention(self) -> Any:
        """Our core attention where the fallback has Megatron's."""
        return our_spec(self._fallback.core_attention())

    def layer_norm(self, *args: Any, **kwargs: Any) -> Any:
        """A norm that works under sequence parallelism where the fallback's does not."""
        return our_spec(self._fallback.layer_norm(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._fallback, name)


def replace_in_spec(spec: Any, replacements: dict[type, type]) -> Any:
    """A copy of `spec` with other classes in place of some, compared by identity."""
    return _Mapping(replacements, None).map(spec)


class _Mapping:
    """One walk. Nodes that were shared stay shared, so that layers built from one spec still are."""

    def __init__(self, replacements: dict[type, type], config: OverlapConfig | None) -> None:
        self._replacements = replacements
        self._config = config
        self._copies: dict[int, Any] = {}
        self._kept: set[type] = set()

    def map(self, node: Any) -> Any:
        if isinstance(node, type):
            return self._leaf(node)
        if id(node) in self._copies:
            return self._copies[id(node)]
        if dataclasses.is_dataclass(node):
            return self._dataclass(node)
        if isinstance(node, functools.partial):
            keywords = {name: self.map(value) for name, value in node.keywords.items()}
            return self._keep(node, functools.partial(self.map(node.func), *map(self.map, node.args), **keywords))
        if isinstance(node, dict):
            return self._keep(node, {key: self.map(value) for key, value in node.items()})
        if isinstance(node, list | tuple) and type(node) in (list, tuple):
            return self._keep(node, type(node)(map(self.map, node)))
        return node

    def _dataclass(self, node: Any) -> Any:
        new = self._keep(node, copy.copy(node))
        is_spec = isinstance(node, compat.ModuleSpec)
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if field.name in _KEPT_FIELDS:
                if value in self._replacements:
                    why = "Megatron checks its exact class; convert_model reaches it later"
                    logger.info("%s stays %s: %s", field.name, value.__name__, why)
                continue
            if is_spec and field.name == "module" and isinstance(value, type):
                object.__setattr__(new, field.name, self._replacements.get(value, value))
            else:
                object.__setattr__(new, field.name, self.map(value))
        if is_spec and isinstance(node.module, type):
            new.params = {**new.params, **self._parameters(new.module)}
        return new

    def _leaf(self, stock: type) -> Any:
        is_transformer_engines = stock.__module__ == _TRANSFORMER_ENGINE and "Linear" in stock.__name__
        if is_transformer_engines and stock not in self._replacements and stock not in self._kept:
            self._kept.add(stock)
            logger.warning("apply_to_spec: %s stays: not among the linears that are replaced", stock.__name__)
        ours = self._replacements.get(stock, stock)
        parameters = self._parameters(ours)
        return compat.ModuleSpec(module=ours, params=parameters) if parameters else ours

    def _parameters(self, ours: type) -> dict[str, Any]:
        """What a spec tells the constructor of `ours`, beyond what Megatron does."""
        return {"overlap_config": self._config} if ours in CONFIGURED_BY_SPECS and self._config is not None else {}

    def _keep(self, node: Any, new: Any) -> Any:
        self._copies[id(node)] = new
        return new


def block_spec(
    layer_spec: Any, transformer_config: Any, vp_stage: int | None = None, *, with_torch_norm: bool = False
) -> Any:
    """A spec of this pipeline stage's layers and of the final norm, from the spec of one layer.

    From the bare spec of a layer, Megatron picks the final norm itself: without Apex and Transformer Engine one that
    refuses sequence parallelism. Here it is CommFuseNorm then, and always `with_torch_norm`.
    """
    norm = CommFuseNorm if with_torch_norm else compat.transformer_block.LayerNormImpl
    return compat.TransformerBlockSubmodules(
        layer_specs=[layer_spec] * compat.get_num_layers_to_build(transformer_config, vp_stage=vp_stage),
        layer_norm=REPLACEMENTS.get(norm, norm),
    )


def gpt_layer_spec(config: Any, vp_stage: int | None = None) -> Any:
    """Megatron's default GPT spec for `config` with our layers, as a callable for `--spec`.

    Args:
        config: the GPTModelConfig that Megatron's builder passes, with the TransformerConfig in `.transformer`.

    Flags given on the command line (`add_arguments`) are copied to the TransformerConfig.

    Raises, before any layer is built: UnsupportedError where Megatron's default would be Transformer Engine layers and
    that is not installed; ConfigError for a configuration file with mistakes.
    """
    require_buildable(config.transformer)
    spec = apply_to_spec(compat_training.default_layer_spec(config, vp_stage))
    return block_spec(spec, config.transformer, vp_stage) if isinstance(spec, compat.ModuleSpec) else spec


def require_buildable(transformer_config: Any) -> None:
    """Adopt the flags; raise what keeps layers of this configuration from being built: see `gpt_layer_spec`."""
    arguments.adopt_flags(transformer_config)
    arguments.read_config(arguments.config_file(transformer_config))
    implementation = transformer_config.transformer_impl
    if implementation != "local" and not compat.HAVE_TRANSFORMER_ENGINE:
        raise UnsupportedError(
            f"transformer_impl is {implementation}, and Transformer Engine is not installed; "
            "pass --transformer-impl local"
        )


def local_layer_spec() -> Any:
    """Megatron's dense local layer with its own linears and a norm that works under sequence parallelism.

    The norm follows `config.normalization`, also where Apex is installed and would offer LayerNorm only.
    """
    spec = compat.get_gpt_layer_local_spec()
    return replace_in_spec(spec, {spec.submodules.input_layernorm: CommFuseNorm})


#: A dense GPT layer of local classes, for launchers that take an object. Megatron chooses the final norm by itself
#: (see `block_spec`): under sequence parallelism this needs Apex or Transformer Engine, `gpt_layer_spec` does not.
gpt_layer_spec_local = apply_to_spec(local_layer_spec())


class _NotInstalled(compat.TransformerLayer):
    """Stands for the layer that cannot be built here; Megatron builds subclasses of its own layer only."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError(
            "gpt_layer_spec_te needs Transformer Engine, which is not installed: pip install 'commfuse-megatron[te]', "
            "or take gpt_layer_spec_local"
        )


#: A dense GPT layer of Transformer Engine, its linears ours; building it raises where that is not installed.
gpt_layer_spec_te = (
    apply_to_spec(compat.get_gpt_layer_with_transformer_engine_spec())
    if compat.HAVE_TRANSFORMER_ENGINE
    else compat.ModuleSpec(module=_NotInstalled)
)
