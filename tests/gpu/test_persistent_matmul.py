"""`persistent_matmul` against exact integer products and against fp64, in every layout, size and alignment."""

import itertools
import sys

import pytest
import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels import launch, persistent_matmul, persistent_matmul_unavailable_reason
from commfuse_megatron.kernels.tiles import TILES
from tests.harness.captures import capture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

DEVICE = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PASSES = ("fprop", "dgrad", "wgrad")
AWKWARD_SIZES = [
    (1, 1, 1), (1, 17, 127), (17, 1, 1), (127, 17, 8191), (8191, 127, 17), (1, 8191, 17), (8191, 1, 127),
    (17, 8191, 1), (130, 264, 72), (1000, 520, 328), (2049, 1040, 1000),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _needs_the_kernel():
    reason = persistent_matmul_unavailable_reason("cuda", BF16)
    if reason is not None:
        pytest.skip(reason)


def place(values: torch.Tensor, *, transposed: bool, offset: int = 0, pad: int = 0) -> torch.Tensor:
    """The same matrix elsewhere: column-major, `offset` elements into its buffer, rows `pad` elements apart."""
    if transposed:
        return place(values.t(), transposed=False, offset=offset, pad=pad).t()
    rows, cols = values.shape
    buffer = torch.empty(rows * (cols + pad) + offset, dtype=values.dtype, device=values.device)
    view = buffer[offset:].view(rows, cols + pad)[:, :cols]
    return view.copy_(values)


def integers(rows: int, cols: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed + 1000 * rows + cols)
    return torch.randint(-3, 4, (rows, cols), generator=generator, device=DEVICE).to(dtype)


def operands(sizes, pass_name="fprop", *, dtype=BF16, offset=0, pad=0, seed=0) -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K = sizes
    a = place(integers(M, K, dtype, seed), transposed=pass_name == "wgrad", offset=offset, pad=pad)
    b = place(integers(K, N, dtype, seed + 1), transposed=pass_name == "fprop", offset=offset, pad=pad)
    return a, b


def exact(a, b, addend: torch.Tensor | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Integers below 2**24: exact in fp32 whatever the order, so rounded once they are the one right answer."""
    product = a.double() @ b.double()
    if addend is not None:
        product += addend.double()
    assert product.abs().max() < 2**24 if product.numel() else True
    return product.float().to(dtype or a.dtype)


def product(a, b, dtype: torch.dtype | None = None, **keywords) -> torch.Tensor:
    """In a new tensor."""
    out = torch.full((a.size(0), b.size(1)), torch.nan, dtype=dtype or a.dtype, device=DEVICE)
    return persistent_matmul(a, b, out=out, **keywords)


def assert_same(actual: torch.Tensor, wanted: torch.Tensor, what: str = "") -> None:
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, msg=lambda message: f"{what} {message}")


def assert_exact(a, b, dtype: torch.dtype | None = None, **keywords) -> None:
    assert_same(product(a, b, dtype, **keywords), exact(a, b, keywords.get("addend"), dtype))


# ---- values ----


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("sizes", AWKWARD_SIZES, ids=str)
def test_awkward_sizes_are_exact(sizes, pass_name):
    for out_dtype in (BF16, FP32):
        assert_exact(*operands(sizes, pass_name), out_dtype)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("sizes", [(2048, 1024, 512), (4096, 3072, 256), (256, 128, 64)], ids=str)
def test_aligned_sizes_are_exact(sizes, pass_name, dtype):
    assert_exact(*operands(sizes, pass_name, dtype=dtype))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.block_m}x{tile.block_n}")
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_every_tile_of_the_table_is_exact(tile, out_dtype):
    for pass_name, with_addend in itertools.product(PASSES, (False, True)):
        addend = integers(712, 776, out_dtype, seed=5) if with_addend else None
        assert_exact(*operands((712, 776, 328), pass_name), out_dtype, addend=addend, tile=tile)


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("where", [(1, 0), (0, 1), (3, 5), (8, 0), (0, 8), (8, 4)], ids=str)
def test_any_base_and_stride_is_exact(where, pass_name):
    offset, pad = where
    for sizes in ((520, 392, 264), (129, 257, 65)):
        a, b = operands(sizes, pass_name, offset=offset, pad=pad)
        wanted = exact(a, b)
        poison = torch.full(wanted.shape, torch.nan, dtype=BF16, device=DEVICE)
        out = place(poison, transposed=False, offset=offset, pad=pad)
        assert persistent_matmul(a, b, out=out) is out
        assert_same(out, wanted)


def test_operands_of_different_alignment():
    (a, b), (a_off, b_off) = operands((520, 392, 264)), operands((520, 392, 264), offset=1)
    assert_exact(a_off, b)
    assert_exact(a, b_off)


def test_expanded_and_windowed_inputs():
    row = integers(1, 512)
    b = integers(512, 384, seed=1)
    assert_exact(row.expand(300, 512), b)
    assert_exact(integers(1, 2000)[0].as_strided((400, 512), (1, 1)), b)


def test_writes_nothing_around_out():
    a, b = operands((300, 200, 96))
    for pad, offset in ((8, 8), (1, 1), (56, 0)):
        buffer = torch.full((302, 200 + 2 * pad), 77.0, dtype=BF16, device=DEVICE)
        out = buffer[1:301, offset : offset + 200]
        persistent_matmul(a, b, out=out)
        assert_same(out, exact(a, b))
        out.fill_(77.0)
        assert (buffer == 77.0).all()


def test_transposed_and_strided_outputs():
    a, b = operands((300, 200, 96))
    wanted = exact(a, b)
    column_major = torch.full((200, 300), torch.nan, dtype=BF16, device=DEVICE).t()
    assert_same(persistent_matmul(a, b, out=column_major), wanted)
    every_other = torch.full((600, 400), torch.nan, dtype=FP32, device=DEVICE)[::2, ::2]
    assert_same(persistent_matmul(a, b, out=every_other), exact(a, b, dtype=FP32))


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("K", [127, 1024, 8192])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_random_inputs_are_rounded_once(pass_name, K, out_dtype):
    """Error against fp64: half a unit in the last place of the output, plus fp32 summation.

    A dropped K block of 64 is wrong by 0.1 to 0.7 of the typical value; rounding to bf16 before the addend is added
    shows where the two cancel.
    """
    M, N = 520, 776
    a = place(torch.randn(M, K, device=DEVICE).to(BF16), transposed=pass_name == "wgrad")
    b = place(torch.randn(K, N, device=DEVICE).to(BF16), transposed=pass_name == "fprop")
    addend = torch.randn(M, N, device=DEVICE) * K**0.5
    wanted = a.double() @ b.double() + addend.double()
    summed = a.double().abs() @ b.double().abs() + addend.double().abs()
    unit_roundoff = 2**-8 if out_dtype == BF16 else 2**-24
    error = (product(a, b, out_dtype, addend=addend).double() - wanted).abs()
    assert (error <= 1.01 * unit_roundoff * wanted.abs() + 2**-20 * summed).all(), error.max()


# ---- addend ----


@pytest.mark.parametrize("addend_dtype", [BF16, FP32])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
@pytest.mark.parametrize("sizes", [(1024, 768, 256), (301, 203, 97)], ids=str)
def test_addends_of_every_kind(sizes, out_dtype, addend_dtype):
    M, N, _ = sizes
    a, b = operands(sizes)
    matrix = integers(M, N, addend_dtype, seed=7)
    bias = integers(1, N, addend_dtype, seed=8)[0]
    column = integers(M, 1, addend_dtype, seed=9)
    addends = {
        "matrix": matrix, "column-major": place(matrix, transposed=True),
        "unaligned": place(matrix, transposed=False, offset=1, pad=3), "bias": bias.expand(M, N),
        "strided bias": integers(1, 2 * N, addend_dtype, seed=8)[0, ::2].expand(M, N), "column": column.expand(M, N),
        "scalar": matrix[:1, :1].expand(M, N),
    }  # fmt: skip
    for name, addend in addends.items():
        assert_same(product(a, b, out_dtype, addend=addend), exact(a, b, addend, out_dtype), name)


@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("where", [(0, 0), (0, 8), (1, 3)], ids=str)
def test_accumulates_in_place(dtype, pass_name, where):
    offset, pad = where
    for sizes in ((1024, 776, 256), (301, 203, 97), (4096, 4096, 128)):
        a, b = operands(sizes, pass_name)
        start = integers(sizes[0], sizes[1], dtype, seed=3)
        out = place(start, transposed=False, offset=offset, pad=pad)
        wanted = start
        for _ in range(3):
            assert persistent_matmul(a, b, out=out, addend=out) is out
            wanted = exact(a, b, wanted, dtype)
            assert_same(out, wanted)


def test_accumulates_in_place_through_another_view_of_out():
    a, b = operands((256, 128, 64))
    out = integers(256, 128, FP32)
    wanted = exact(a, b, out, FP32)
    persistent_matmul(a, b, out=out, addend=out.view(256, 128))
    assert_same(out, wanted)


# ---- SMs, determinism ----


@pytest.mark.parametrize("num_sms", [1, 7, 100, 132, 500])
def test_any_number_of_blocks(num_sms):
    for sizes in ((1024, 1544, 328), (127, 65, 33)):
        a, b = operands(sizes)
        for _ in range(3):
            assert_exact(a, b, num_sms=num_sms)


def test_runs_are_bit_identical():
    a, b = torch.randn(4096, 2048, device=DEVICE).to(BF16), torch.randn(3072, 2048, device=DEVICE).to(BF16).t()
    first = product(a, b, tile=TILES[0])
    for num_sms in (50, 100, 132):
        for _ in range(10):
            assert_same(product(a, b, tile=TILES[0], num_sms=num_sms), first)


# ---- CUDA graphs ----


@pytest.mark.parametrize("pass_name", PASSES)
def test_graphs_replay_with_new_data(pass_name):
    a, b = operands((1024, 768, 320), pass_name)
    odd_a, odd_b = operands((129, 65, 33), pass_name)
    out, odd_out = torch.empty(1024, 768, dtype=BF16, device=DEVICE), torch.empty(129, 65, device=DEVICE)
    total = torch.zeros(1024, 768, device=DEVICE)

    def calls() -> None:
        persistent_matmul(a, b, out=out)
        persistent_matmul(odd_a, odd_b, out=odd_out)
        persistent_matmul(a, b, out=total, addend=total)

    graph = capture(calls)
    total.zero_()
    wanted_total = torch.zeros_like(total)
    for seed in range(3):
        for tensor, new in zip((a, b), operands((1024, 768, 320), pass_name, seed=10 + seed), strict=True):
            tensor.copy_(new)
        for tensor, new in zip((odd_a, odd_b), operands((129, 65, 33), pass_name, seed=20 + seed), strict=True):
            tensor.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        wanted_total = exact(a, b, wanted_total, FP32)
        assert_same(out, exact(a, b))
        assert_same(odd_out, exact(odd_a, odd_b, dtype=FP32))
        assert_same(total, wanted_total)


# ---- edges ----


@pytest.mark.parametrize("sizes", [(0, 8, 8), (8, 0, 8), (8, 8, 0), (0, 0, 0)], ids=str)
def test_empty_sizes(sizes):
    M, N, K = sizes
    a, b = torch.ones(M, K, dtype=BF16, device=DEVICE), torch.ones(K, N, dtype=BF16, device=DEVICE)
    assert_same(product(a, b), torch.zeros(M, N, dtype=BF16, device=DEVICE))
    addend = torch.randn(M, N, device=DEVICE)
    assert_same(product(a, b, addend=addend), addend.to(BF16))
    out = addend.clone()
    assert_same(persistent_matmul(a, b, out=out, addend=out), addend)


@pytest.mark.parametrize("offset", [0, 1])
def test_more_than_two_to_the_31_elements(offset):
    M, K = 262_400, 8192
    if torch.cuda.mem_get_info()[0] < 16 << 30:
        pytest.skip("needs 16 GiB of free GPU memory")
    a = torch.ones(M * K + offset, dtype=BF16, device=DEVICE)[offset:].view(M, K)
    b = integers(16, K).t()
    a[-300:] = integers(300, K, seed=4)
    out = product(a, b)
    assert_same(out[-300:], exact(a[-300:], b))
    assert_same(out[:300], exact(a[:300], b))


def test_plans_keep_no_tensor_alive():
    a, b = operands((512, 256, 128))
    product(a, b)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    c, d = a.clone(), b.clone(memory_format=torch.preserve_format)
    product(c, d)
    del c, d
    assert torch.cuda.memory_allocated() == before


def test_tritons_public_launcher_gives_the_same(monkeypatch):
    """What a Triton of another version would take."""
    module = sys.modules["commfuse_megatron.kernels.persistent_matmul"]
    monkeypatch.setattr(module, "_plans", {})
    monkeypatch.setattr(launch, "_flat_launch", lambda compiled: None)
    for sizes, pass_name in itertools.product([(1024, 768, 320), (129, 65, 33)], PASSES):
        a, b = operands(sizes, pass_name)
        total = integers(sizes[0], sizes[1], FP32)
        wanted = exact(a, b, total, FP32)
        persistent_matmul(a, b, out=total, addend=total)
        assert_same(total, wanted)


def test_tritons_generated_launcher_is_found():
    """Else every call takes 10 us more of host time; see `_flat_launch`."""
    triton = pytest.importorskip("triton")
    if not triton.__version__.startswith("3.6."):
        pytest.skip(f"only looked for in Triton 3.6, not {triton.__version__}")
    a, b = operands((256, 128, 64))
    module = sys.modules["commfuse_megatron.kernels.persistent_matmul"]
    module._plans.clear()
    product(a, b)
    (plan,) = module._plans.values()
    assert isinstance(plan.launcher, launch._FlatLauncher)


def test_a_plan_serves_more_addresses_than_it_keeps_descriptors(monkeypatch):
    monkeypatch.setattr(launch, "MAX_DESCRIPTORS", 3)
    _, b = operands((256, 128, 64))
    copies = [place(integers(256, 64, seed=i), transposed=False) for i in range(8)]
    for copy in copies + copies:
        assert_exact(copy, b)


# ---- refusals ----


def zeros(rows: int, cols: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(rows, cols, dtype=dtype, device=DEVICE)


def test_refuses_overlap():
    buffer, b = zeros(64, 256), zeros(128, 128)
    a = buffer[:, :128]
    persistent_matmul(a, b, out=buffer[:, 128:])  # side by side: apart
    with pytest.raises(ShapeError, match="out overlaps a"):
        persistent_matmul(a, b, out=buffer[:, 64:192])
    with pytest.raises(ShapeError, match="out overlaps b"):
        persistent_matmul(buffer[:, :64], b[:64], out=b[:64])
    with pytest.raises(ShapeError, match="out overlaps addend"):
        persistent_matmul(a, b, out=buffer[:, 128:], addend=buffer[:, 120:248])
    with pytest.raises(ShapeError, match="overlaps itself"):
        persistent_matmul(a, b, out=zeros(1, 128).expand(64, 128))


def test_refuses_what_does_not_fit():
    a, b, out = (zeros(*shape) for shape in ((8, 16), (16, 24), (8, 24)))
    for arguments, error, words in (
        ((a, b[:8]), ShapeError, "inner sizes differ"),
        ((a[0], b), ShapeError, "a matrix is needed"),
        ((a, b.half()), UnsupportedError, "must be the same"),
        ((a.float(), b.float()), UnsupportedError, "bfloat16 and float16"),
        ((a, b.cpu()), ShapeError, "CUDA device"),
        ((zeros(16, 32)[::2, ::2], b), ShapeError, "must be 1"),
    ):
        with pytest.raises(error, match=words):
            persistent_matmul(*arguments, out=out)
    for keywords, error, words in (
        ({"out": zeros(8, 23)}, ShapeError, "out has shape"),
        ({"out": out.half()}, UnsupportedError, "out is torch.float16"),
        ({"out": out.cpu()}, ShapeError, "out is on CUDA device -1"),
        ({"addend": out[0]}, ShapeError, "addend has shape"),
        ({"addend": out.double()}, UnsupportedError, "addend is"),
        ({"num_sms": 0}, ShapeError, "num_sms is 0"),
    ):
        with pytest.raises(error, match=words):
            persistent_matmul(a, b, **{"out": out} | keywords)
