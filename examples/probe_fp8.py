"""What fp8 GEMMs over rows at a time cost and give, on one Hopper GPU with Transformer Engine.

    python examples/probe_fp8.py --json probe.json

For every linear of a model, per recipe ("tensorwise": one scale per tensor; "blockwise": 1x128 for rows, 128x128 for
weights), asks of the forward GEMM (TN): is it, computed over 1/2, 1/4, 1/8 of the rows at a time, bitwise the whole
one? By Transformer Engine's `general_gemm`, by PyTorch's `_scaled_mm`, by cuBLASLt called as `kernels.blas` calls it
(tensorwise only); whether the three give the same bits; what the cut costs in GPU time, and a call in host time. Also
whether casts of rows at a time give the codes of the whole cast.
"""

import argparse
import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from commfuse_megatron.kernels import blas
from commfuse_megatron.tools.common.output import results, why_file_cannot_be_written, write_json

#: In and out features of a rank's linears at two ranks.
LINEARS = {
    "8B qkv": (4096, 3072), "8B proj": (2048, 4096), "8B fc1": (4096, 14336), "8B fc2": (7168, 4096),
    "70B qkv": (8192, 5120), "70B proj": (4096, 8192), "70B fc1": (8192, 28672), "70B fc2": (14336, 8192),
}  # fmt: skip
PARTS = (2, 4, 8)
RECIPES = ("tensorwise", "blockwise")
#: The product of so many rows from one on.
_Run = Callable[[int, int], torch.Tensor]
#: Numbers of cublasLt.h and library_types.h: fp8 of 4 exponent bits, scales, and sums that are not split.
E4M3, A_SCALE, B_SCALE, FAST_ACCUMULATION = 28, 17, 18, 25


