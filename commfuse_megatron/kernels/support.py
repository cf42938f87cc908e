"""Can the Triton kernels run here? One reason function; the same sentence goes into logs and errors.

Knows devices and versions; must not know shapes.
"""

import functools
import importlib.util

import torch

MIN_CAPABILITY = (8, 0)  # bf16 tensor cores
TMA_CAPABILITY = (9, 0)
MATMUL_DTYPES = (torch.bfloat16, torch.float16)


@functools.cache
def has_triton() -> bool:
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def multiprocessor_count(device_index: int) -> int:
    """Streaming multiprocessors of a CUDA device."""
    return torch.cuda.get_device_properties(device_index).multi_processor_count


@functools.cache
def supports_tma(device_index: int) -> bool:
    """Whether the device has the bulk tensor copy engine."""
    return torch.cuda.get_device_capability(device_index) >= TMA_CAPABILITY


def raw_stream(device_index: int) -> int:
    """Handle of the device's current stream, without building a Stream object."""
    return torch._C._cuda_getCurrentRawStream(device_index)


def persistent_matmul_unavailable_reason(device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Why `persistent_matmul` cannot serve inputs of `dtype` on `device`; None when it can.

    From capability 9.0 operands travel by TMA; on 8.x the same kernel loads them through pointers.
    """
    device = torch.device(device)
    if dtype not in MATMUL_DTYPES:
        return f"persistent_matmul multiplies bfloat16 and float16, not {dtype}"
    if device.type != "cuda":
        return f"persistent_matmul needs a CUDA device, not {device.type!r}"
    if not torch.cuda.is_available():
        return "persistent_matmul needs a CUDA device, and torch finds none"
    if not has_triton():
        return "persistent_matmul needs Triton, which is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"persistent_matmul needs compute capability 8.0, and {device} has {capability[0]}.{capability[1]}"
    return None
