"""Ranks as processes under torch.distributed: the registered groups, stores and global ranks that users have."""

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.errors import TransportTimeoutError
from tests.harness import run_spawned
from tests.harness.linear_cases import OPS, Case, check_linear, draw


def _groups_within_the_world(world, device):
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = halves[world.rank() % 2]
    with OverlapContext(world) as context_of_world, OverlapContext(mine) as context_of_mine:
        for seed, (group, context) in enumerate([(world, context_of_world), (mine, context_of_mine)] * 2):
            for op in OPS:
                check_linear(Case(op=op, rows=9 + seed, seed=seed), group, context)
        global_ranks = context_of_mine.link._peers.global_ranks
    assert global_ranks == ((0, 2) if world.rank() % 2 == 0 else (1, 3))
    config = OverlapConfig(transport=TransportConfig(timeout_s=1.0), check_agreement=False)
    context = OverlapContext(mine, config)
    case = Case(op=OPS[0], rows=4, has_bias=False)
    operands = draw(case, mine.rank(), mine.size(), device)
    ops.all_gather_linear(operands.x, operands.weight, context=context)
    message = ""
    if world.rank() == 1:
        with pytest.raises(TransportTimeoutError) as error:
            ops.all_gather_linear(operands.x, operands.weight, context=context)
        message = str(error.value)
    dist.barrier()
    return message


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_world_and_strided_sub_groups_side_by_side():
    messages = run_spawned(4, _groups_within_the_world)
    assert "group rank 0 (global rank 1) got nothing from group rank 1 (global rank 3)" in messages[1]


class _TwoLinears(torch.nn.Module):
    """Operations between things that a compiler may fuse."""

    def __init__(self, context):
        super().__init__()
        self.context = context
        self.weights = torch.nn.ParameterList([torch.randn(6, 5), torch.randn(5, 6), torch.randn(6)])

    def forward(self, x):
        y = ops.all_gather_linear(2 * x, self.weights[0], self.weights[2], context=self.context)
        return 3 * ops.linear_reduce_scatter(torch.relu(y) + 1, self.weights[1], context=self.context)


def _inside_a_compiled_module(world, device):
    torch.manual_seed(world.rank())
    x = torch.randn(4, 2, 5)
    with OverlapContext(world) as context:
        module = _TwoLinears(context)
        results = []
        # aot_eager: all of the compiler but its last stage, which needs a C++ compiler.
        for call in (module, torch.compile(module, backend="aot_eager")):
            for _ in range(2):
                module.zero_grad()
                y = call(x)
                y.square().sum().backward()
                results.append([y.detach(), *(p.grad.clone() for p in module.parameters())])
        return [torch.equal(a, b) for found in results[1:] for a, b in zip(found, results[0], strict=True)]


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_compiled_module_gives_what_the_module_gives():
    """Fails without leaving the operations out of the graph: the compiler cannot trace them."""
    assert run_spawned(2, _inside_a_compiled_module) == [[True] * 12] * 2
