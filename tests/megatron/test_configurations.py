"""Checks of configurations, specs and whole models. Each is run on every rank of one spawn."""

import ast
import copy
import pickle
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ssm import mamba_mixer
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import set_model_to_sequence_parallel

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import CONFIG_VARIABLE, LinearConfig, PassConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import CommFuseNorm, apply_to_spec, convert_model, model_report
from commfuse_megatron.plugin.compat import ColumnParallelLinear, DotProductAttention, RowParallelLinear
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.spec import block_spec, gpt_layer_spec, local_layer_spec
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.megatron import layers
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import IN, KINDS, OUR, OUT, Pair, assert_equal, build, config, example_input, pair, run
from tests.megatron.models import TINY, draw_tokens, loss_and_gradients, tiny_gpt, with_attention_and_norm

TOKENS = draw_tokens()
_ONE_AFTER_THE_OTHER = PassConfig(path="sequential")
SEQUENTIAL = OverlapConfig(linear=LinearConfig(fprop=_ONE_AFTER_THE_OTHER, dgrad=_ONE_AFTER_THE_OTHER))


def check_report(group_size: int) -> None:
    model = torch.nn.ModuleDict(
        {
            "stock": build("row", RowParallelLinear, config(group_size)),
            "ours": build("row", OUR["row"], config(group_size)),
            "off": build("column", OUR["column"], config(group_size)),
            "sequential": build("column", OUR["column"], config(group_size), overlap_config=SEQUENTIAL),
        }
    )
    model["off"].sequence_parallel = False
    before = {layer.name: layer for layer in model_report(model).layers}
    assert before["ours"].path == before["off"].path == "not called yet"
    assert before["ours"].reasons == ()
    assert "sequence_parallel and allreduce_dgrad are off" in before["off"].reasons[0]
    x = example_input("row", group_size)
    model["ours"](x)
    report = model_report(model)
    after = {layer.name: layer for layer in report.layers}
    assert (after["stock"].path, after["ours"].path) == ("stock", "overlapped")
    assert "Megatron's own class" in after["stock"].reasons[0]
    assert (report.overlapped_calls, report.stock_calls) == (1, 0)
    assert {record.op for record in report.ops} >= {"linear_reduce_scatter"}
    model["ours"].config.commfuse = False
    model["ours"](x)
    assert model_report(model).layers[1].path == "mixed"
    assert report.to_dict()["layers"][1]["overlapped_calls"] == 1
    for _ in range(2):
        model["sequential"](example_input("column", group_size))
    report = model_report(model)
    layer = report.layers[3]
    assert (layer.path, layer.overlapped_calls, layer.stock_calls, layer.sequential_calls) == ("sequential", 0, 0, 2)
    assert (layer.reasons, layer.sequential_reasons) == ((), ("sequential: forced by the configuration",))
    assert (report.overlapped_calls, report.sequential_calls, report.stock_calls) == (1, 2, 1)
    first, *reasons = report.lines()
    assert first == (
        "4 layers (1 of them stock): 1 forward passes overlapped, 2 sequential, 1 on Megatron's own path;"
        " calls of 1 layers of Megatron's own classes are not counted"
    )
    printed = str(report).splitlines()
    assert [line.split()[:2] for line in printed[:3]] == [["stock", "stock:"], ["ours", "mixed:"], ["off", "not"]]
    assert printed[3:] == ["sequential  sequential: sequential: forced by the configuration", first]
    assert reasons[0] == "sequential: forced by the configuration (sequential)"
    assert any("Megatron's own class" in reason for reason in reasons)
    model["sequential"].sequence_parallel = False
    model["sequential"](example_input("column", group_size))
    assert model_report(model).layers[3].path == "mixed"


def check_report_of_a_stock_model(group_size: int) -> None:
    """Calls that nobody counted are not said to be none; those of layers that are switched off are counted."""
    model = torch.nn.ModuleDict({"row": build("row", RowParallelLinear, config(group_size))})
    model["row"](example_input("row", group_size))
    first, reason = model_report(model).lines()
    assert first == "1 layers (1 of them stock): Megatron's own classes, whose calls are not counted"
    assert "Megatron's own class" in reason
    assert reason.endswith(" (row)")
    switched_off = config(group_size)
    switched_off.commfuse = False
    model = torch.nn.ModuleDict({"row": build("row", OUR["row"], switched_off)})
    model["row"](example_input("row", group_size))
    assert str(model_report(model)).splitlines() == [
        "row  stock: config.commfuse is False: switched off",
        "1 layers (1 of them stock): 0 forward passes overlapped, 0 sequential, 1 on Megatron's own path",
    ]


