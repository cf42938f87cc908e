"""Every variant of the Triton kernels that a call can ask for compiles for Hopper, without a GPU."""

import pytest
import torch

from commfuse_megatron.kernels import matmul_variant
from commfuse_megatron.kernels.matmul_variant import Layout, Variant, choose_variant, compile_variant
from commfuse_megatron.kernels.strided_copy import CopyKind, compile_copy
from commfuse_megatron.kernels.sum_partials import _Kind, compile_sum
from commfuse_megatron.kernels.tiles import TILES, choose_tile

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402

from commfuse_megatron.kernels import matmul_kernel  # noqa: E402
from commfuse_megatron.kernels.strided_copy_kernel import strided_copy_kernel  # noqa: E402
from commfuse_megatron.kernels.sum_kernel import sum_partials_kernel  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
AMPERE = GPUTarget("cuda", 80, 32)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
M, N, K = 8192, 8192, 4096  # the first tile of the table


def layout(
    rows: int, cols: int, *, transposed: bool = False, dtype: torch.dtype = BF16, aligned: bool = True
) -> Layout:
    strides = (1, rows) if transposed else (cols, 1)
    return Layout((rows, cols), strides, dtype, 0, aligned)


def variant_for(
    sizes=(M, N, K),
    pass_name="fprop",
    dtype=BF16,
    out_dtype=BF16,
    addend="none",
    addend_dtype=BF16,
    aligned=True,
    **how,
) -> Variant:
    """how: whether tiles are shared, and TMA allowed."""
    rows, cols, inner = sizes

    def added(strides: tuple[int, int], **copies: int) -> Layout:
        return Layout((rows, cols), strides, addend_dtype, 0, True, **copies)

    several = {"copies": 3, "copy_stride": rows * cols}
    addends = {
        "none": None, "matrix": added((cols, 1)), "strided": added((1, rows)), "several": added((cols, 1), **several),
        "several strided": added((1, rows), **several), "bias": added((0, 1)),
    }  # fmt: skip
    variant = choose_variant(
        layout(rows, inner, transposed=pass_name == "wgrad", dtype=dtype, aligned=aligned),
        layout(inner, cols, transposed=pass_name == "fprop", dtype=dtype, aligned=aligned),
        layout(rows, cols, dtype=out_dtype, aligned=aligned),
        addends[addend],
        **{"num_sms": 132, "shares": False, "allow_tma": True, **how},
    )
    assert variant is not None
    return variant


def hopper_variants() -> dict[str, Variant]:
    accumulates = {"pass_name": "wgrad", "out_dtype": FP32, "addend": "matrix", "addend_dtype": FP32}
    kinds: dict[str, dict] = {name: {"pass_name": name} for name in ("fprop", "dgrad", "wgrad")}
    kinds |= {
        "bias": {"addend": "bias"}, "addend": {"addend": "matrix"}, "several-addends": {"addend": "several"},
        "several-strided-addends": {"addend": "several strided"}, "strided-addend": {"addend": "strided"},
        "wgrad-fp32-accumulate": accumulates, "unaligned": {"aligned": False},
    }  # fmt: skip
    options = {
        f"{name}-{'shared' if shares else 'alone'}": {**kind, "shares": shares}
        for name, kind in kinds.items()
        for shares in (False, True)
    }
    options["fp16"] = {"dtype": FP16, "out_dtype": FP16}
    options["fp32-out"] = {"out_dtype": FP32}
    options["strided-fp32-addend"] = {"out_dtype": FP32, "addend": "strided", "addend_dtype": FP32}
    for index, tile in enumerate(TILES):
        sizes = next(sizes for sizes in SIZES if choose_tile(sizes[0], sizes[1], 132) is tile)
        options[f"tile-{index}"] = {"sizes": sizes}
        options[f"tile-{index}-fp32-accumulate"] = {"sizes": sizes, **accumulates}
    return {name: variant_for(**each) for name, each in options.items()}


SIZES = [
    (rows, cols, 4096)
    for rows in (8192, 4096, 2048, 1024, 512, 128, 16)
    for cols in (8192, 5120, 3072, 1152, 1024, 256, 128)
]


