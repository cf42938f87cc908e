"""The norm alone, and fused with a linear against a norm spelled out and Megatron's linear, float64 on the CPU."""

import itertools

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import CommFuseLayerNormColumnParallelLinear, CommFuseNorm
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.norm_linear import normalized
from tests.megatron import layers
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import EPS, IN, OUT, VARIANTS, assert_equal, assert_overlapped, norm_config, norm_pair, run


def check_norm_and_linear(group_size: int) -> None:
    for variant, skip_bias_add in itertools.product(VARIANTS, (False, True)):
        layer = norm_pair(group_size, transformer=norm_config(group_size, **variant), skip_bias_add=skip_bias_add)
        assert layer.assert_overlapped()["gradient of layer_norm_weight"].abs().min() > 0


def check_norm_output_is_returned_as_transformer_engine_does(group_size: int) -> None:
    """Fails without the attributes: an adapter beside the linear was given the input of the norm, and said nothing."""
    for is_gathered, skip_bias_add, is_switched_off, is_frozen in itertools.product((False, True), repeat=4):
        transformer = norm_config(group_size, **VARIANTS[0])
        transformer.commfuse = not is_switched_off
        layer = norm_pair(group_size, transformer=transformer, skip_bias_add=skip_bias_add)
        layer.set(return_layernorm_output=True, return_layernorm_output_gathered=is_gathered)
        layer.train(not is_frozen, "weight", "bias")
        if is_switched_off:
            layer.assert_stock("switched off")
        else:
            layer.assert_overlapped()


def check_norm_output_under_autocast(group_size: int) -> None:
    """Fails without a cast: as in Transformer Engine, what is returned has the dtype that the linear computes in."""
    for is_gathered, is_switched_off in itertools.product((False, True), repeat=2):
        transformer = norm_config(group_size, dtype=torch.float32)
        transformer.commfuse = not is_switched_off
        layer = norm_pair(group_size, transformer=transformer)
        layer.set(return_layernorm_output=True, return_layernorm_output_gathered=is_gathered)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            ((expected, expected_normed), _), ((output, normed), _) = (each(layer.x) for each in layer[:2])
        assert_equal(
            {"output": expected, "normed": expected_normed.bfloat16()},
            {"output": output, "normed": normed},
            tolerance=2**-7,
        )
        assert state_of(layer.ours).overlapped_calls == (not is_switched_off)


def check_norm_and_linear_on_changing_lengths(group_size: int) -> None:
    layer = norm_pair(group_size)
    for rows in (4, 1, 7, 4):
        layer._replace(x=layers.example_input("column", group_size, rows)).compare()
    assert_overlapped(layer.ours, calls=4)


def check_norm_and_linear_evaluates(group_size: int) -> None:
    layer = norm_pair(group_size).set(training=False)
    with torch.no_grad():
        layer.compare_outputs()
    assert_overlapped(layer.ours)


def check_norm_and_linear_without_bias_and_frozen(group_size: int) -> None:
    layer = norm_pair(group_size).set(bias=None)
    layer.compare()
    layer.train(False, "weight")
    layer.compare()
    layer.train(True, "weight")
    layer.train(False, "layer_norm_weight")
    assert layer.compare()["gradient of layer_norm_weight"] is None
    assert_overlapped(layer.ours, calls=3)


def check_norm_and_linear_on_megatrons_path(group_size: int) -> None:
    transformer = norm_config(group_size, normalization="LayerNorm")
    layer = norm_pair(group_size, transformer=transformer)
    transformer.commfuse = False
    layer.assert_stock("switched off")
    transformer.commfuse = True
    layer.set(sequence_parallel=False)
    layer.compare()  # its input's gradient is reduced outside
    assert any("allreduce_dgrad are off" in reason for reason in state_of(layer.ours).stock_calls)
    assert state_of(layer.ours).overlapped_calls == 0


