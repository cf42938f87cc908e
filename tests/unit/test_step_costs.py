"""What counts as saved by autograd."""

import torch

from commfuse_megatron.tools.verify.step_costs import _saved_bytes


def test_what_is_still_kept_counts_once_and_parameters_do_not() -> None:
    linear = torch.nn.Linear(4, 4)
    x = torch.randn(8, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        x.exp()  # saves its result, which nobody keeps
        doubled = 2 * x
        return (linear(doubled) * doubled).sum()  # saves the weight, `doubled` twice, and what the linear gives

    assert _saved_bytes(linear, forward) == 2 * 8 * 4 * 4
