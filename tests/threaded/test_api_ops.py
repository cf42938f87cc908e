"""The examples on plain tensors in `docs/api.md`, run as they stand."""

from pathlib import Path

import torch

from tests.harness import run_threads
from tests.harness.documents import code_of

API = Path(__file__).parents[2] / "docs" / "api.md"
S, B, K, N, H, D = 8, 1, 6, 10, 4, 3
VOCABULARY = 6


def test_the_examples_run_and_shapes_are_those_that_are_written(capsys):
    program = code_of(API, "## `commfuse_megatron`") + code_of(API, "## `commfuse_megatron.ops`")

    def body(group, device):
        size = group.size()
        names = {
            "torch": torch, "group": group, "x": torch.randn(S // size, B, K), "weight": torch.randn(N // size, K),
            "bias": torch.randn(N // size), "weight2": torch.randn(N, N // size, requires_grad=True),
            "weight3": torch.randn(N, H // size * D),
            "ids": torch.randint(0, VOCABULARY, (B, S), generator=torch.Generator().manual_seed(0)),
            "vectors": torch.randn(VOCABULARY // size, N), **{name: torch.randn(S, B, H // size, D) for name in "qkv"},
            **{f"{name}_rows": torch.randn(S // size, B, H, D) for name in "qkv"},
        }  # fmt: skip
        exec(program, names)
        torch.testing.assert_close(names["z"], names["expected"])
        torch.testing.assert_close(names["gradient"], names["main_grad"])
        assert names["main_grad"].any()
        return [tuple(names[name].shape) for name in "yzweu"]

    rows = (S // 2, B, N)
    assert run_threads(2, body) == [[(S, B, N // 2), rows, rows, rows, (S // 2, B, H * D)]] * 2
    assert "query_split_attention fprop, M " in capsys.readouterr().out
