"""`sum_partials` on the GPU gives the bits of its torch path."""

import pytest
import torch

from commfuse_megatron.kernels import sum_partials
from tests.harness.captures import capture

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def make(rows, cols, num_partials, dtype, own_dtype, device="cuda"):
    generator = torch.Generator().manual_seed(rows + cols + num_partials)
    own = torch.randn(rows, cols, generator=generator, dtype=FP64).to(own_dtype)
    partials = torch.randn(num_partials, rows, cols, generator=generator, dtype=FP64).to(dtype)
    bias = torch.randn(cols, generator=generator, dtype=FP64).to(dtype)
    return own.to(device), partials.to(device), bias.to(device)


@pytest.mark.parametrize("num_partials", [0, 1, 3, 7, 16, 17, 63])
@pytest.mark.parametrize(
    ("dtype", "own_dtype", "out_dtype"),
    [(BF16, FP32, BF16), (BF16, BF16, BF16), (FP16, FP32, FP16), (BF16, FP32, FP32), (FP32, FP32, FP32), (FP64,) * 3],
    ids=str,
)
def test_equals_the_torch_path_bit_for_bit(dtype, own_dtype, out_dtype, num_partials):
    for rows, cols in ((1, 1), (3, 17), (33, 4096), (5, 8191), (256, 3072)):
        own, partials, bias = make(rows, cols, num_partials, dtype, own_dtype)
        for with_bias in (False, True):
            used = bias if with_bias else None
            out = torch.full((rows, cols), torch.nan, dtype=out_dtype, device="cuda")
            assert sum_partials(own, partials, bias=used, out=out) is out
            wanted = torch.empty((rows, cols), dtype=out_dtype)
            sum_partials(own.cpu(), partials.cpu(), bias=None if used is None else used.cpu(), out=wanted)
            torch.testing.assert_close(out.cpu(), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_in_place(dtype):
    own, partials, bias = make(64, 1000, 3, dtype, dtype)
    wanted = sum_partials(own, partials, bias=bias, out=torch.empty_like(own))
    torch.testing.assert_close(sum_partials(own, partials, bias=bias, out=own), wanted, rtol=0, atol=0)


def test_strided_and_unaligned():
    own, partials, bias = make(64, 1000, 3, BF16, FP32)
    wanted = sum_partials(own, partials, bias=bias, out=torch.empty(64, 1000, dtype=BF16, device="cuda"))
    wide_own = torch.empty(64, 1003, device="cuda")[:, 1:1001].copy_(own)
    wide_partials = torch.empty(3, 66, 1005, dtype=BF16, device="cuda")[:, 1:65, 3:1003].copy_(partials)
    buffer = torch.full((64, 1010), 7.0, dtype=BF16, device="cuda")
    out = buffer[:, 5:1005]
    sum_partials(wide_own, wide_partials, bias=bias, out=out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)
    out.fill_(7.0)
    assert (buffer == 7.0).all()


def test_graph_replay():
    own, partials, bias = make(64, 1024, 3, BF16, FP32)
    out = torch.empty(64, 1024, dtype=BF16, device="cuda")
    graph = capture(lambda: sum_partials(own, partials, bias=bias, out=out))
    for _ in range(3):
        own.normal_()
        partials.normal_()
        graph.replay()
        wanted = sum_partials(own, partials, bias=bias, out=torch.empty_like(out))
        torch.testing.assert_close(out, wanted, rtol=0, atol=0)


def test_more_than_two_to_the_31_elements():
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    rows, cols = 131_136, 16_384
    own = torch.zeros(rows, cols, dtype=BF16, device="cuda")
    partials = torch.zeros(1, rows, cols, dtype=BF16, device="cuda")
    own[-2:], partials[0, -2:] = 1, 2
    out = sum_partials(own, partials, out=own)
    assert (out[-2:] == 3).all()
    assert (out[:-2] == 0).all()
