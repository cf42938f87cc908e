"""Checks of configurations, specs and whole models. Each is run on every rank of one spawn."""

import ast
import copy
import os
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from commfuse_megatron import OverlapConfig
from commfuse_megatron.config import CONFIG_VARIABLE, LinearConfig, PassConfig
from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plugin import (
    CommFuseColumnParallelLinear,
    CommFuseRowParallelLinear,
    apply_to_spec,
    convert_model,
    model_report,
)
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.spec import gpt_layer_spec
from commfuse_megatron.testing.gpt import SmallGPT, build_gpt, loss_of, transformer_config
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import (
    IN,
    OUT,
    assert_equal,
    assert_overlapped_as_stock,
    build,
    config,
    example_input,
    pair,
    run,
)

_ONE_AFTER_THE_OTHER = PassConfig(path="sequential")
SEQUENTIAL = OverlapConfig(linear=LinearConfig(fprop=_ONE_AFTER_THE_OTHER, dgrad=_ONE_AFTER_THE_OTHER))


def check_report(group_size: int) -> None:
    model = torch.nn.ModuleDict(
        {
            "stock": build("row", RowParallelLinear, config(group_size)),
            "ours": build("row", CommFuseRowParallelLinear, config(group_size)),
            "off": build("column", CommFuseColumnParallelLinear, config(group_size)),
            "sequential": build("column", CommFuseColumnParallelLinear, config(group_size), overlap_config=SEQUENTIAL),
        }
    )
    model["off"].sequence_parallel = False
    before = {layer.name: layer for layer in model_report(model).layers}
    assert before["ours"].path == before["off"].path == "not called yet"
    assert before["ours"].reasons == ()
    assert "sequence_parallel is off" in before["off"].reasons[0]
    x = example_input("row", group_size)
    model["ours"](x)
    report = model_report(model)
    after = {layer.name: layer for layer in report.layers}
    assert (after["stock"].path, after["ours"].path) == ("stock", "overlapped")
    assert "Megatron's own class" in after["stock"].reasons[0]
    assert (report.overlapped_calls, report.stock_calls) == (1, 0)
    assert {record.op for record in report.ops} >= {"linear_reduce_scatter"}
    model["ours"].sequence_parallel = False
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
    model = torch.nn.ModuleDict({"row": build("row", CommFuseRowParallelLinear, switched_off)})
    model["row"](example_input("row", group_size))
    assert str(model_report(model)).splitlines() == [
        "row  stock: config.commfuse is False: switched off",
        "1 layers (1 of them stock): 0 forward passes overlapped, 0 sequential, 1 on Megatron's own path",
    ]


