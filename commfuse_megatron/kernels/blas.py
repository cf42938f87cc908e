"""GEMMs by cuBLASLt on plain addresses: as `torch.mm`, with an addend apart from the output and little host time.

Why not `torch.mm`: it takes views, which cost more host time than the call; and `torch.addmm(out=)` first copies the
addend into the output, a pass over memory, where the library reads it in the epilogue. All that follows from shapes,
strides and types is worked out once, in a `BlasMatmul`; a call passes addresses. The library is the one that PyTorch
has loaded. Beware: nothing checks the addresses.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch

from commfuse_megatron.errors import UnsupportedError

# Values of the library's enumerations (cublasLt.h, library_types.h).
_COMPUTE_32F = 68
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS_AT = 3, 4, 7, 8
_EPILOGUE_BIAS = 4
_PREFER_WORKSPACE = 1
_PREFER_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C and D

#: Of the scratch memory that a call is given: what the library's documentation advises for Hopper.
WORKSPACE_BYTES = 32 << 20
_LEAST_ALIGNMENT, _MOST_ALIGNMENT = 16, 256
_ALGORITHM_BYTES = 64


class Matrix(NamedTuple):
    """Shape, strides and type; `alignment`: bytes of which every address passed is a multiple (16 or 256)."""

    shape: tuple[int, int]
    strides: tuple[int, int]
    dtype: torch.dtype
    alignment: int = _LEAST_ALIGNMENT


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_byte * _ALGORITHM_BYTES),
        ("workspace_bytes", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


@functools.cache
def blas_unavailable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why these GEMMs cannot run, or None."""
    if device.type != "cuda":
        return "cuBLASLt needs a CUDA device"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{dtype} GEMMs are left to torch.mm"  # its switches for TF32 apply there
    try:
        _library()
    except OSError as error:
        return f"PyTorch's cuBLASLt was not found ({error})"
    return None


class BlasMatmul:
    """out [M, N] = a [M, K] @ b [K, N] (+ addend [M, N]) (+ bias [N]): fp32 accumulation, one rounding.

    a and b have one stride of 1; out and addend have contiguous rows and one type: that of a, or float32. `out` may be
    `addend`. bias: contiguous, in the type of `out`. The choice of algorithm is the library's first, so it is the same
    at every run.
    """

    def __init__(self, a: Matrix, b: Matrix, out: Matrix, *, has_addend: bool = False, has_bias: bool = False) -> None:
        self._layouts: list[int] = []
        self._descriptor: int | None = None
        library = _library()
        self._has_addend = has_addend
        # The library counts columns first, so it computes the transposed product from the transposed operands.
        self._destroy = library.cublasLtMatmulDescDestroy, library.cublasLtMatrixLayoutDestroy
        self._descriptor = descriptor = _create(library.cublasLtMatmulDescCreate, _COMPUTE_32F, _TYPES[torch.float32])
        first, first_is_transposed = self._operand(b)
        second, second_is_transposed = self._operand(a)
        for attribute, is_transposed in ((_TRANSPOSE_A, first_is_transposed), (_TRANSPOSE_B, second_is_transposed)):
            value = ctypes.c_int32(int(is_transposed))
            _check(library.cublasLtMatmulDescSetAttribute(descriptor, attribute, ctypes.byref(value), 4), "attribute")
        self._bias: Any = None
        if has_bias:
            value = ctypes.c_int32(_EPILOGUE_BIAS)
            _check(library.cublasLtMatmulDescSetAttribute(descriptor, _EPILOGUE, ctypes.byref(value), 4), "epilogue")
            self._bias = ctypes.c_uint64(_MOST_ALIGNMENT)  # an address, for the choice of the algorithm
            self._set_bias = functools.partial(
                library.cublasLtMatmulDescSetAttribute, descriptor, _BIAS_AT, ctypes.addressof(self._bias), 8
            )
            _check(self._set_bias(), "bias")
        target = self._layout(out.shape[1], out.shape[0], out.strides[0], out.dtype)
        found = _find(library, (descriptor, first, second, target), (b.alignment, a.alignment, out.alignment))
        self._algorithm = ctypes.create_string_buffer(bytes(found.algorithm), _ALGORITHM_BYTES)
        #: Of the scratch memory that a call needs; 0: none, its address does not matter.
        self.workspace_bytes: int = found.workspace_bytes
        one, beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if has_addend else 0.0)
        self._keep = (one, beta)
        self._handle = _handle()
        self._first, self._second, self._target = first, second, target
        self._one, self._beta = ctypes.addressof(one), ctypes.addressof(beta)
        self._algorithm_at = ctypes.addressof(self._algorithm)
        self._call = library.cublasLtMatmul

    def __call__(
        self, stream: int, workspace_at: int, a_at: int, b_at: int, out_at: int, addend_at: int = 0, bias_at: int = 0
    ) -> None:
        """Launch on a stream of the current device, given by its handle."""
        target = self._target
        if self._bias is not None:
            self._bias.value = bias_at
            self._set_bias()
        status = self._call(
            self._handle,
            self._descriptor,
            self._one,
            b_at,
            self._first,
            a_at,
            self._second,
            self._beta,
            addend_at if self._has_addend else out_at,
            target,
            out_at,
            target,
            self._algorithm_at,
            workspace_at,
            self.workspace_bytes,
            stream,
        )
        if status:
            _check(status, "cublasLtMatmul")

    def __del__(self) -> None:
        if not self._layouts and self._descriptor is None:
            return
        destroy_descriptor, destroy_layout = self._destroy
        for layout in self._layouts:
            destroy_layout(layout)
        if self._descriptor is not None:
            destroy_descriptor(self._descriptor)

    def _operand(self, matrix: Matrix) -> tuple[int, bool]:
        """(layout, is transposed) of the transposed operand, columns first."""
        (rows, cols), (row_stride, col_stride) = matrix.shape, matrix.strides
        if col_stride == 1 or cols == 1:
            return self._layout(cols, rows, max(row_stride, cols), matrix.dtype), False
        if row_stride == 1 or rows == 1:
            return self._layout(rows, cols, max(col_stride, rows), matrix.dtype), True
        raise UnsupportedError(f"cuBLASLt: a matrix with strides {matrix.strides} has no stride of 1")

    def _layout(self, rows: int, cols: int, leading: int, dtype: torch.dtype) -> int:
        layout = _create(_library().cublasLtMatrixLayoutCreate, _TYPES[dtype], rows, cols, leading)
        self._layouts.append(layout)
        return layout