@contextmanager
def config_file(text: str | None) -> Iterator[Path]:
    """There is none without a text."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        if text is not None:
            file.write_text(text, encoding="utf-8")
        yield file


def check_config_file(group_size: int) -> None:
    with config_file("linear: {fprop: {algorithm: ring}}\n") as file:
        transformer = config(group_size)
        transformer.commfuse_config = str(file)
        layer = pair("row", group_size, transformer=transformer)
        layer.compare()
        assert state_of(layer.ours).context.config.linear.fprop.algorithm == "ring"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CONFIG_VARIABLE, str(file))
            _, ours, x = pair("row", group_size)
            ours(x)
        assert state_of(ours).context.config.linear.fprop.algorithm == "ring"
        file.write_text("linear: {fprop: {algorithm: ring, chunks_per_shard: 2}}\n", encoding="utf-8")
        ours(x)
        assert state_of(ours).context.config.linear.fprop.chunks_per_shard is None, "read when the layer was built"


def check_a_wrong_config_file_is_found_while_building(group_size: int, kind: str) -> None:
    # Fails without reading the file in the constructor and in convert_model: the first call would raise.
    transformer = config(group_size)
    stock = build(kind, layers.STOCK[kind], transformer)
    model = torch.nn.Sequential(stock)
    for text, words in ((None, "cannot be read"), ("liner: {}\n", 'unknown key "liner"')):
        with config_file(text) as file:
            transformer.commfuse_config = str(file)
            with pytest.raises(ConfigError, match=words):
                build(kind, OUR[kind], transformer)
            with pytest.raises(ConfigError, match=words):
                convert_model(model)
            assert type(stock) is layers.STOCK[kind], "nothing was converted"
    build(kind, OUR[kind], transformer, overlap_config=OverlapConfig())
    transformer.commfuse = False
    build(kind, OUR[kind], transformer)
    assert type(convert_model(model)[0]) is OUR[kind]


def check_deterministic_mode_never_measures(group_size: int) -> None:
    transformer = config(group_size)
    transformer.deterministic_mode = True
    made = [build("column", OUR["column"], transformer) for _ in range(2)]
    for layer in made:
        for _ in range(2):
            layer(example_input("column", group_size))
    context = state_of(made[0]).context
    assert context.config.plan.measure == "never"
    assert state_of(made[1]).context is context
    _, ordinary, x = pair("column", group_size)
    ordinary(x)
    assert state_of(ordinary).context.config.plan.measure == "auto"


def check_layers_share_a_context(group_size: int) -> None:
    contexts = []
    for overlap in (None, None, OverlapConfig(record=True)):
        _, ours, x = pair("row", group_size, overlap=overlap)
        ours(x)
        contexts.append(state_of(ours).context)
    assert contexts[0] is contexts[1]
    assert contexts[2] is not contexts[0]
    assert contexts[2].config.record


def check_nothing_but_scalars_on_the_config(group_size: int) -> None:
    transformer = config(group_size)
    before = {name: id(value) for name, value in vars(transformer).items()}
    _, ours, x = pair("row", group_size, transformer=transformer)
    run(ours, x)
    assert {name: id(value) for name, value in vars(transformer).items()} == before
    assert vars(copy.deepcopy(transformer)).keys() == before.keys()


def check_state_is_not_copied(group_size: int) -> None:
    overlap = OverlapConfig(record=True)
    _, ours, x = pair("row", group_size, overlap=overlap)
    run(ours, x)
    for copied in (copy.deepcopy(state_of(ours)), pickle.loads(pickle.dumps(state_of(ours)))):
        assert copied.overlap_config == overlap
        assert (copied.context, copied.overlapped_calls) == (None, 0)
    assert not any("commfuse" in key for key in ours.state_dict())


def check_a_switch_that_is_no_switch_is_refused(group_size: int) -> None:
    """ "false" is true to Python."""
    model = tiny_gpt(group_size, False)
    for flag in ("false", "off", "1", 2):
        model.config.commfuse = flag
        with pytest.raises(ConfigError, match="is True or False; got"):
            convert_model(model)


def check_spec_carries_config(group_size: int) -> None:
    overlap = OverlapConfig(record=True)
    model = tiny_gpt(group_size, overlap)
    loss_of(model, TOKENS)
    linears = [module for module in model.modules() if type(module).__name__.endswith("ParallelLinear")]
    assert {state_of(each).context.config for each in linears} == {overlap}


def check_whole_model_evaluates_and_decodes(group_size: int) -> None:
    stock, ours = (tiny_gpt(group_size, overlap).eval() for overlap in (False, True))
    with torch.no_grad():
        assert abs(loss_of(ours, TOKENS) - loss_of(stock, TOKENS)) <= 1e-13
        assert model_report(ours).stock_calls == 0
        for model in (stock, ours):
            set_model_to_sequence_parallel(model, False)
        one_token = TOKENS[:, :2]
        assert abs(loss_of(ours, one_token) - loss_of(stock, one_token)) <= 1e-13
    assert {layer.path for layer in model_report(ours).layers} == {"mixed"}


def check_experts_stay_stock(group_size: int) -> None:
    results = []
    for overlap in (False, True):
        transformer = transformer_config(
            TINY, group_size, num_moe_experts=4, moe_ffn_hidden_size=32, moe_router_topk=2,
            moe_token_dispatcher_type="alltoall", moe_shared_expert_intermediate_size=32,
            expert_tensor_parallel_size=group_size,
        )  # fmt: skip
        torch.manual_seed(7)
        model = _gpt(transformer, block_spec(apply_to_spec(get_gpt_layer_local_spec(num_experts=4)), transformer))
        transformer.commfuse = overlap
        results.append(loss_and_gradients(model, TOKENS, with_mask=True))
    assert_equal(*results)
    found = {layer.name: layer for layer in model_report(model).layers}
    experts = [layer for name, layer in found.items() if "local_experts" in name]
    assert len(experts) == 8
    assert all(layer.path == "stock" and "expert" in layer.reasons[0] for layer in experts if layer.stock_calls)
    shared = [layer for name, layer in found.items() if "shared_experts" in name]
    assert [layer.path for layer in shared] == ["overlapped", "overlapped"]


def _gpt(transformer: Any, spec: Any, **options: Any) -> Any:
    options = {"position_embedding_type": "rope", **options}
    return GPTModel(transformer, spec, vocab_size=256, max_sequence_length=64, **options)


def check_spec_for_the_command_line(group_size: int) -> None:
    transformer = config(group_size)
    # Of Megatron's GPTModelConfig, which only 0.19 has, nothing else is looked at here.
    options = {"restore_modelopt_state": False, "use_transformer_engine_op_fuser": False}
    model = _gpt(transformer, gpt_layer_spec(SimpleNamespace(transformer=transformer, **options), vp_stage=None))
    loss_of(model, TOKENS).backward()
    paths = [layer.path for layer in model_report(model).layers]
    assert paths.count("overlapped") == 8
    assert paths.count("stock") == 2, "a spec reaches neither embedding nor output layer"


def check_a_spec_with_another_attention_and_norm(group_size: int) -> None:
    """As Transformer Engine's on GPUs: the model makes its own mask."""
    transformer, options = config(group_size), {"use_transformer_engine": False, "pp_rank": 0}
    stock = get_gpt_decoder_block_spec(transformer, normalization=transformer.normalization, **options)
    spec = with_attention_and_norm(stock, DotProductAttention, CommFuseNorm)
    gpt = SmallGPT(dtype=torch.float64)
    usual, mixed = (build_gpt(gpt, transformer, overlap=True, spec=each) for each in (None, spec))
    assert loss_of(mixed, TOKENS, with_mask=False).item() == loss_of(usual, TOKENS).item()
    assert model_report(mixed).overlapped_calls == 10