def check_config_file(group_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ring.yaml"
        file.write_text("linear: {fprop: {algorithm: ring}}\n", encoding="utf-8")
        transformer = config(group_size)
        transformer.commfuse_config = str(file)
        x = example_input("row", group_size)
        stock, ours = pair("row", group_size, transformer)
        assert_equal(run(stock, x), run(ours, x))
        assert state_of(ours).context.config.linear.fprop.algorithm == "ring"
        os.environ[CONFIG_VARIABLE] = str(file)
        try:
            _, ours = pair("row", group_size)
            ours(x)
        finally:
            del os.environ[CONFIG_VARIABLE]
        assert state_of(ours).context.config.linear.fprop.algorithm == "ring"
        file.write_text("linear: {fprop: {algorithm: ring, chunks_per_shard: 2}}\n", encoding="utf-8")
        ours(x)
        assert state_of(ours).context.config.linear.fprop.chunks_per_shard is None, "read when the layer was built"


def check_a_wrong_config_file_is_found_while_building(group_size: int) -> None:
    # Fails without reading the file in the constructor and in convert_model: the first call would raise.
    for kind, cls in (("column", CommFuseColumnParallelLinear), ("row", CommFuseRowParallelLinear)):
        transformer = config(group_size)
        stock, _ = pair(kind, group_size, transformer)
        model = torch.nn.Sequential(stock)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "wrong.yaml"
            transformer.commfuse_config = str(file)
            for words in ("cannot be read", 'unknown key "liner"'):
                with pytest.raises(ConfigError, match=words):
                    build(kind, cls, transformer)
                with pytest.raises(ConfigError, match=words):
                    convert_model(model)
                assert type(stock) is not cls, "nothing was converted"
                file.write_text("liner: {}\n", encoding="utf-8")
        build(kind, cls, transformer, overlap_config=OverlapConfig())
        transformer.commfuse = False
        build(kind, cls, transformer)
        assert type(convert_model(model)[0]) is cls


def check_deterministic_mode_never_measures(group_size: int) -> None:
    transformer = config(group_size)
    transformer.deterministic_mode = True
    layers = [build("column", CommFuseColumnParallelLinear, transformer) for _ in range(2)]
    for layer in layers:
        for _ in range(2):
            layer(example_input("column", group_size))
    context = state_of(layers[0]).context
    assert context.config.plan.measure == "never"
    assert state_of(layers[1]).context is context
    ordinary = build("column", CommFuseColumnParallelLinear, config(group_size))
    ordinary(example_input("column", group_size))
    assert state_of(ordinary).context.config.plan.measure == "auto"


def check_layers_share_a_context(group_size: int) -> None:
    x = example_input("row", group_size)
    layers = [pair("row", group_size)[1] for _ in range(3)]
    layers[2] = build("row", CommFuseRowParallelLinear, config(group_size), overlap_config=OverlapConfig(record=True))
    for layer in layers:
        layer(x)
    contexts = [state_of(layer).context for layer in layers]
    assert contexts[0] is contexts[1]
    assert contexts[2] is not contexts[0]
    assert contexts[2].config.record


def check_nothing_but_scalars_on_the_config(group_size: int) -> None:
    transformer = config(group_size)
    before = {name: id(value) for name, value in vars(transformer).items()}
    _, ours = pair("row", group_size, transformer)
    run(ours, example_input("row", group_size))
    assert {name: id(value) for name, value in vars(transformer).items()} == before
    assert vars(copy.deepcopy(transformer)).keys() == before.keys()


def check_state_is_not_copied(group_size: int) -> None:
    overlap = OverlapConfig(record=True)
    ours = build("row", CommFuseRowParallelLinear, config(group_size), overlap_config=overlap)
    run(ours, example_input("row", group_size))
    for copied in (copy.deepcopy(state_of(ours)), pickle.loads(pickle.dumps(state_of(ours)))):
        assert copied.overlap_config == overlap
        assert (copied.context, copied.overlapped_calls) == (None, 0)
    assert not any("commfuse" in key for key in ours.state_dict())


def check_a_switch_that_is_no_switch_is_refused(group_size: int) -> None:
    """ "false" is true to Python."""
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=False)
    for flag in ("false", "off", "1", 2):
        model.config.commfuse = flag
        with pytest.raises(ConfigError, match="is True or False; got"):
            convert_model(model)


def check_spec_carries_config(group_size: int) -> None:
    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    overlap = OverlapConfig(record=True)
    model = build_gpt(gpt, transformer_config(gpt, group_size), overlap=overlap)
    loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1)))
    assert all(
        state_of(m).context.config == overlap for m in model.modules() if type(m).__name__.endswith("ParallelLinear")
    )


def check_whole_model_evaluates_and_decodes(group_size: int) -> None:
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    stock, ours = (build_gpt(gpt, transformer_config(gpt, group_size), overlap=o).eval() for o in (False, True))
    with torch.no_grad():
        assert abs(loss_of(ours, tokens) - loss_of(stock, tokens)) <= 1e-13
        assert model_report(ours).stock_calls == 0
        for model in (stock, ours):
            set_model_to_sequence_parallel(model, False)
        one_token = tokens[:, :2]
        assert abs(loss_of(ours, one_token) - loss_of(stock, one_token)) <= 1e-13
    assert {layer.path for layer in model_report(ours).layers} == {"mixed"}


def check_experts_stay_stock(group_size: int) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.plugin.spec import block_spec

    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    losses, gradients = [], []
    for overlap in (False, True):
        transformer = transformer_config(
            gpt,
            group_size,
            num_moe_experts=4,
            moe_ffn_hidden_size=32,
            moe_router_topk=2,
            moe_token_dispatcher_type="alltoall",
            moe_shared_expert_intermediate_size=32,
            expert_tensor_parallel_size=group_size,
        )
        torch.manual_seed(7)
        spec = apply_to_spec(get_gpt_layer_local_spec(num_experts=4))
        model = GPTModel(
            config=transformer,
            transformer_layer_spec=block_spec(spec, transformer),
            vocab_size=256,
            max_sequence_length=64,
            position_embedding_type="rope",
        )
        transformer.commfuse = overlap
        loss = loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1)))
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert abs(losses[1] - losses[0]) <= 1e-13
    assert_equal(*gradients)
    paths = {layer.name: layer for layer in model_report(model).layers}
    experts = [layer for name, layer in paths.items() if "local_experts" in name]
    assert len(experts) == 8
    assert all(layer.path == "stock" and "expert" in layer.reasons[0] for layer in experts if layer.stock_calls)
    shared = [layer for name, layer in paths.items() if "shared_experts" in name]
    assert [layer.path for layer in shared] == ["overlapped", "overlapped"]


