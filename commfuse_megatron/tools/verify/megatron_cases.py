"""The configurations of `commfuse verify --megatron`: models, layouts and features that must equal stock Megatron.

Data only: importing this imports no Megatron. Beware: what is expected of the calls - how often a layer runs, which
layers stay stock and why - stands here, beside the configuration, and is compared exactly; equal numbers alone would
also be those of a plugin that is not at work.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from commfuse_megatron.errors import ConfigError

#: Names of row-parallel linears.
_ROW_PARALLEL = ("linear_proj", "linear_fc2")


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """A low-rank adapter at every linear, see `testing.lora`.

    is_first: the stock model gets them, and is converted with them; their own linears become ours, too.
    """

    norm_output: Literal["rows", "gathered"]
    is_first: bool

    def reasons_to_stay(self, linear: str) -> tuple[str, ...]:
        """Parts of the reasons for which the linear of this name in an adapter takes Megatron's path, where it is ours.

        Empty where it is overlapped.
        """
        is_beside_row = any(f"{name}." in linear for name in _ROW_PARALLEL)
        reduces_outside = self.norm_output == "gathered" and linear.endswith("linear_in") and not is_beside_row
        return ("disable_grad_reduce is set",) if reduces_outside else ()


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One model under one layout with one feature.

    variant, sizes, options: of the model; the options are Megatron's. hybrid_pattern: makes it a HybridModel.
    tensor, layout: the largest tensor-parallel size, and other sizes for Megatron's parallel state; further ranks are
    data-parallel. context: ranks that share every sequence, by the exchange of `cp_comm_type` a2a; stock, whose local
    layers have none, runs whole sequences on each of them. way: "spec" maps specs before the model is built, "convert"
    converts the built one.
    micro_batches: their lengths. packed: lengths of the sequences that each one is packed of.
    is_repeatable: a second run must give the same bits.
    recomputed, repeated: parts of the names of layers that run twice per micro-batch, because the backward pass runs
    them again, or because two heads call them. without_backward: the same of layers whose backward pass does not run.
    frozen, trained: parts of the names of parameters; what is in both is trained.
    stock: parts of the reasons for which layers may take Megatron's own path; empty where all must be overlapped.
    is_fused: ours has the norm and the linear after it in one module; stock has them apart.
    """

    name: str
    variant: Literal["llama", "layer_norm_and_bias"] = "llama"
    sizes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    hybrid_pattern: str | None = None
    virtual_stages: int | None = None
    tensor: int = 4
    context: int = 1
    least_ranks: int = 2
    layout: dict[str, Any] = field(default_factory=dict)
    way: Literal["spec", "convert"] = "spec"
    micro_batches: tuple[int, ...] = (16, 16)
    packed: tuple[int, ...] = ()
    optimizer: Literal["adam", "distributed"] | None = None
    forward_only: bool = False
    is_repeatable: bool = False
    fuses_gradients: bool = False
    recomputed: tuple[str, ...] = ()
    repeated: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    without_backward: tuple[str, ...] = ()
    stock: tuple[str, ...] = ()
    is_fused: bool = False
    adapters: Adapters | None = None

    def tensor_size(self, num_ranks: int) -> int:
        """The tensor-parallel size on `num_ranks` ranks."""
        return min(self.tensor, num_ranks // self.context)

    def describe_layout(self, num_ranks: int) -> str:
        """E.g. "TP2 x PP2"."""
        tensor = self.tensor_size(num_ranks)
        pipeline = self.layout.get("pipeline_model_parallel_size", 1)
        data = num_ranks // (tensor * pipeline * self.context)
        sizes = {"TP": tensor, "CP": self.context, "PP": pipeline, "DP": data}
        sizes["EP"] = self.layout.get("expert_model_parallel_size", 1)
        return " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "TP")


_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}
_SHARED = _EXPERTS | {"moe_shared_expert_intermediate_size": 32}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "rope_type": "rope",
}
_ONE_RANK = ("the tensor-parallel group has one rank",)
_EXPERT_REASON = ("belongs to an expert",)
_PIPELINE = {"pipeline_model_parallel_size": 2}
_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

