"""The README's lines on plain tensors, run as they stand."""

import textwrap
from pathlib import Path

import torch

from tests.harness import run_threads

README = Path(__file__).parents[2] / "README.md"
S, B, K, N, H, D = 8, 1, 6, 10, 4, 3


def readme_lines() -> str:
    blocks = README.read_text(encoding="utf-8").split("\n\n")
    first = next(number for number, block in enumerate(blocks) if "import OverlapConfig, OverlapContext, ops" in block)
    return textwrap.dedent("\n\n".join(blocks[first : first + 2]))


def test_the_shapes_in_the_readme_are_those_of_the_operations(capsys):
    def body(group, device):
        size = group.size()
        names = {
            "group": group,
            "x": torch.randn(S // size, B, K),
            "weight": torch.randn(N // size, K),
            "bias": torch.randn(N // size),
            "weight2": torch.randn(N, N // size),
            "weight3": torch.randn(N, H // size * D),
            **{name: torch.randn(S, B, H // size, D) for name in "qkv"},
        }
        exec(readme_lines(), names)
        return [tuple(names[name].shape) for name in "yzw"]

    assert run_threads(2, body) == [[(S, B, N // 2), (S // 2, B, N), (S // 2, B, N)]] * 2
    assert capsys.readouterr().out.count("query_split_attention fprop, M ") == 2