def check_spec_for_the_command_line(group_size: int) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    gpt = SmallGPT(dtype=torch.float64)
    transformer = transformer_config(gpt, group_size)
    # Of Megatron's GPTModelConfig, which only 0.19 has, nothing else is looked at here.
    wanted = SimpleNamespace(
        transformer=transformer, restore_modelopt_state=False, use_transformer_engine_op_fuser=False
    )
    spec = gpt_layer_spec(wanted, vp_stage=None)
    model = GPTModel(
        config=transformer,
        transformer_layer_spec=spec,
        vocab_size=256,
        max_sequence_length=64,
        position_embedding_type="rope",
    )
    loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))).backward()
    paths = [layer.path for layer in model_report(model).layers]
    assert paths.count("overlapped") == 8
    assert paths.count("stock") == 2, "a spec reaches neither embedding nor output layer"


def check_mamba_projections(group_size: int) -> None:
    """in_proj and out_proj built as MambaMixer builds them; the mixer itself needs CUDA extensions."""
    from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
    from megatron.core.transformer.spec_utils import build_module

    stock_spec = MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
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
        layers = []
        for spec in (stock_spec, apply_to_spec(stock_spec, OverlapConfig())):
            torch.manual_seed(3)
            layer = build_module(getattr(spec, projection), *sizes[projection], **options)
            layer.weight.partition_sizes = [4, 4]  # as the mixer does
            layers.append(layer)
        stock, ours = layers
        assert type(ours).__qualname__.startswith("CommFuse")
        x = example_input(kind, group_size)
        assert_overlapped_as_stock(stock, ours, x)
        assert state_of(ours).name == f"decoder.layers.0.mixer.{projection}"


def _keywords_of_the_mixer(projection: str) -> set[str | None]:
    from megatron.core.ssm import mamba_mixer

    tree = ast.parse(Path(mamba_mixer.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        is_build = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "build_module"
        if is_build and getattr(node.args[0], "attr", "") == projection:
            return {keyword.arg for keyword in node.keywords}
    raise AssertionError(f"MambaMixer does not build {projection}")


def check_learned_positions_keep_the_embedding_stock(group_size: int) -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.plugin.spec import block_spec, local_layer_spec

    gpt = SmallGPT(dtype=torch.float64, num_layers=1)
    losses = []
    for overlap in (False, True):
        transformer = transformer_config(gpt, group_size)
        torch.manual_seed(7)
        spec = block_spec(local_layer_spec(), transformer, with_torch_norm=True)
        model = GPTModel(transformer, spec, vocab_size=256, max_sequence_length=64)
        if overlap:
            convert_model(model)
        losses.append(loss_of(model, torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))))
    assert abs(losses[1] - losses[0]) <= 1e-13
    layers = {layer.name: layer for layer in model_report(model).layers}
    embedding = layers.pop("embedding.word_embeddings")
    assert (embedding.path, embedding.stock_calls) == ("stock", 1)
    assert "positions are added first" in embedding.reasons[0]
    assert {layer.path for layer in layers.values()} == {"overlapped"}


def check_fusion_without_apex(group_size: int) -> None:
    # Megatron's constructors raise without Apex; ours build, and calls on Megatron's own path add into main_grad too.
    for kind, cls in (("column", CommFuseColumnParallelLinear), ("row", CommFuseRowParallelLinear)):
        stock, _ = pair(kind, group_size, skip_bias_add=True)
        transformer = config(group_size, gradient_accumulation_fusion=True)
        ours = build(kind, cls, transformer, skip_bias_add=True)
        assert ours.gradient_accumulation_fusion
        assert ours.config is transformer
        assert transformer.gradient_accumulation_fusion
        ours.load_state_dict(stock.state_dict())
        x = example_input(kind, group_size)
        main_grad = ours.weight.main_grad = torch.zeros_like(ours.weight)
        total = torch.zeros_like(main_grad)
        for is_overlapped in (True, False):
            for layer in (stock, ours):
                layer.explicit_expert_comm = not is_overlapped
            ours.weight.grad_added_to_main_grad = False
            expected, found = run(stock, x), run(ours, x)
            total += expected.pop("gradient of weight")
            dummy = found.pop("gradient of weight")
            assert dummy.shape == main_grad.shape
            assert ours.weight.grad_added_to_main_grad is True
            assert_equal(expected, found)
            assert_equal({"main_grad": total}, {"main_grad": main_grad})
        assert (state_of(ours).overlapped_calls, sum(state_of(ours).stock_calls.values())) == (1, 1)


test_configurations = make_cpu_test(2, checks_of_module(__name__, 2))
