"""What the kernels do without a GPU: refuse with words, choose tiles, and sum in torch."""

import pytest
import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels import persistent_matmul, persistent_matmul_unavailable_reason, sum_partials
from commfuse_megatron.kernels.sum_partials import bind_sum
from commfuse_megatron.kernels.tiles import TILES, choose_tile
from tests.harness import run_python

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64


def test_importing_the_kernels_loads_no_triton() -> None:
    run_python("-c", "import sys, commfuse_megatron.kernels; assert 'triton' not in sys.modules").check_returncode()


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [("cpu", BF16, "CUDA device, not 'cpu'"), ("cuda", FP32, "not torch.float32"), ("cpu", FP64, "not torch.float64")],
)
def test_says_why_it_is_unavailable(device: str, dtype: torch.dtype, words: str) -> None:
    reason = persistent_matmul_unavailable_reason(device, dtype)
    assert reason is not None
    assert words in reason


def test_matmul_refuses_on_the_cpu_in_the_same_words() -> None:
    a = torch.zeros(4, 4, dtype=BF16)
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        persistent_matmul(a, a, out=a)
    with pytest.raises(ShapeError, match="inner sizes differ"):
        persistent_matmul(a, a[:3], out=a)
    with pytest.raises(ShapeError, match="a matrix is needed"):
        persistent_matmul(a[0], a, out=a)


@pytest.mark.parametrize("num_sms", [1, 100, 132])
def test_large_problems_take_the_first_tile(num_sms: int) -> None:
    for M, N in ((8192, 5120), (8192, 8192), (8192, 3072)):
        assert choose_tile(M, N, num_sms) is TILES[0]


def test_sum_is_in_order_in_fp32_and_rounded_once() -> None:
    own = torch.tensor([[1.0, 256.0]])
    partials = torch.tensor([[[2**-8, 1.0]], [[2**-8, 0.5]]], dtype=BF16)
    out = torch.empty(1, 2, dtype=BF16)
    # Rounded after every addition, bf16 would stay at 1 and at 256.
    assert sum_partials(own, partials, out=out).tolist() == [[1 + 2**-7, 258.0]]
    bias = torch.tensor([-1.0, -256.0], dtype=BF16)
    assert sum_partials(own, partials, bias=bias, out=out).tolist() == [[2**-7, 1.5]]


@pytest.mark.parametrize("num_partials", [0, 1, 5, 64])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, FP64])
def test_sum_of_small_integers_is_exact(dtype: torch.dtype, num_partials: int) -> None:
    partials = torch.randint(-2, 3, (num_partials, 5, 7)).to(dtype)
    own, bias = torch.randint(-2, 3, (5, 7)).to(dtype), torch.randint(-2, 3, (7,)).to(dtype)
    wanted = (own.double() + partials.double().sum(0) + bias.double()).to(dtype)
    for out in (torch.full((5, 7), torch.nan, dtype=dtype), own):
        torch.testing.assert_close(sum_partials(own.clone() if out is not own else own, partials, bias=bias, out=out),
                                   wanted, rtol=0, atol=0)  # fmt: skip


def test_sum_in_fp64_stays_in_fp64_and_of_nothing_is_nothing() -> None:
    own, partials = torch.full((1, 1), 1.0, dtype=FP64), torch.full((1, 1, 1), 2.0**-40, dtype=FP64)
    assert sum_partials(own, partials, out=torch.empty(1, 1, dtype=FP64)).item() == 1 + 2.0**-40
    out = torch.empty(0, 7)
    assert sum_partials(torch.empty(0, 7), torch.empty(3, 0, 7), out=out) is out


def test_sums_are_bound_for_a_device_by_layouts_alone() -> None:
    pytest.importorskip("triton")
    own = torch.empty(3, 16, dtype=BF16, device="meta")
    bound = bind_sum(own, own.unsqueeze(0), bias=None, out=own, device=torch.device("cuda", 1))
    assert bound is not None
    plan = bound.__self__
    assert (plan.device_index, plan.num_blocks, plan.kind.num_partials) == (1, 1, 1)
    assert plan.kind.is_aligned
    assert bind_sum(own, own.unsqueeze(0), bias=None, out=own) is None


def test_sum_refuses_what_does_not_fit() -> None:
    own, partials, out = torch.zeros(4, 6), torch.zeros(2, 4, 6), torch.zeros(4, 6)
    for arguments, error, words in (
        ((own, partials[:, :3], None, out), ShapeError, "must be"),
        ((own, partials, torch.zeros(5), out), ShapeError, "bias"),
        ((own.t().contiguous().t(), partials, None, out), ShapeError, "rows must be contiguous"),
        ((own, partials, None, out[:1].expand(4, 6)), ShapeError, "rows of out overlap"),
        ((own, partials, None, partials[0]), ShapeError, "out overlaps partials"),
        ((own.to(BF16), partials, None, out), UnsupportedError, "own is torch.bfloat16"),
        ((own, partials, None, out.double()), UnsupportedError, "float64"),
        ((own.int(), partials.int(), None, out), UnsupportedError, "own is torch.int32"),
    ):
        with pytest.raises(error, match=words):
            sum_partials(arguments[0], arguments[1], bias=arguments[2], out=arguments[3])
    buffer = torch.zeros(5, 6)
    with pytest.raises(ShapeError, match="out overlaps own"):
        sum_partials(buffer[:4], partials, out=buffer[1:])
