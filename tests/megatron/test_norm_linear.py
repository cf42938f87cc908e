"""The fused norm and linear against a norm spelled out and Megatron's linear, in float64 on the CPU; its rounding."""

import itertools

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.errors import ConfigError, UnsupportedError
from commfuse_megatron.plugin import CommFuseLayerNormColumnParallelLinear
from commfuse_megatron.plugin.compat import gather_rows
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.plugin.norm_linear import normalized
from tests.megatron.harness import checks_of_module, make_cpu_test
from tests.megatron.layers import (
    EPS,
    IN,
    OUT,
    VARIANTS,
    assert_equal,
    assert_norm_output,
    assert_overlapped,
    assert_stock_as_stock,
    build,
    config,
    example_input,
    norm_config,
    norm_pair,
    run,
)


def check_norm_and_linear(group_size: int) -> None:
    for variant in VARIANTS:
        for skip_bias_add in (False, True):
            transformer = norm_config(group_size, **variant)
            stock, ours = norm_pair(group_size, transformer=transformer, skip_bias_add=skip_bias_add)
            x = example_input("column", group_size)
            found = run(ours, x)
            assert found["gradient of layer_norm_weight"].abs().min() > 0
            assert_equal(run(stock, x), found)
            assert_overlapped(ours)


def check_norm_output_is_returned_as_transformer_engine_does(group_size: int) -> None:
    """Fails without the attributes: an adapter beside the linear was given the input of the norm, and said nothing."""
    for variant, is_gathered, skip_bias_add, is_switched_off, is_frozen in itertools.product(
        VARIANTS[:1], (False, True), (False, True), (False, True), (False, True)
    ):
        transformer = norm_config(group_size, **variant)
        transformer.commfuse = not is_switched_off
        stock, ours = norm_pair(group_size, transformer=transformer, skip_bias_add=skip_bias_add)
        for layer in (stock, ours):
            layer.weight.requires_grad_(not is_frozen)
            layer.bias.requires_grad_(not is_frozen)
        assert_norm_output(stock, ours, is_gathered=is_gathered, is_overlapped=not is_switched_off)


def check_norm_output_under_autocast(group_size: int) -> None:
    """Fails without a cast: as in Transformer Engine, what is returned has the dtype that the linear computes in."""
    for is_gathered, is_switched_off in itertools.product((False, True), repeat=2):
        transformer = norm_config(group_size, dtype=torch.float32)
        transformer.commfuse = not is_switched_off
        stock, ours = norm_pair(group_size, transformer=transformer)
        ours.return_layernorm_output, ours.return_layernorm_output_gathered = True, is_gathered
        x = example_input("column", group_size, dtype=torch.float32)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            expected, ((output, normed), _) = stock(x)[0], ours(x)
        expected_normed = gather_rows(stock.normed, stock.tp_group) if is_gathered else stock.normed
        assert_equal(
            {"output": expected, "normed": expected_normed.bfloat16()},
            {"output": output, "normed": normed},
            tolerance=2**-7,
        )
        assert state_of(ours).overlapped_calls == (not is_switched_off)


def check_norm_and_linear_on_changing_lengths(group_size: int) -> None:
    stock, ours = norm_pair(group_size)
    for rows in (4, 1, 7, 4):
        x = example_input("column", group_size, rows)
        assert_equal(run(stock, x), run(ours, x))
    assert_overlapped(ours, calls=4)


def check_norm_and_linear_evaluates(group_size: int) -> None:
    stock, ours = norm_pair(group_size)
    x = example_input("column", group_size)
    for layer in (stock, ours):
        layer.eval()
    with torch.no_grad():
        assert_equal({"output": stock(x)[0]}, {"output": ours(x)[0]})
    assert_overlapped(ours)


def check_norm_and_linear_without_bias_and_frozen(group_size: int) -> None:
    stock, ours = norm_pair(group_size)
    x = example_input("column", group_size)
    for layer in (stock, ours):
        layer.bias = None
    assert_equal(run(stock, x), run(ours, x))
    for layer in (stock, ours):
        layer.weight.requires_grad_(False)
    assert_equal(run(stock, x), run(ours, x))
    for layer in (stock, ours):
        layer.weight.requires_grad_(True)
        layer.layer_norm_weight.requires_grad_(False)
    found = run(ours, x)
    assert found["gradient of layer_norm_weight"] is None
    assert_equal(run(stock, x), found)
    assert_overlapped(ours, calls=3)


def check_norm_and_linear_on_megatrons_path(group_size: int) -> None:
    transformer = norm_config(group_size, normalization="LayerNorm")
    stock, ours = norm_pair(group_size, transformer=transformer)
    x = example_input("column", group_size)
    transformer.commfuse = False
    assert_stock_as_stock(stock, ours, x, "switched off")
    transformer.commfuse = True
    for layer in (stock, ours):  # as inference does
        layer.sequence_parallel = False
        layer.allreduce_dgrad = True
    assert_equal(run(stock, x), run(ours, x))
    assert state_of(ours).overlapped_calls == 0