def alignment_of(*addresses: int) -> int:
    """The alignment class of addresses: 256, 16, or 1 where `BlasMatmul` does not serve."""
    together = 0
    for address in addresses:
        together |= address
    if together % _MOST_ALIGNMENT == 0:
        return _MOST_ALIGNMENT
    return _LEAST_ALIGNMENT if together % _LEAST_ALIGNMENT == 0 else 1


@functools.cache
def _library() -> Any:
    major = (torch.version.cuda or "0").split(".")[0]
    library = ctypes.CDLL(f"libcublasLt.so.{major}")  # by its soname: the one in this process already
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.cublasLtMatmul.argtypes = [pointer] * 14 + [ctypes.c_size_t, pointer]
    library.cublasLtCreate.argtypes = [pointer]
    library.cublasLtMatmulDescCreate.argtypes = [pointer, integer, integer]
    library.cublasLtMatmulDescSetAttribute.argtypes = [pointer, integer, pointer, ctypes.c_size_t]
    library.cublasLtMatrixLayoutCreate.argtypes = [pointer, integer, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64]
    library.cublasLtMatmulPreferenceCreate.argtypes = [pointer]
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, integer, pointer, ctypes.c_size_t]
    for destroy in ("MatmulDesc", "MatrixLayout", "MatmulPreference"):
        getattr(library, f"cublasLt{destroy}Destroy").argtypes = [pointer]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [pointer] * 7 + [integer, pointer, pointer]
    return library


@functools.cache
def _handle() -> int:
    return _create(_library().cublasLtCreate)


def _create(function: Any, *arguments: Any) -> int:
    """What a `create(&made, ...)` function makes."""
    made = ctypes.c_void_p()
    _check(function(ctypes.byref(made), *arguments), function.__name__)
    assert made.value is not None
    return made.value


def _find(library: Any, problem: tuple[int, int, int, int], alignments: tuple[int, int, int]) -> _Found:
    preference = _create(library.cublasLtMatmulPreferenceCreate)
    try:
        return _find_with(library, problem, preference, alignments)
    finally:
        library.cublasLtMatmulPreferenceDestroy(preference)


def _find_with(
    library: Any, problem: tuple[int, int, int, int], preference: int, alignments: tuple[int, int, int]
) -> _Found:
    descriptor, first, second, target = problem
    workspace = ctypes.c_uint64(WORKSPACE_BYTES)
    set_attribute = library.cublasLtMatmulPreferenceSetAttribute
    _check(set_attribute(preference, _PREFER_WORKSPACE, ctypes.byref(workspace), 8), "preference")
    for attribute, alignment in zip(_PREFER_ALIGNMENTS, (*alignments, alignments[-1]), strict=True):
        value = ctypes.c_uint32(alignment)
        _check(set_attribute(preference, attribute, ctypes.byref(value), 4), "preference")
    found, count = _Found(), ctypes.c_int()
    operands = (descriptor, first, second, target, target, preference)
    status = library.cublasLtMatmulAlgoGetHeuristic(_handle(), *operands, 1, ctypes.byref(found), ctypes.byref(count))
    _check(status, "cublasLtMatmulAlgoGetHeuristic")
    if count.value < 1 or found.state:
        raise UnsupportedError("cuBLASLt has no algorithm for this GEMM")
    return found


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what} failed with cuBLAS status {status}")
