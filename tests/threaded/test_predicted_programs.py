"""What is predicted is what runs: programs of calls are those that the planner lowers and times."""

import dataclasses

import pytest
import torch

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, TransportConfig, WgradConfig
from commfuse_megatron.plan.machine import Traits
from commfuse_megatron.plan.passes import lower_plan
from commfuse_megatron.runtime.prepared import PreparedPass
from tests.harness import run_threads
from tests.harness.emulated_gpu import emulate_copy_engine, take_part
from tests.harness.linear_cases import LINEARS, Case, draw, overlapped

GLOO = Traits(transport="gloo")
COPY_ENGINE = Traits(transport="copy_engine", replays=True)


@pytest.fixture
def lowered(monkeypatch) -> list:
    """(problem, plan, rank, program) of all that is lowered from now on."""
    found = []
    lower = PreparedPass.lower

    def noted(self, policy, asked):
        program = lower(self, policy, asked)
        found.append((self.problem, self.plan, self.group_rank, program))
        return program

    monkeypatch.setattr(PreparedPass, "lower", noted)
    return found


def config(path: str, algorithm: str, m: int, keeps: bool, backend: str) -> OverlapConfig:
    dgrad = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    linear = LinearConfig(
        fprop=dataclasses.replace(dgrad, path="sliced"), dgrad=dgrad, wgrad=WgradConfig(keep_gathered_input=keeps)
    )
    return OverlapConfig(linear=linear, transport=TransportConfig(backend=backend))


@pytest.mark.parametrize("traits", [GLOO, COPY_ENGINE], ids=lambda traits: traits.transport)
@pytest.mark.parametrize(
    ("path", "algorithm", "m"), [("sliced", "direct", 2), ("sliced", "ring", 2), ("bulk", "direct", 1)]
)
@pytest.mark.parametrize("keeps", [False, True])
def test_linears(traits, path, algorithm, m, keeps, lowered, monkeypatch):
    if traits is COPY_ENGINE:
        emulate_copy_engine(monkeypatch)

    def body(group, device):
        with take_part(group), OverlapContext(group, config(path, algorithm, m, keeps, traits.transport)) as context:
            for op in LINEARS:
                case = Case(op=op, rows=26, N=16, K=8, has_bias=False)
                overlapped(case, draw(case, group.rank(), group.size(), device), context)

    run_threads(3, body)
    assert len({problem for problem, *_ in lowered}) == 6, "of the linears that all-reduce, the passes that send"
    for problem, plan, rank, program in lowered:
        assert program == lower_plan(problem, plan, traits, rank)


def test_the_embedding(lowered):
    def body(group, device):
        with OverlapContext(group, config("sliced", "direct", 1, False, "gloo")) as context:
            weight = torch.zeros(4, 8).requires_grad_()
            ids = torch.arange(12).view(1, 12) % 8
            ops.embedding_reduce_scatter(ids, weight, 4 * group.rank(), context=context).sum().backward()

    run_threads(2, body)
    assert {problem.pass_name for problem, *_ in lowered} == {"fprop", "backward"}
    for problem, plan, rank, program in lowered:
        assert program == lower_plan(problem, plan, GLOO, rank)
