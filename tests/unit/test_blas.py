"""What cuBLASLt makes for a GEMM is destroyed with it: lengths that vary make many."""

import itertools

import pytest
import torch

from commfuse_megatron.errors import UnsupportedError
from commfuse_megatron.kernels import blas
from commfuse_megatron.kernels.blas import BlasMatmul, Matrix

MATRIX = Matrix((16, 16), (16, 1), torch.bfloat16)


class Library:
    """Makes numbered objects, and finds `found` algorithms."""

    def __init__(self, found: int) -> None:
        self.alive: set[int] = set()
        self._found = found
        self._numbers = itertools.count(1)

    def __getattr__(self, name):
        calls = {"Create": self._create, "Destroy": self._destroy, "GetHeuristic": self._find}
        call = next((call for end, call in calls.items() if name.endswith(end)), lambda *arguments: 0)

        def function(*arguments):
            return call(*arguments)

        function.__name__ = name
        return function

    def _create(self, made, *arguments):
        made._obj.value = next(self._numbers)
        self.alive.add(made._obj.value)
        return 0

    def _destroy(self, number):
        self.alive.remove(number)
        return 0

    def _find(self, *arguments):
        arguments[-1]._obj.value = self._found
        return 0


@pytest.fixture
def library(monkeypatch):
    def make(found):
        library = Library(found)
        monkeypatch.setattr(blas, "_library", lambda: library)
        monkeypatch.setattr(blas, "_handle", lambda: 0)
        return library

    return make


def test_with_the_gemm(library):
    library = library(1)
    gemm = BlasMatmul(MATRIX, MATRIX, MATRIX, has_bias=True)
    assert len(library.alive) == 4  # of the product and of three matrices
    del gemm
    assert library.alive == set()


@pytest.mark.parametrize("operand", [MATRIX, Matrix((16, 16), (32, 2), torch.bfloat16)])
def test_also_where_there_is_no_algorithm(operand, library):
    library = library(0)
    with pytest.raises(UnsupportedError):
        BlasMatmul(operand, MATRIX, MATRIX)
    assert library.alive == set()
