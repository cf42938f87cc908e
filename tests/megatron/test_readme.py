"""The README's Megatron lines, run as they stand."""

import textwrap
from pathlib import Path

import pytest
import torch

from tests.megatron.harness import run_megatron

README = Path(__file__).parents[2] / "README.md"


def readme_lines() -> str:
    """The indented block that imports `convert_model`."""
    blocks = README.read_text(encoding="utf-8").split("\n\n")
    first = next(number for number, block in enumerate(blocks) if "import apply_to_spec, convert_model" in block)
    return textwrap.dedent("\n\n".join(blocks[first : first + 2]))


def run_readme(group_size: int) -> tuple[float, int, int]:
    """Build the model by the README's lines and train one batch; (loss, overlapped calls, stock calls)."""
    from megatron.core.models.gpt.gpt_model import GPTModel

    from commfuse_megatron.plugin import model_report
    from commfuse_megatron.testing.gpt import SmallGPT, loss_of, transformer_config

    gpt = SmallGPT()
    names = {
        "GPTModel": GPTModel,
        "config": transformer_config(gpt, group_size),
        "sizes": {"vocab_size": gpt.vocab_size, "max_sequence_length": 64, "position_embedding_type": "rope"},
    }
    exec(readme_lines().replace('"configs/', f'"{README.parent}/configs/'), names)
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    loss = loss_of(names["model"], tokens)
    loss.backward()
    report = model_report(names["model"])
    return loss.item(), report.overlapped_calls, report.stock_calls


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_lines_in_the_readme_build_a_model_whose_linears_are_all_overlapped() -> None:
    assert "GPTModel(" in readme_lines()
    for loss, overlapped_calls, stock_calls in run_megatron(2, run_readme):
        assert 4.0 < loss < 7.0
        assert (overlapped_calls, stock_calls) == (10, 0)