#: In the order of the table.
CONFIGURATIONS: tuple[Configuration, ...] = (
    Configuration(name="dense"),
    Configuration(name="layer_norm_and_bias", variant="layer_norm_and_bias"),
    Configuration(name="one_query_group", sizes={"num_query_groups": 1}),
    Configuration(name="tied_embeddings", sizes={"has_tied_embeddings": True}),
    Configuration(name="mtp", options={"mtp_num_layers": 1}, repeated=("output_layer", "embedding")),
    Configuration(name="moe_shared_expert", options=_SHARED, stock=_EXPERT_REASON),
    Configuration(
        name="moe_shared_expert_overlap",
        options=_SHARED | {"moe_shared_expert_overlap": True},
        stock=(*_EXPERT_REASON, "explicit_expert_comm is set"),
    ),
    Configuration(name="mla", options=LATENT),
    Configuration(name="hybrid", hybrid_pattern="*-*-"),
    Configuration(name="hybrid_moe", hybrid_pattern="*E*-", options=_SHARED, stock=_EXPERT_REASON),
    Configuration(name="full_recompute", options=FULL, recomputed=_LINEARS),
    Configuration(name="selective_recompute", options=SELECTIVE, recomputed=("linear_fc1", "linear_fc2")),
    Configuration(
        name="dropout_and_recompute",
        options=FULL | {"hidden_dropout": 0.1, "attention_dropout": 0.1},
        recomputed=_LINEARS,
    ),
    Configuration(
        name="frozen_half",
        frozen=("embedding", "decoder.layers.0.", "linear_proj"),
        trained=("decoder.layers.0.self_attention.linear_qkv",),
        without_backward=("embedding",),
        fuses_gradients=True,
    ),
    Configuration(
        name="fused_gradient_accumulation",
        options=_SHARED,
        stock=_EXPERT_REASON,
        sizes={"has_tied_embeddings": True},
        fuses_gradients=True,
    ),
    Configuration(
        name="converted_in_place", way="convert", options={"mtp_num_layers": 1}, repeated=("output_layer", "embedding")
    ),
    Configuration(name="deterministic", options={"deterministic_mode": True}, is_repeatable=True),
    Configuration(name="variable_lengths", micro_batches=(16, 32, 8)),
    Configuration(name="packed_sequences", micro_batches=(24, 24), packed=(5, 11, 8)),
    Configuration(name="forward_only", forward_only=True),
    Configuration(
        name="sequence_parallel_off",
        options={"sequence_parallel": False},
        stock=("the embedding all-reduces",),
    ),
    Configuration(
        name="moe_expert_parallel",
        options=_EXPERTS | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        tensor=2,
        layout={"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        stock=_EXPERT_REASON,
    ),
    Configuration(name="context_parallel", tensor=1, context=2, stock=_ONE_RANK),
    Configuration(name="context_parallel_mla", tensor=1, context=2, options=LATENT, stock=_ONE_RANK),
    Configuration(
        name="context_parallel_recompute",
        tensor=1,
        context=2,
        options=FULL,
        recomputed=("self_attention",),
        stock=_ONE_RANK,
    ),
    Configuration(name="tensor_and_context_parallel", tensor=2, context=2, least_ranks=4),
    Configuration(
        name="pipeline", tensor=2, least_ranks=4, layout=_PIPELINE, options=_PIPELINE, micro_batches=(16,) * 4
    ),
    Configuration(
        name="pipeline_interleaved",
        tensor=2,
        least_ranks=4,
        sizes={"num_layers": 4},
        layout=_PIPELINE | {"virtual_pipeline_model_parallel_size": 2},
        options=_PIPELINE,
        virtual_stages=2,
        micro_batches=(16,) * 4,
    ),
    Configuration(
        name="pipeline_variable_lengths",
        tensor=2,
        least_ranks=4,
        layout=_PIPELINE,
        options=_PIPELINE | {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"},
        micro_batches=(16, 32, 8),
    ),
    Configuration(
        name="distributed_optimizer",
        variant="layer_norm_and_bias",
        tensor=2,
        least_ranks=4,
        optimizer="distributed",
    ),
)


def require_ranks(num_ranks: int) -> None:
    """Raise ConfigError for a number of ranks that no configuration is made for."""
    if num_ranks not in (2, 4):
        raise ConfigError(f"the configurations are made for 2 or 4 ranks, not for {num_ranks}")


def choose_configurations(num_ranks: int, names: list[str] | None = None) -> list[Configuration]:
    """Those that run on `num_ranks` ranks: all, or the named ones.

    Raises ConfigError for a number of ranks or a name that there is nothing for.
    """
    require_ranks(num_ranks)
    possible = [each for each in CONFIGURATIONS if each.least_ranks <= num_ranks]
    if names is None:
        return possible
    by_name = {each.name: each for each in CONFIGURATIONS}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"no configuration is called {', '.join(unknown)}; there are {', '.join(by_name)}")
    too_large = [name for name in names if by_name[name] not in possible]
    if too_large:
        raise ConfigError(f"{', '.join(too_large)}: needs 4 ranks, there are {num_ranks}")
    return [each for each in possible if each.name in names]
