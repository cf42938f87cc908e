"""`StoredPlans`: the plans of a context that are kept in `plan.file`, for other runs of the program.

Group rank 0 alone touches the file, since nodes share no disk, and tells the others. Collective, each: every rank must
come with the same problem, which is compared first.
"""

import dataclasses
import json
import socket
from collections.abc import Callable, Sequence
from typing import Any

from commfuse_megatron.errors import ConfigError
from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.plan.store import PlanStore, plan_of, why_no_file
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.consensus import Consensus


class StoredPlans:
    """The file of one context.

    plans: all that were taken from the file or put into it, by problem. store: of group rank 0.
    num_hosts: of the group.
    Raises ConfigError on all ranks if there is a file and group rank 0 cannot read it.
    """

    def __init__(self, file: str, group_rank: int, exchange: Callable[[str], list[str]]) -> None:
        complaint = why_no_file(file) if group_rank == 0 else ""
        said = [json.loads(text) for text in exchange(json.dumps([socket.gethostname(), complaint]))]
        if said[0][1]:
            raise ConfigError(f"plan.file: {file} {said[0][1]}; name a file, which is made if it is missing")
        self.plans: dict[Problem, PassPlan] = {}
        self.store = PlanStore(file) if group_rank == 0 else None
        self.num_hosts = len({host for host, _ in said})

    def plan(
        self,
        consensus: Consensus,
        conditions: dict[str, Any],
        problem: Problem,
        possible: Sequence[PassPlan],
        choose: Callable[[], PassPlan],
    ) -> PassPlan:
        """The plan that the file holds for `problem`; else what `choose` gives, which it holds from then on.

        conditions: all that a choice depends on but the problem. possible: see `PlanStore`.
        """
        consensus.agree(f"planning {problem}", topic=problem.call)
        what = conditions, problem, possible
        found = self._tell(consensus, problem, lambda store: store.find(*what))
        if isinstance(found, str):
            chosen = choose()
            kept = self._tell(consensus, problem, lambda store: store.add(*what, chosen))
            assert isinstance(kept, PassPlan)
            found = dataclasses.replace(kept, reason=f"{kept.reason} ({found})") if found else kept
        self.plans[problem] = found
        return found

    def _tell(
        self, consensus: Consensus, problem: Problem, ask: Callable[[PlanStore], PassPlan | str]
    ) -> PassPlan | str:
        """What the store of group rank 0 answers, on all ranks."""
        answer = "" if self.store is None else ask(self.store)
        text = json.dumps(dataclasses.asdict(answer) if isinstance(answer, PassPlan) else answer)
        told = json.loads(consensus.exchange(text, topic=f"the stored plan of {problem.call}")[0])
        return told if isinstance(told, str) else plan_of(told)
