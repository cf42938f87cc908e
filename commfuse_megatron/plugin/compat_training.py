"""What depends on which `megatron.training` came with Megatron-Core, as far as the pip wheel has it.

Read against 0.18.2 and 0.19.x. `megatron.training` is imported inside functions: it is large, and only scripts that use
it come here. Knows nothing of our own classes.
"""

import argparse
import functools
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.utils import get_batch_on_this_cp_rank

from commfuse_megatron.errors import UnsupportedError

#: A list of model chunks -> the same list; called after construction, before the data-parallel wrapper.
ModelHook = Callable[[list[Any]], list[Any]]


def make_help_printable(parser: argparse.ArgumentParser) -> None:
    """Escape what argparse would take for a format: some help texts of Megatron's have a lone %, so `--help` raises."""
    for action in parser._actions:
        if action.help is not None:
            action.help = re.sub(r"%%|%(?!\(\w+\)[a-z])", "%%", action.help)


def let_wheel_start() -> None:
    """Let `initialize_megatron` pass where Megatron came as a wheel.

    It runs `make` in the folder of the datasets and ends the process if that fails. The wheel has no Makefile there,
    since it brings what would be compiled.
    """
    from megatron.core.datasets import utils

    folder = Path(utils.__file__).parent
    if not (folder / "Makefile").exists() and any(folder.glob("helpers_cpp*")):
        utils.compile_helpers = lambda: None


def set_scalar_writer(writer: Any) -> None:
    """Make `writer` (with `add_scalar(name, value, step)`) what Megatron logs losses and norms to, like TensorBoard's.

    Call it after the command line was parsed, on the ranks that shall log.
    """
    from megatron.training import global_vars

    global_vars._GLOBAL_TENSORBOARD_WRITER = writer


def model_config_from_arguments(arguments: Any) -> Any:
    """Megatron's HybridModelConfig or GPTModelConfig for a parsed command line; Megatron reads `--spec` itself.

    Its `transformer` is the TransformerConfig, its `pre_wrap_hooks` a list of `ModelHook`.
    """
    from megatron.training import argument_utils

    if arguments.hybrid_layer_pattern is not None:
        return argument_utils.hybrid_config_from_args(arguments)
    if _builds_gpt():
        return argument_utils.gpt_config_from_args(arguments)
    from megatron.core.transformer.spec_utils import import_module

    spec = None if arguments.spec is None else import_module(arguments.spec)
    return _GPTConfig(
        transformer=argument_utils.core_transformer_config_from_args(arguments), transformer_layer_spec=spec
    )


def pretrain(arguments: Any, model_config: Any, datasets: Callable[..., Any], forward_step: Callable[..., Any]) -> None:
    """Megatron's `pretrain` on the model of `model_config`, which `model_config_from_arguments` made."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain as stock_pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    provider = None
    if inspect.signature(stock_pretrain).parameters["model_provider"].default is inspect.Parameter.empty:
        provider = functools.partial(_provide_model, arguments, model_config)
    is_ours = isinstance(model_config, _GPTConfig)
    stock_pretrain(
        cfg_container=pretrain_cfg_container_from_args(arguments, None if is_ours else model_config),
        train_valid_test_dataset_provider=datasets,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        model_provider=provider,
    )


@functools.cache
def _builds_gpt() -> bool:
    """Whether `megatron.training` makes a GPT from a configuration, as it does from 0.19 on."""
    return importlib.util.find_spec("megatron.training.models.gpt") is not None


@dataclass(kw_only=True)
class _GPTConfig:
    """Stands for GPTModelConfig where Megatron has none."""

    transformer: Any
    transformer_layer_spec: Any = None
    pre_wrap_hooks: list[ModelHook] = field(default_factory=list)


def _provide_model(
    arguments: Any, model_config: Any, pre_process: bool = True, post_process: bool = True, **options: Any
) -> Any:
    """What Megatron up to 0.18 calls for every model chunk. `options`: `vp_stage`, `config`, `pg_collection`."""
    stage, groups = options.get("vp_stage"), options.get("pg_collection")
    if isinstance(model_config, _GPTConfig):
        model = _build_gpt(arguments, model_config, pre_process, post_process, stage, groups)
    else:
        builder = model_config.get_builder_cls()(model_config)
        model = builder.build_model(groups, pre_process=pre_process, post_process=post_process, vp_stage=stage)
    for hook in model_config.pre_wrap_hooks:
        (model,) = hook([model])
    return model


def _build_gpt(
    arguments: Any, model_config: _GPTConfig, pre_process: bool, post_process: bool, stage: int | None, groups: Any
) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel

    if arguments.mtp_num_layers is not None:
        raise UnsupportedError("multi-token prediction (--mtp-num-layers) needs megatron-core 0.19 or later here")
    spec = model_config.transformer_layer_spec
    if spec is None:
        spec = default_layer_spec(model_config, stage)
    elif inspect.isfunction(spec):
        spec = spec(model_config, stage)
    return GPTModel(
        config=model_config.transformer,
        transformer_layer_spec=spec,
        vocab_size=arguments.padded_vocab_size,
        max_sequence_length=arguments.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=arguments.fp16_lm_cross_entropy,
        share_embeddings_and_output_weights=not arguments.untie_embeddings_and_output_weights,
        position_embedding_type=arguments.position_embedding_type,
        rotary_percent=arguments.rotary_percent,
        rotary_base=arguments.rotary_base,
        rope_scaling=arguments.use_rope_scaling,
        seq_len_interpolation_factor=arguments.rotary_seq_len_interpolation_factor,
        vp_stage=stage,
        pg_collection=groups,
    )


def default_layer_spec(model_config: Any, vp_stage: int | None) -> Any:
    """The spec that `megatron.training` takes for a GPTModelConfig when the user names none.

    Up to 0.18 it leaves this to the script; then it is the block that Megatron's own script chooses.
    """
    if not _builds_gpt():
        config = model_config.transformer
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=config.transformer_impl == "transformer_engine",
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    from megatron.training.models.gpt import default_layer_spec as stock_default

    if "vp_stage" in inspect.signature(stock_default).parameters:
        return stock_default(model_config, vp_stage)
    return stock_default(model_config)


def rows_of_this_rank(batch: dict[str, Any]) -> dict[str, Any]:
    """What context parallelism leaves this rank of tensors [batch, sequence, ...], as Megatron's scripts deal it."""
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def training_arguments() -> Any | None:
    """The parsed command line of `megatron.training`, or None where that is not in use."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)
