"""Pairs of layers, stock and ours, with equal weights; what a call gives; what is compared."""

from typing import Any

import torch
from torch import distributed as dist

from commfuse_megatron.plugin import CommFuseColumnParallelLinear, CommFuseRowParallelLinear
from commfuse_megatron.plugin.compat import ColumnParallelLinear, RowParallelLinear
from commfuse_megatron.plugin.decision import state_of
from commfuse_megatron.testing.gpt import SmallGPT, transformer_config

IN, OUT, BATCH, ROWS = 16, 24, 3, 4  # ROWS per rank
TOLERANCE = 1e-13
KINDS = ("column", "row")


def config(group_size: int, **options: Any) -> Any:
    return transformer_config(SmallGPT(dtype=options.pop("dtype", torch.float64)), group_size, **options)


def build(kind: str, cls: type, transformer: Any, **options: Any) -> Any:
    common: dict[str, Any] = {"config": transformer, "init_method": torch.nn.init.normal_, "bias": True}
    specific = {
        "column": {"gather_output": False, "skip_bias_add": False},
        "row": {"input_is_parallel": True, "skip_bias_add": False},
    }[kind]
    torch.manual_seed(3)
    layer = cls(IN, OUT, **{**common, **specific, **options})
    with torch.no_grad():
        layer.bias.copy_(torch.randn(OUT, dtype=torch.float64)[: layer.bias.numel()])
    return layer


def pair(kind: str, group_size: int, transformer: Any = None, **options: Any) -> tuple[Any, Any]:
    """Stock and ours, each with a configuration of its own unless one is given."""
    classes = {
        "column": (ColumnParallelLinear, CommFuseColumnParallelLinear),
        "row": (RowParallelLinear, CommFuseRowParallelLinear),
    }[kind]
    stock, ours = (build(kind, cls, transformer or config(group_size), **options) for cls in classes)
    return stock, ours


def example_input(kind: str, group_size: int, rows: int = ROWS, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """What this rank brings: all features of its rows to a column linear, its features of all rows to a row linear."""
    shape = (rows, BATCH, IN) if kind == "column" else (rows * group_size, BATCH, IN // group_size)
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def run(layer: Any, x: torch.Tensor, *, backward: Any = None, **call: Any) -> dict[str, torch.Tensor | None]:
    """Output, returned bias and every gradient of one call; `backward(output)` replaces a random gradient."""
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    output, bias = layer(x, **call)
    if backward is None:
        generator = torch.Generator().manual_seed(200 + dist.get_rank())
        gradient = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output.dtype)
        output.backward(gradient)
    else:
        backward(output)
    results = {"output": output.detach(), "returned bias": bias, "gradient of x": x.grad}
    return results | {f"gradient of {name}": p.grad for name, p in layer.named_parameters()}


def assert_equal(expected: dict, found: dict, tolerance: float = TOLERANCE) -> None:
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        if value is None or found[name] is None:
            assert found[name] is value, f"{name}: one is None"
            continue
        assert value.shape == found[name].shape, name
        assert value.dtype == found[name].dtype, name
        error = ((value - found[name]).abs().max() / value.abs().max()).item()
        assert error <= tolerance, f"{name} differs by {error:.1e}"


def assert_overlapped(layer: Any, calls: int = 1) -> None:
    state = state_of(layer)
    assert (state.overlapped_calls, state.stock_calls) == (calls, {})


def assert_stock(layer: Any, words: str) -> None:
    state = state_of(layer)
    assert state.overlapped_calls == 0
    (reason,) = state.stock_calls
    assert words in reason, reason


def count_batches(layer: Any) -> list[int]:
    """A one-element list that counts the transfer batches of the layer's context from now on."""
    transport = state_of(layer).context.link.transport
    count, exchange = [0], transport.exchange

    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return exchange(*args, **kwargs)

    transport.exchange = counted
    return count


def stop_counting(layer: Any) -> None:
    del state_of(layer).context.link.transport.exchange