VARIANTS = hopper_variants()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_compiles_for_hopper(variant: Variant) -> None:
    compiled = compile_variant(variant, HOPPER)
    assert list(compiled.src.signature) == matmul_kernel.persistent_matmul_kernel.arg_names
    ptx = compiled.asm["ptx"]
    assert compiled.metadata.shared <= matmul_variant.SHARED_BYTES
    assert compiled.metadata.global_scratch_size == 0, "descriptors must come from the host"
    assert "wgmma.mma_async" in ptx, "not on Hopper's matrix units"
    assert ("cp.async.bulk.tensor.2d.shared" in ptx) == (variant.a.tma or variant.b.tma)
    assert ("cp.async.bulk.tensor.2d.global" in ptx) == variant.out_tma
    assert ("atom" in ptx) == variant.shares


@pytest.mark.parametrize("pass_name", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("out_dtype", [BF16, FP32])
def test_compiles_without_tma(pass_name: str, out_dtype: torch.dtype) -> None:
    variant = variant_for(pass_name=pass_name, out_dtype=out_dtype, addend="matrix", allow_tma=False)
    compiled = compile_variant(variant, AMPERE)
    assert compiled.metadata.shared <= matmul_variant.POINTER_SHARED_BYTES
    assert "mma.sync" in compiled.asm["ptx"]


def chosen(a: Layout, b: Layout) -> Variant | None:
    return choose_variant(a, b, layout(M, N), None, num_sms=132, shares=False, allow_tma=True)


def test_operands_choose_their_loads_one_by_one() -> None:
    variant = chosen(layout(M, K), Layout((K, N), (1, K + 1), BF16, 0, True))
    assert variant is not None
    assert (variant.a.tma, variant.b.tma, variant.out_tma) == (True, False, True)
    assert "cp.async.bulk.tensor.2d.shared" in compile_variant(variant, HOPPER).asm["ptx"]
    expanded = chosen(Layout((M, K), (0, 1), BF16, 0, True), layout(K, N))
    assert expanded is not None
    assert (expanded.a.tma, expanded.b.tma) == (False, True)


def test_no_variant_where_no_stride_is_one() -> None:
    assert chosen(Layout((M, K), (2 * K, 2), BF16, 0, True), layout(K, N)) is None
    assert chosen(layout(M, K), Layout((K, N), (2 * N, 2), BF16, 0, True)) is None


def test_kernel_and_host_agree_on_the_addend_switch() -> None:
    for name in ("ADDEND_NONE", "ADDEND_POINTER", "ADDEND_TMA", "ADDEND_ROW"):
        assert getattr(matmul_kernel, name).value == getattr(matmul_variant, name)


def test_constants_are_the_kernels_last_arguments_in_order() -> None:
    names = list(variant_for().constants())
    assert matmul_kernel.persistent_matmul_kernel.arg_names[-len(names) :] == names


def test_every_tile_of_the_table_is_chosen_by_some_size() -> None:
    chosen = {choose_tile(rows, cols, 132) for rows, cols, _ in SIZES}
    assert chosen == set(TILES)


@pytest.mark.parametrize(("dtype", "own", "out"), [
    (BF16, BF16, BF16), (FP32, FP32, FP32), (torch.float64,) * 3, (BF16, FP32, FP32), (BF16, BF16, FP32),
    (BF16, FP32, BF16),
])  # fmt: skip
@pytest.mark.parametrize(("num_partials", "has_bias"), [(0, False), (1, True), (7, False), (63, True)])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_sum_partials_compiles_for_hopper(dtype, own, out, num_partials, has_bias, is_aligned):
    kind = _Kind(own, dtype, dtype if has_bias else None, out, num_partials, is_aligned)
    compiled = compile_sum(kind, HOPPER)
    assert list(compiled.src.signature) == sum_partials_kernel.arg_names, "launchers pass arguments by position"
    ptx = compiled.asm["ptx"]
    assert ("ld.global.v4" in ptx or "ld.global.v2.b64" in ptx) == is_aligned, "16-byte loads where they are legal"


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, torch.float64])
@pytest.mark.parametrize(("runs", "width"), [(1, 2048), (8, 128), (3, 192)])
@pytest.mark.parametrize("is_aligned", [True, False])
def test_strided_copies_compile_for_hopper(dtype: torch.dtype, runs: int, width: int, is_aligned: bool) -> None:
    compiled = compile_copy(CopyKind(dtype, runs, width, is_aligned), HOPPER)
    assert list(compiled.src.signature) == strided_copy_kernel.arg_names, "launchers pass arguments by position"
    # Loads of 16 bytes, of which a thread has several.
    assert ("ld.global.v4.b32" in compiled.asm["ptx"] or "ld.global.v2.b64" in compiled.asm["ptx"]) == is_aligned
