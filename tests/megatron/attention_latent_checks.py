"""Checks of multi-latent attentions that stay Megatron's own, with the reason. Each is run on every rank."""

from typing import Any

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import AttentionConfig
from commfuse_megatron.plugin import CommFuseMLASelfAttention, convert_model, model_report
from commfuse_megatron.plugin.attention import _given, _QuerySplit, attention_unsupported_reason
from commfuse_megatron.plugin.compat import MLASelfAttention
from tests.megatron.attention_bodies import build_latent
from tests.megatron.attention_checks import AUTO, QUERY_SPLIT, assert_equal, run


def attentions_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, MLASelfAttention)]


def assert_latent_stays(group_size: int, words: str, overlap: OverlapConfig, **options: Any) -> None:
    """The model runs as stock does, and says why its attentions are not split; projections are overlapped still."""
    model = build_latent(group_size, overlap, **options)
    assert_equal(run(model, with_mask=True), run(build_latent(group_size, None, **options), with_mask=True))
    report = model_report(model)
    assert len(report.attentions) == 2
    for each in report.attentions:
        assert (each.layer, each.path, each.overlapped_calls) == ("CommFuseMLASelfAttention", "stock", 0)
        assert all(words in reason for reason in each.reasons), each.reasons
    projections = [layer for layer in report.layers if layer.name.endswith("linear_proj")]
    assert [layer.path for layer in projections] == ["overlapped"] * 2


def check_latent_attention_as_planned_and_as_asked_for(group_size: int) -> None:
    row_parallel = OverlapConfig(attention=AttentionConfig(path="row_parallel"))
    assert_latent_stays(group_size, "attention.path is row_parallel", row_parallel)
    assert_latent_stays(group_size, "planned as row_parallel: default on the CPU", AUTO)


def check_recomputed_up_projections(group_size: int) -> None:
    """Fails without the reason: Megatron frees query, key and value before the projection is called."""
    options = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    assert_latent_stays(group_size, "recompute_modules has mla_up_proj", QUERY_SPLIT, **options)


def check_latent_core_attention_recomputed(group_size: int) -> None:
    options = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    assert_latent_stays(group_size, "recomputed by itself", QUERY_SPLIT, **options)


def check_calls_of_latent_attention_that_say_no(group_size: int) -> None:
    attention = attentions_of(build_latent(group_size, QUERY_SPLIT))[0]
    assert attention_unsupported_reason(attention) is None
    for name, words in (("inference_context", "inference"), ("packed_seq_params", "packed")):
        assert words in str(attention_unsupported_reason(attention, {name: object()}))
    attention.cache_mla_latents = True
    assert "latents are cached" in str(attention_unsupported_reason(attention))


def check_arguments_by_position_have_latent_attentions_names(group_size: int) -> None:
    attention = attentions_of(build_latent(group_size, QUERY_SPLIT))[0]
    given = _given(super(_QuerySplit, attention).forward, (1, *[None] * 8, 2), {})
    assert {name: value for name, value in given.items() if value is not None} == {
        "hidden_states": 1,
        "packed_seq_params": 2,
    }


def check_converted_latent_attention(group_size: int) -> None:
    model = build_latent(group_size, None)
    expected = run(model)
    assert all("converted" in each.reasons[0] for each in model_report(model).attentions)
    convert_model(model, QUERY_SPLIT)
    assert {type(each) for each in attentions_of(model)} == {CommFuseMLASelfAttention}
    model.zero_grad(set_to_none=True)
    assert_equal(run(model), expected)
    assert {each.path for each in model_report(model).attentions} == {"overlapped"}


def check_somebody_elses_latent_attention(group_size: int) -> None:
    model = build_latent(group_size, None)
    for each in attentions_of(model):
        each.__class__ = type("OtherAttention", (MLASelfAttention,), {})
    convert_model(model, QUERY_SPLIT)
    for each in model_report(model).attentions:
        assert each.path == "stock"
        assert "OtherAttention is not among the attentions" in each.reasons[0]
