"""`StoredPlans`: the plans of a context that are kept in `plan.file`, for other runs of the program.

Group rank 0 alone touches the file, since nodes share no disk, and tells the others. Collective, each: every rank must
come with the same problem, which is compared first.
"""

import dataclasses
import json
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.plan.machine import Traits
from commfuse_megatron.plan.store import PlanStore, plan_of, why_no_file
from commfuse_megatron.problem import AttentionProblem, Problem
from commfuse_megatron.version import __version__

if TYPE_CHECKING:
    from commfuse_megatron.runtime.context import OverlapContext

__all__ = ["StoredPlans"]


class StoredPlans:
    """The file of one context.

    plans: all that were taken from the file or put into it, by problem. store: of group rank 0.
    Raises ConfigError on all ranks if there is a file and group rank 0 cannot read it.
    """

    def __init__(self, file: str, group_rank: int, exchange: Callable[[str], list[str]]) -> None:
        complaint = why_no_file(file) if group_rank == 0 else ""
        said = [json.loads(text) for text in exchange(json.dumps([socket.gethostname(), complaint]))]
        if said[0][1]:
            raise ConfigError(f"plan.file: {file} {said[0][1]}; name a file, which is made if it is missing")
        self.plans: dict[Problem, LinearPlan] = {}
        self.store = PlanStore(file) if group_rank == 0 else None
        self._num_hosts = len({host for host, _ in said})

    def plan(
        self,
        context: "OverlapContext",
        problem: Problem,
        possible: Sequence[LinearPlan],
        traits: Traits,
        choose: Callable[[], LinearPlan],
    ) -> LinearPlan:
        """The plan that the file holds for `problem`; else what `choose` gives, which it holds from then on.

        possible: see `PlanStore`. traits: of the context with operands of this dtype.
        """
        context.consensus.agree(f"planning {problem}", topic=problem.call)
        what = self._conditions(context, problem, traits), problem, possible
        found = self._tell(context, problem, lambda store: store.find(*what))
        if isinstance(found, str):
            chosen = choose()
            kept = self._tell(context, problem, lambda store: store.add(*what, chosen))
            assert isinstance(kept, LinearPlan)
            found = dataclasses.replace(kept, reason=f"{kept.reason} ({found})") if found else kept
        self.plans[problem] = found
        return found

    def _tell(
        self, context: "OverlapContext", problem: Problem, ask: Callable[[PlanStore], LinearPlan | str]
    ) -> LinearPlan | str:
        """What the store of group rank 0 answers, on all ranks."""
        answer = "" if self.store is None else ask(self.store)
        text = json.dumps(dataclasses.asdict(answer) if isinstance(answer, LinearPlan) else answer)
        told = json.loads(context.consensus.exchange(text, topic=f"the stored plan of {problem.call}")[0])
        return told if isinstance(told, str) else plan_of(told)

    def _conditions(self, context: "OverlapContext", problem: Problem, traits: Traits) -> dict[str, Any]:
        """All that a choice depends on but the problem."""
        config, device = context.config, context.device
        found: dict[str, Any] = {"device": "cpu", "hosts": self._num_hosts, **dataclasses.asdict(traits)}
        # Where costs do not count, as with several ranks on one GPU, that is why.
        found |= {
            "default": context.planner.default_reason,
            "commfuse_megatron": __version__,
            "torch": torch.__version__,
        }
        if device.type == "cuda":
            found |= {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
            found |= {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
        parts: list[Any] = [config.kernel, config.plan]
        if isinstance(problem, AttentionProblem):
            parts.append(config.attention)
            found["computed_by"] = context.attention_kernels.choose(problem, config.attention.kernel).name
        else:
            parts += [config.linear.fprop if problem.pass_name == "fprop" else config.linear.dgrad, config.linear.wgrad]
        for part in parts:
            found |= dataclasses.asdict(part)
        found |= {
            "max_buffer_mib": config.transport.max_buffer_mib,
            "graph_memory_mib": config.transport.graph_memory_mib,
        }
        del found["file"]
        return found