def main() -> int:
    """Probe, print, write. 0; 2 where this machine cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8192, 2048], help="rows M of a GEMM (8192 2048)")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    chosen = parser.parse_args()
    if any(rows < 1 or rows % 1024 for rows in chosen.rows):
        parser.error(f"--rows {chosen.rows}: multiples of 1024, so that an eighth has whole blocks of 128")
    reason = None if chosen.json is None else why_file_cannot_be_written(chosen.json)
    reason = reason or _why_not_here()
    if reason is not None:
        print(f"probe_fp8.py: {reason}", file=sys.stderr)
        return 2
    cases = [(recipe, name, rows) for recipe in RECIPES for rows in chosen.rows for name in LINEARS]
    found = [row for case in track(cases, "probing", disable=not sys.stderr.isatty()) for row in probe(*case)]
    if chosen.json is not None:
        write_json(chosen.json, {"torch": torch.__version__, "rows": found})
    results().print(table_of(found))
    return 0


def _why_not_here() -> str | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return "a Hopper GPU is needed"
    try:
        import transformer_engine.pytorch  # noqa: F401
    except ImportError as error:
        return f"Transformer Engine is needed ({error})"
    return None


def probe(recipe: str, name: str, rows: int) -> list[dict[str, Any]]:
    """One row for each of who multiplies: bits, times in ms (GPU) and us (host)."""
    k, n = LINEARS[name]
    torch.manual_seed(1)
    x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5
    made = _Tensorwise(x, weight) if recipe == "tensorwise" else _Blockwise(x, weight)
    whole = {kind: run(0, rows) for kind, run in made.kinds.items()}
    shared = {"section": "fp8", "case": name, "pass": "fprop", "dtype": "fp8", "recipe": f"fp8_{recipe}"}
    shared |= {"M": rows, "N": n, "K": k, "same_codes": made.casts_in_parts(PARTS[-1])}
    found = []
    for kind, run in made.kinds.items():
        row: dict[str, Any] = {**shared, "by": kind, "median_ms": _gpu_ms(functools.partial(run, 0, rows))}
        row["host_us"] = _host_us(functools.partial(run, 0, rows // PARTS[-1]))
        row["equals_general_gemm"] = torch.equal(whole["general_gemm"], whole[kind])
        for parts in PARTS:
            size = rows // parts

            def in_parts(run: _Run = run, size: int = size) -> list[torch.Tensor]:
                return [run(start, size) for start in range(0, rows, size)]

            row[f"bitwise_in_{parts}"] = torch.equal(torch.cat(in_parts()), whole[kind])
            row[f"ratio_in_{parts}"] = _gpu_ms(in_parts) / row["median_ms"]
        found.append(row | {"device": torch.cuda.get_device_name()})
    return found


class _Tensorwise:
    """x and weight with one scale each."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
        from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

        e4m3 = tex.DType.kFloat8E4M3
        quantizer = Float8CurrentScalingQuantizer(e4m3, x.device, columnwise=False)
        self._x, self._quantizer = x, quantizer
        self._made, made_weight = quantizer(x), quantizer(weight)
        codes, scale = self._made._data, self._made._scale_inv
        weight_codes, weight_scale = made_weight._data, made_weight._scale_inv
        views = codes.view(torch.float8_e4m3fn), weight_codes.view(torch.float8_e4m3fn).t()

        def engine(start: int, count: int) -> torch.Tensor:
            part = Float8TensorStorage(
                data=codes[start : start + count], fp8_scale_inv=scale, fp8_dtype=e4m3, fake_dtype=x.dtype
            )
            return general_gemm(made_weight, part, torch.bfloat16, use_split_accumulator=False)[0]

        def scaled(start: int, count: int) -> torch.Tensor:
            part = views[0][start : start + count]
            return torch._scaled_mm(
                part, views[1], scale_a=scale, scale_b=weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        workspace = torch.empty(blas.WORKSPACE_BYTES, dtype=torch.uint8, device=x.device)
        matmuls: dict[int, _Fp8Matmul] = {}

        def ours(start: int, count: int) -> torch.Tensor:
            if count not in matmuls:
                matmuls[count] = _Fp8Matmul(count, *weight_codes.shape, scale.data_ptr(), weight_scale.data_ptr())
            out = torch.empty(count, weight_codes.size(0), dtype=torch.bfloat16, device=x.device)
            matmuls[count](codes[start:].data_ptr(), weight_codes.data_ptr(), out.data_ptr(), workspace.data_ptr())
            return out

        def into_slice(start: int, count: int, target: torch.Tensor) -> None:
            fixed = Float8Quantizer(1 / scale, torch.zeros(1, device=x.device), e4m3, columnwise=False)
            storage = Float8TensorStorage(
                data=target[start : start + count], fp8_scale_inv=scale.clone(), fp8_dtype=e4m3, fake_dtype=x.dtype
            )
            tex.quantize(x[start : start + count], fixed, storage, None)

        self.kinds = {"general_gemm": engine, "_scaled_mm": scaled, "cuBLASLt": ours}
        self._into_slice = into_slice

    def casts_in_parts(self, parts: int) -> bool:
        """Whether casts into slices of one buffer, with the whole's scale, give the whole's codes."""
        target = torch.zeros_like(self._made._data)
        size = len(target) // parts
        for start in range(0, len(target), size):
            self._into_slice(start, size, target)
        return torch.equal(target, self._made._data)


class _Blockwise:
    """x with a scale for 128 elements of a row, weight with one for blocks of 128x128."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor) -> None:
        import transformer_engine_torch as tex
        from transformer_engine.pytorch.cpp_extensions import general_gemm
        from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

        e4m3 = tex.DType.kFloat8E4M3
        self._x = x
        self._quantizer = Float8BlockQuantizer(e4m3, rowwise=True, columnwise=False, block_scaling_dim=1)
        made_weight = Float8BlockQuantizer(e4m3, rowwise=True, columnwise=False)(weight)
        kept: dict[tuple[int, int], Any] = {}

        def engine(start: int, count: int) -> torch.Tensor:
            if (start, count) not in kept:
                kept[start, count] = self._quantizer(x[start : start + count])
            part = kept[start, count]
            return general_gemm(made_weight, part, torch.bfloat16, use_split_accumulator=True)[0]

        self.kinds: dict[str, _Run] = {"general_gemm": engine}

    def casts_in_parts(self, parts: int) -> bool:
        """Whether casts of rows at a time give the whole's codes and scales."""
        whole, size = self._quantizer(self._x), len(self._x) // parts
        made = [self._quantizer(self._x[start : start + size]) for start in range(0, len(self._x), size)]
        codes = torch.cat([each._rowwise_data for each in made])
        scales = torch.cat([each._rowwise_scale_inv for each in made], dim=1)
        return torch.equal(codes, whole._rowwise_data) and torch.equal(scales, whole._rowwise_scale_inv)


class _Fp8Matmul:
    """out [M, N] bfloat16 = x [M, K] @ weight [N, K].T, both e4m3 with one scale: cuBLASLt's first choice."""

    def __init__(self, m: int, n: int, k: int, x_scale_at: int, weight_scale_at: int) -> None:
        library = blas._library()
        self._descriptor = blas._create(library.cublasLtMatmulDescCreate, blas._COMPUTE_32F, 0)
        kind = [(blas._TRANSPOSE_A, ctypes.c_int32(1)), (FAST_ACCUMULATION, ctypes.c_int8(1))]
        kind += [(A_SCALE, ctypes.c_uint64(weight_scale_at)), (B_SCALE, ctypes.c_uint64(x_scale_at))]
        for attribute, value in kind:
            arguments = self._descriptor, attribute, ctypes.byref(value), ctypes.sizeof(value)
            blas._check(library.cublasLtMatmulDescSetAttribute(*arguments), f"attribute {attribute}")
        layout = library.cublasLtMatrixLayoutCreate
        bfloat16 = blas._TYPES[torch.bfloat16]
        sizes = ((E4M3, k, n, k), (E4M3, k, m, k), (bfloat16, n, m, n))
        self._layouts = [blas._create(layout, *size) for size in sizes]
        found = blas._find(library, (self._descriptor, *self._layouts), (256, 256, 256))
        self._algorithm = ctypes.create_string_buffer(bytes(found.algorithm), len(found.algorithm))
        self._workspace_bytes = found.workspace_bytes
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def __call__(self, x_at: int, weight_at: int, out_at: int, workspace_at: int) -> None:
        first, second, target = self._layouts
        one, zero, algorithm = (ctypes.addressof(each) for each in (self._one, self._zero, self._algorithm))
        operands = (one, weight_at, first, x_at, second, zero, out_at, target, out_at, target)
        stream = torch.cuda.current_stream().cuda_stream
        scratch = (algorithm, workspace_at, self._workspace_bytes, stream)
        blas._check(blas._library().cublasLtMatmul(blas._handle(), self._descriptor, *operands, *scratch), "matmul")


def _gpu_ms(call: Callable[[], Any]) -> float:
    times = []
    for number in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(3):
            call()
        end.record()
        end.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end) / 3)
    return statistics.median(times)


def _host_us(call: Callable[[], Any]) -> float:
    times = []
    for number in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(5):
            call()
        if number >= 2:
            times.append((time.perf_counter() - begin) / 5 * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def table_of(found: list[dict[str, Any]]) -> Table:
    """One line per row."""
    table = Table(title="fp8 GEMMs over rows at a time: bitwise the whole one? (GPU time over the whole one's)")
    cut = [f"{n} parts" for n in PARTS]
    for name in ("recipe", "linear", "M", "by", "= general_gemm", "codes", *cut, "ms", "host us"):
        table.add_column(name)
    for row in found:
        said = [f"{_equal(row[f'bitwise_in_{n}'])} {row[f'ratio_in_{n}']:.2f}" for n in PARTS]
        about = (row["recipe"], row["case"], str(row["M"]), row["by"])
        bits = (_equal(row["equals_general_gemm"]), _equal(row["same_codes"]))
        table.add_row(*about, *bits, *said, f"{row['median_ms']:.3f}", f"{row['host_us']:.0f}")
    return table


def _equal(is_equal: bool) -> str:
    return "equal" if is_equal else "differs"


if __name__ == "__main__":
    sys.exit(main())