def check_norm_and_linear_adds_into_main_grad(group_size: int) -> None:
    # Megatron's own layer needs Apex for this; the fused layer of Transformer Engine, whose place ours takes, does not.
    transformer = norm_config(group_size, gradient_accumulation_fusion=True)
    stock, ours, x = norm_pair(group_size, transformer=transformer)
    assert ours.gradient_accumulation_fusion
    assert ours.config is transformer
    expected, weight = run(stock, x), ours.weight
    once = expected.pop("gradient of weight")
    weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
    for calls, is_overlapped in ((1, True), (2, False), (3, True)):
        transformer.commfuse = is_overlapped
        found = run(ours, x)
        assert weight.grad_added_to_main_grad
        assert_equal({"main_grad": 1 + calls * once}, {"main_grad": weight.main_grad})
        # a dummy, for the hooks of the data-parallel wrapper
        assert found.pop("gradient of weight").shape == weight.shape
        assert_equal(expected, found)
    del weight.grad_added_to_main_grad
    transformer.commfuse = False
    assert run(ours, x)["gradient of weight"] is None
    assert_equal({"main_grad": 1 + 4 * once}, {"main_grad": weight.main_grad})
    assert state_of(ours).overlapped_calls == 2


def check_row_adds_into_main_grad_on_megatrons_path(group_size: int) -> None:
    stock, ours, x = layers.pair("row", group_size)
    ours.gradient_accumulation_fusion, ours.config.commfuse = True, False
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    assert run(ours, x)["gradient of weight"] is None
    assert_equal({"main_grad": run(stock, x)["gradient of weight"]}, {"main_grad": ours.weight.main_grad})