def check_mamba_projections(group_size: int) -> None:
    """in_proj and out_proj built as MambaMixer builds them; the mixer itself needs CUDA extensions."""
    stock_spec = mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    transformer = config(group_size)
    group = parallel_state.get_tensor_model_parallel_group()
    # d_inner * 2 + 2 * ngroups * d_state + nheads, as the mixer packs z, x, B, C and dt.
    sizes = {"in_proj": (IN, 2 * OUT + 2 * 8 + 4), "out_proj": (IN, OUT)}
    special = {
        "in_proj": {"gather_output": False, "skip_bias_add": False, "tp_comm_buffer_name": "fc1"},
        "out_proj": {"input_is_parallel": True, "skip_bias_add": True, "tp_comm_buffer_name": "fc2"},
    }
    for projection, kind in (("in_proj", "column"), ("out_proj", "row")):
        options = {
            "config": transformer, "init_method": torch.nn.init.normal_, "bias": False, "is_expert": False,
            "tp_group": group, "name": f"decoder.layers.0.mixer.{projection}", **special[projection],
        }  # fmt: skip
        assert set(options) == _keywords_of_the_mixer(projection), "MambaMixer passes other arguments now"
        made = []
        for spec in (stock_spec, apply_to_spec(stock_spec, OverlapConfig())):
            torch.manual_seed(3)
            layer = build_module(getattr(spec, projection), *sizes[projection], **options)
            layer.weight.partition_sizes = [4, 4]  # as the mixer does
            made.append(layer)
        stock, ours = made
        assert type(ours).__qualname__.startswith("CommFuse")
        Pair(stock, ours, example_input(kind, group_size)).assert_overlapped()
        assert state_of(ours).name == f"decoder.layers.0.mixer.{projection}"