def check_norm_and_linear_adds_into_main_grad(group_size: int) -> None:
    # Megatron's own layer needs Apex for this; the fused layer of Transformer Engine, whose place ours takes, does not.
    transformer = norm_config(group_size, gradient_accumulation_fusion=True)
    stock, ours = norm_pair(group_size, transformer=transformer)
    assert ours.gradient_accumulation_fusion
    assert ours.config is transformer
    x = example_input("column", group_size)
    expected = run(stock, x)
    weight = ours.weight
    weight.main_grad = torch.ones_like(weight)
    weight.grad_added_to_main_grad = False
    for calls, is_overlapped in ((1, True), (2, False), (3, True)):
        transformer.commfuse = is_overlapped
        found = run(ours, x)
        assert weight.grad_added_to_main_grad
        assert_equal({"main_grad": 1 + calls * expected["gradient of weight"]}, {"main_grad": weight.main_grad})
        assert found["gradient of weight"].shape == weight.shape  # a dummy, for the hooks of the data-parallel wrapper
        assert_equal(*({k: v for k, v in r.items() if k != "gradient of weight"} for r in (expected, found)))
    del weight.grad_added_to_main_grad
    transformer.commfuse = False
    assert run(ours, x)["gradient of weight"] is None
    assert_equal({"main_grad": 1 + 4 * expected["gradient of weight"]}, {"main_grad": weight.main_grad})
    assert state_of(ours).overlapped_calls == 2


def check_row_adds_into_main_grad_on_megatrons_path(group_size: int) -> None:
    from commfuse_megatron.plugin import CommFuseRowParallelLinear
    from commfuse_megatron.plugin.compat import RowParallelLinear

    transformer = config(group_size, gradient_accumulation_fusion=True)
    transformer.commfuse = False
    stock = build("row", RowParallelLinear, config(group_size))
    ours = build("row", CommFuseRowParallelLinear, transformer)
    x = example_input("row", group_size)
    expected = run(stock, x)["gradient of weight"]
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    assert run(ours, x)["gradient of weight"] is None
    assert_equal({"main_grad": expected}, {"main_grad": ours.weight.main_grad})


def check_norm_and_linear_is_laid_out_like_transformer_engines(group_size: int) -> None:
    for normalization, names in (
        ("LayerNorm", ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]),
        ("RMSNorm", ["layer_norm_weight", "weight", "bias"]),
    ):
        for is_zero_centered in (False, True):
            transformer = norm_config(
                group_size, normalization=normalization, layernorm_zero_centered_gamma=is_zero_centered
            )
            ours = build(
                "column",
                CommFuseLayerNormColumnParallelLinear,
                transformer,
                is_expert=False,
                skip_bias_add=True,
                stride=2,
                tp_comm_buffer_name="fc1",
            )
            parameters = dict(ours.named_parameters())
            assert list(parameters) == names
            assert list(ours.state_dict()) == [*names, "_extra_state"]
            for name, parameter in parameters.items():
                is_norm = name.startswith("layer_norm")
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

    ours = norm_pair(group_size, transformer=norm_config(group_size, normalization="LayerNorm"))[1]
    rank = ours.tp_group.rank()
    replica = (0, rank, dist.get_rank() // group_size)
    for metadata in (None, {}):
        entries = ours.sharded_state_dict("fc1.", ((0, 3, 5),), metadata)
        assert list(entries) == [
            f"fc1.{name}" for name in ("layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state")
        ]
        for name in ("layer_norm_weight", "layer_norm_bias"):
            entry = entries[f"fc1.{name}"]
            assert (entry.global_shape, entry.global_offset, entry.replica_id) == ((5, IN), (3, 0), replica)
        for name, rest in (("weight", (IN,)), ("bias", ())):
            entry = entries[f"fc1.{name}"]
            offset = (3, rank * OUT // group_size, *(0 for _ in rest))
            assert (entry.global_shape, entry.global_offset) == ((5, OUT, *rest), offset)
        extra = entries["fc1._extra_state"]
        assert (extra.key, extra.data, extra.replica_id) == ("fc1._extra_state", None, replica)


def check_norm_and_linear_takes_transformer_engines_state(group_size: int) -> None:
    _, ours = norm_pair(group_size)
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
            build("column", cls, transformer, **{"is_expert": False, refused: True})
    transformer.normalization = "L2Norm"
    with pytest.raises(UnsupportedError, match="L2Norm"):
        build("column", cls, transformer, is_expert=False)


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
