"""`PlanStore`: a file of plans, in JSON, from which later runs take theirs. Knows no ranks.

Groups and jobs may share a file: `add` keeps what others have written, and of two plans of one problem the one that was
written first, which it gives to both.
"""

import dataclasses
import difflib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from commfuse_megatron.plan.pass_plan import PassPlan
from commfuse_megatron.problem import Problem
from commfuse_megatron.schedule import Algorithm

logger = logging.getLogger(__name__)

#: How the reason of a plan from a file begins.
STORED = "stored in "

_FORMAT = 1
# Who writes holds the lock for milliseconds. It ends with its process; on a file system without locks taking it fails.
_LOCK_S = 10.0
# Of sequence lengths that vary from call to call: every plan is written with all others. Writing so many: not measured.
_MOST_PLANS = 4096
# Beside the plans, where all who share them take the lock. It stays: removed, it could be held by two where a network
# file system still shows the old one. Git ignores it.
_FOLDER = ".commfuse"


def why_no_file(file: str) -> str:
    """Why `file` cannot be read; "" if it can, or is not there yet."""
    path = Path(file)
    try:
        if path.exists() and not path.is_file():
            return "is no regular file"
        path.open("rb").close()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return ""


def read_sections(path: Path) -> list[dict[str, Any]]:
    """What the file holds: plans by problem, for every set of conditions; nothing if there is none.

    Raises ValueError where it is no file of plans, OSError where it cannot be read.
    """
    if not path.exists():
        return []
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != _FORMAT:
            raise ValueError(f"its format is {data['format']}, this version reads {_FORMAT}")
        return [{"conditions": dict(each["conditions"]), "plans": dict(each["plans"])} for each in data["sections"]]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of plans: {error!r}; delete it, or name another") from None


def plan_of(entry: Mapping[str, Any]) -> PassPlan:
    """The plan whose fields these are; else TypeError, ValueError or KeyError."""
    values = {field.name: entry[field.name] for field in dataclasses.fields(PassPlan)}
    values |= {"algorithm": Algorithm(values["algorithm"]), "pieces": tuple(values["pieces"])}
    return PassPlan(**values)


class PlanStore:
    """A file of plans.

    conditions, everywhere: all that a choice depended on but the problem, as JSON has it. possible: the plans that may
    be run, without reasons and times. complaints: what kept it from reading or writing, logged;
    nothing is written any more then.
    """

    def __init__(self, file: str) -> None:
        self.complaints: list[str] = []
        self._path = Path(os.path.realpath(file))  # programs change their folder
        #: Problems that were there before: this run's own tell nothing of why another one is not.
        self._at_first = [text for section in self._read() or () for text in section["plans"]]

    def find(self, conditions: dict[str, Any], problem: Problem, possible: Iterable[PassPlan]) -> PassPlan | str:
        """The plan of `problem`, whose reason says where it is from; or why there is none, "" in a new file."""
        name, sections = self._path.name, self._read()
        if sections is None:
            return f"{name} was not read"
        held = [(section["conditions"], section["plans"].get(str(problem))) for section in sections]
        held = [(there, entry) for there, entry in held if entry is not None]
        # What was measured holds where nothing may be measured, too.
        fitting = [conditions, *([conditions | {"measure": "auto"}] if conditions.get("measure") == "never" else [])]
        for wanted in fitting:
            for there, entry in held:
                if there == wanted:
                    plan = _possible(entry, possible, problem)
                    if plan is None:
                        return f"what {name} has cannot be run here"
                    return dataclasses.replace(plan, reason=f"{STORED}{name} {entry.get('stored')}: {plan.reason}")
        if held:
            return f"{name} has it for {min((_differences(there, conditions) for there, _ in held), key=len)}"
        nearest = difflib.get_close_matches(str(problem), self._at_first, n=1, cutoff=0.0)
        return f"{name} does not have it, but {nearest[0]}" if nearest else ""

    def add(
        self, conditions: dict[str, Any], problem: Problem, possible: Iterable[PassPlan], plan: PassPlan
    ) -> PassPlan:
        """What the file holds for `problem` then: `plan`, or what another group has written meanwhile."""
        if self.complaints:  # once is enough: who waits for a lock would wait at every problem
            return plan
        from filelock import FileLock  # with asyncio and more, which `commfuse --help` does without

        try:
            with FileLock(self._beside("lock"), timeout=_LOCK_S):
                sections = read_sections(self._path)
                plans = next((each["plans"] for each in sections if each["conditions"] == conditions), None)
                if plans is None:
                    plans = {}
                    sections.append({"conditions": conditions, "plans": plans})
                held = _possible(plans.get(str(problem)), possible, problem)
                if held is not None:
                    return held
                if sum(len(each["plans"]) for each in sections) >= _MOST_PLANS:
                    raise ValueError(f"{self._path} holds {_MOST_PLANS} plans, and takes no more")
                stored = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
                plans[str(problem)] = dataclasses.asdict(plan) | {"stored": stored}
                whole = self._beside("new")
                whole.write_text(json.dumps({"format": _FORMAT, "sections": sections}, indent=1) + "\n", "utf-8")
                os.replace(whole, self._path)
        except (OSError, ValueError, NotImplementedError) as error:  # a lock that does not come is an OSError
            self._complain(f"plans are not stored: {error}")
        return plan

    def _beside(self, suffix: str) -> Path:
        folder = self._path.parent / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / ".gitignore").exists():
            (folder / ".gitignore").write_text("*\n", "utf-8")
        return folder / f"{self._path.name}.{suffix}"

    def _read(self) -> list[dict[str, Any]] | None:
        try:
            return read_sections(self._path)
        except (OSError, ValueError) as error:
            self._complain(f"no plans are read: {error}")
            return None

    def _complain(self, complaint: str) -> None:
        if complaint not in self.complaints:
            self.complaints.append(complaint)
            logger.warning("%s", complaint)


def _possible(entry: Any, possible: Iterable[PassPlan], problem: Problem) -> PassPlan | None:
    """The plan of an entry; None if it is none, or may not be run."""
    try:
        plan = plan_of(entry)
        is_whole = not plan.pieces or (sum(plan.pieces) == problem.group_size - 1 and min(plan.pieces) > 0)
        return plan if is_whole and plan.candidate in [each.candidate for each in possible] else None
    except (TypeError, ValueError, KeyError):  # there is none, or somebody has edited it
        return None


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {json.dumps(there.get(name))} (here {json.dumps(here.get(name))})"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    )