def _keywords_of_the_mixer(projection: str) -> set[str | None]:
    tree = ast.parse(Path(mamba_mixer.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        is_build = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "build_module"
        if is_build and getattr(node.args[0], "attr", "") == projection:
            return {keyword.arg for keyword in node.keywords}
    raise AssertionError(f"MambaMixer does not build {projection}")


def check_learned_positions_keep_the_embedding_stock(group_size: int) -> None:
    losses = []
    for overlap in (False, True):
        transformer = config(group_size, num_layers=1)
        torch.manual_seed(7)
        spec = block_spec(local_layer_spec(), transformer, with_torch_norm=True)
        model = _gpt(transformer, spec, position_embedding_type="learned_absolute")
        if overlap:
            convert_model(model)
        losses.append(loss_of(model, TOKENS))
    assert abs(losses[1] - losses[0]) <= 1e-13
    found = {layer.name: layer for layer in model_report(model).layers}
    embedding = found.pop("embedding.word_embeddings")
    assert (embedding.path, embedding.stock_calls) == ("stock", 1)
    assert "positions are added first" in embedding.reasons[0]
    assert {layer.path for layer in found.values()} == {"overlapped"}


def check_fusion_without_apex(group_size: int) -> None:
    # Megatron's constructors raise without Apex; ours build, and calls on Megatron's own path add into main_grad too.
    for kind in KINDS:
        stock, _, x = pair(kind, group_size, skip_bias_add=True)
        transformer = config(group_size, gradient_accumulation_fusion=True)
        ours = build(kind, OUR[kind], transformer, skip_bias_add=True)
        assert ours.gradient_accumulation_fusion
        assert ours.config is transformer
        assert transformer.gradient_accumulation_fusion
        ours.load_state_dict(stock.state_dict())
        main_grad = ours.weight.main_grad = torch.zeros_like(ours.weight)
        total = torch.zeros_like(main_grad)
        for is_overlapped in (True, False):
            Pair(stock, ours, x).set(explicit_expert_comm=not is_overlapped)
            ours.weight.grad_added_to_main_grad = False
            expected, found = run(stock, x), run(ours, x)
            total += expected.pop("gradient of weight")
            assert found.pop("gradient of weight").shape == main_grad.shape, "a dummy"
            assert ours.weight.grad_added_to_main_grad is True
            assert_equal(expected, found)
            assert_equal({"main_grad": total}, {"main_grad": main_grad})
        assert (state_of(ours).overlapped_calls, sum(state_of(ours).stock_calls.values())) == (1, 1)


test_configurations = make_cpu_test(2, checks_of_module(__name__, 2))