def check_norm_and_linear_is_laid_out_like_transformer_engines(group_size: int) -> None:
    for variant in VARIANTS:
        normalization, is_zero_centered = variant.values()
        norms = ["layer_norm_weight", "layer_norm_bias"][: 2 if normalization == "LayerNorm" else 1]
        cls, transformer = CommFuseLayerNormColumnParallelLinear, norm_config(group_size, **variant)
        options = {"is_expert": False, "skip_bias_add": True, "stride": 2, "tp_comm_buffer_name": "fc1"}
        ours = layers.build("column", cls, transformer, **options)
        parameters = dict(ours.named_parameters())
        assert list(parameters) == [*norms, "weight", "bias"]
        assert list(ours.state_dict()) == [*parameters, "_extra_state"]
        for name, parameter in parameters.items():
            is_norm = name in norms
            assert getattr(parameter, "sequence_parallel", False) is is_norm, name
            assert getattr(parameter, "tensor_model_parallel", False) is not is_norm, name
            assert parameter.shape[0] == (IN if is_norm else OUT // group_size), name
        assert ours.weight.partition_stride == 2
        assert parameters["layer_norm_weight"].eq(0.0 if is_zero_centered else 1.0).all()
        assert (ours.layer_norm_bias is None) == (normalization == "RMSNorm")
        found = (ours.eps, ours.normalization, ours.zero_centered_gamma, ours.in_features, ours.out_features)
        assert found == (EPS, normalization, is_zero_centered, IN, OUT // group_size)
        assert (ours.use_bias, ours.te_return_bias, ours.ub_name, ours.stride) == (True, True, "fc1", 2)
        assert (ours.tp_size, ours.tp_rank) == (group_size, ours.tp_group.rank())
        assert not hasattr(ours, "parallel_mode"), "shared experts would take it for Transformer Engine's"


def check_norm_and_linear_sharded_state(group_size: int) -> None:
    ours = norm_pair(group_size, transformer=norm_config(group_size, normalization="LayerNorm")).ours
    rank = ours.tp_group.rank()
    replica = (0, rank, dist.get_rank() // group_size)
    shards = {"weight": (IN,), "bias": ()}
    for metadata in (None, {}):
        entries = ours.sharded_state_dict("fc1.", ((0, 3, 5),), metadata)
        names = ["layer_norm_weight", "layer_norm_bias", *shards, "_extra_state"]
        assert list(entries) == [f"fc1.{name}" for name in names]
        for name in names[:2]:
            entry = entries[f"fc1.{name}"]
            assert (entry.global_shape, entry.global_offset, entry.replica_id) == ((5, IN), (3, 0), replica)
        for name, rest in shards.items():
            entry = entries[f"fc1.{name}"]
            offset = (3, rank * OUT // group_size, *(0 for _ in rest))
            assert (entry.global_shape, entry.global_offset) == ((5, OUT, *rest), offset)
        extra = entries["fc1._extra_state"]
        assert (extra.key, extra.data, extra.replica_id) == ("fc1._extra_state", None, replica)


def check_norm_and_linear_takes_transformer_engines_state(group_size: int) -> None:
    ours = norm_pair(group_size).ours
    state = {name: torch.full_like(value, 2.0) for name, value in ours.state_dict().items() if value is not None}
    ours.load_state_dict({**state, "_extra_state": torch.empty(0, dtype=torch.uint8)})  # without FP8
    assert all(parameter.eq(2.0).all() for parameter in ours.parameters())
    ours.load_state_dict(state)
    for name, value in ours.state_dict().items():
        assert (value is None) == (name == "_extra_state")


def check_norm_and_linear_refuses(group_size: int) -> None:
    cls, transformer = CommFuseLayerNormColumnParallelLinear, norm_config(group_size)
    for refused in ("gather_output", "is_expert", "skip_weight_param_allocation"):
        with pytest.raises(ConfigError, match=refused):
            layers.build("column", cls, transformer, **{"is_expert": False, refused: True})
    transformer.normalization = "L2Norm"
    with pytest.raises(UnsupportedError, match="L2Norm"):
        layers.build("column", cls, transformer, is_expert=False)


test_on_four_ranks = make_cpu_test(4, checks_of_module(__name__, 4, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_zero_centered_weights_are_not_rounded_away(normalization: str, dtype: torch.dtype) -> None:
    # One plus a weight this small is one in bfloat16; the result must be the fp64 one rounded once.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 32, generator=generator).to(dtype)
    weight = (torch.randn(32, generator=generator) * 2**-8).to(dtype)
    bias = torch.randn(32, generator=generator).to(dtype) if normalization == "LayerNorm" else None
    found = normalized(x, weight, bias, 1e-5, normalization, is_zero_centered=True)
    wide = x.double()
    centered = wide if bias is None else wide - wide.mean(-1, keepdim=True)
    exact = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + 1e-5) * (1 + weight.double())
    exact = exact if bias is None else exact + bias.double()
    assert found.dtype == dtype
    half_unit = exact.abs() * torch.finfo(dtype).eps / 2
    # fp32 arithmetic adds a few units of 1.2e-7 to the rounding of the result
    assert ((found.double() - exact).abs() <= 1.01 * half_unit + 2e-6).all()


def test_mixed_dtypes_are_computed_in_the_wider_one() -> None:
    x, weight = torch.randn(8, 16).bfloat16(), torch.randn(16)
    found = normalized(x, weight, None, 1e-5, "RMSNorm", is_zero_centered=False)
    exact = normalized(x.float(), weight, None, 1e-5, "RMSNorm", is_zero_centered=False)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.parametrize(("normalization", "cls", "names"), [
    ("LayerNorm", torch.nn.LayerNorm, ["weight", "bias"]), ("RMSNorm", torch.nn.RMSNorm, ["weight"]),
])  # fmt: skip
@pytest.mark.parametrize("is_sequence_parallel", [True, False])
def test_norm(normalization: str, cls: type, names: list[str], is_sequence_parallel: bool) -> None:
    transformer = layers.config(2, normalization=normalization, dtype=torch.bfloat16)
    transformer.sequence_parallel = is_sequence_parallel
    norm = CommFuseNorm(config=transformer, hidden_size=8, eps=1e-3)
    assert isinstance(norm, cls)
    assert norm.eps == 1e-3
    parameters = dict(norm.named_parameters())
    assert list(parameters) == names
    for parameter in parameters.values():
        assert parameter.dtype == torch.bfloat16
        assert parameter.sequence_parallel is is_sequence_parallel


@pytest.mark.parametrize(("option", "value", "words"), [
    ("layernorm_zero_centered_gamma", True, "layernorm_zero_centered_gamma"),
    ("persist_layer_norm", True, "persist_layer_norm"),
    ("memory_efficient_layer_norm", True, "memory_efficient_layer_norm"),
    ("normalization", "L2Norm", "LayerNorm and RMSNorm"),
])  # fmt: skip
def test_options_that_torchs_norms_lack(option: str, value: object, words: str) -> None:
    transformer = layers.config(2)
    setattr(transformer, option, value)
    with pytest.raises(UnsupportedError, match=words):
        CommFuseNorm(config=transformer, hidden_size=8)
