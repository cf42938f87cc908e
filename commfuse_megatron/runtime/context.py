"""`OverlapContext`: everything that overlapped operations of one process group share.

Owns the private transport, the buffers, the plans and the report. Knows no Megatron. Creating one is collective over
its own group only; closing it is local.
"""

import functools
import json
import time
import weakref
from contextlib import nullcontext
from typing import Self

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig, describe_differences
from commfuse_megatron.errors import CommFuseError, ConfigError, ShapeError, TransportError, TransportTimeoutError
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime import hardware
from commfuse_megatron.runtime.agreement import Agreement
from commfuse_megatron.runtime.consensus import Consensus
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.runtime.link import Link, Peers
from commfuse_megatron.runtime.meter import exposed_us
from commfuse_megatron.runtime.op_record import OpRecord
from commfuse_megatron.runtime.planning import Planner
from commfuse_megatron.runtime.prepared import PassContext
from commfuse_megatron.runtime.recorder import Recorder
from commfuse_megatron.runtime.renewal import MeetingPlace, reason_not_in_step
from commfuse_megatron.runtime.shutdown import (
    is_process_ending,
    release_what_is_done,
    release_when_done,
    track_until_exit,
)
from commfuse_megatron.runtime.slots import Slots
from commfuse_megatron.runtime.stored_plans import StoredPlans
from commfuse_megatron.transport.select import choose_nccl_settings, host_name
from commfuse_megatron.transport.stream_memory import Driver

# The guard of a group of one.
_ALONE = nullcontext()

# Paths on which the group's own collectives carry everything.
_COLLECTIVE_PATHS = ("sequential", "async", "stock")

# How long the end of a failed context waits for its streams, before it leaves the rest to later.
_LETTING_GO_S = 2.0

# How often who waits for transfers asks the store whether a rank goes no further.
_LOOK_S = 1.0


class OverlapContext(PassContext):
    """Transport, buffers, plans and report for the overlapped operations of `group`.

    Args:
        group: the (tensor-parallel) process group. All its members must create the context, in the same order relative
            to other contexts of this group; nobody else takes part.
        config: equal on all ranks.

    Operations may be called on any stream; each is ordered after the one before. The replay of a CUDA graph that
    captured some is out of sight: order it and the calls beside it by stream or event.

    Raises (before any operation is run):
        ConfigError: the ranks bring different configurations, or one that cannot be served here, or its `plan.file`
            cannot be read; or `group` is none.
        TransportTimeoutError: a member did not come within `config.transport.timeout_s`.
    """

    def __init__(
        self, group: dist.ProcessGroup, config: OverlapConfig | None = None, *, _place: MeetingPlace | None = None
    ) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"OverlapContext takes a torch.distributed process group that this rank belongs to, got {group!r}. "
                "torch.distributed.group.WORLD is None before init_process_group."
            )
        config = OverlapConfig() if config is None else config
        if not isinstance(config, OverlapConfig):
            raise ConfigError(
                f"OverlapContext takes an OverlapConfig, got {config!r}: make one with OverlapConfig(...), from_dict or"
                " from_file"
            )
        timeout_s = config.transport.timeout_s
        self._place = MeetingPlace.of_next_context(group) if _place is None else _place
        store = self._place.store
        agreement = Agreement(store, group, timeout_s)
        brought = agreement.exchange(json.dumps(config.to_dict()), topic="a context")
        differences = describe_differences([json.loads(text) for text in brought])
        if differences:
            raise ConfigError(
                f"the configurations differ between ranks: {differences}; give all ranks of the group the same one"
            )
        self.stored_plans = None
        machine = hardware.current
        if config.plan.file is not None:
            exchange = functools.partial(agreement.exchange, topic="the file of stored plans")
            self.stored_plans = StoredPlans(config.plan.file, group.rank(), exchange)
        try:
            exchange = functools.partial(agreement.exchange, topic="a transport")
            backend = machine.choose_backend(group, config.transport, exchange)
            exchange(backend)  # who failed there says so here: nobody waits for it where transports connect
            private = dist.PrefixStore("transport", store)
            nccl = choose_nccl_settings(group, backend, config, exchange)
            transport = machine.create_transport(backend, group, private, config.transport, nccl, exchange)
        except Exception as error:
            agreement.refuse(error, topic="a transport", wait=False)
            raise
        # Who is still connecting would fail if the others closed their ends already.
        try:
            agreement.agree(f"the {backend} transport is made", topic="a context")
        except CommFuseError as error:
            transport.abort()
            raise error if not isinstance(error, ShapeError) else TransportError(str(error)) from None
        device = machine.device_of(backend)
        peers = Peers(group.rank(), _global_ranks(group))
        self.global_rank = peers.global_ranks[group.rank()]
        link = Link(transport, peers, timeout_s, Recorder(device) if config.record else None, agreement)
        # Runs at garbage collection and at interpreter exit: an unclosed communicator would outlive what it needs.
        track_until_exit(link)
        check = config.check_agreement
        consensus = Consensus(
            agreement,
            link,
            compares_every_call=backend == "gloo" if check is None else check,
            is_capturing=functools.partial(_is_capturing, device),
        )
        super().__init__(config, group, device, nccl, link, consensus)
        release = functools.partial(_release, link, self.lanes, self.slots, machine.driver)
        self._finalizer = weakref.finalize(self, release_when_done, link, release)
        self.planner = Planner(self)
        link.last_done = machine.driver.event() if device.type == "cuda" else None
        self._not_in_step: str | None = None  # why there is no context in the place of this one

    # -- what users see -----------------------------------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, if the configuration asks for one."""
        return self.link.recorder

    @property
    def buffer_bytes(self) -> int:
        """Memory that the context's buffers hold on this rank."""
        return self.slots.size_bytes

    @property
    def is_usable(self) -> bool:
        """Whether the context is neither closed nor failed."""
        return not self.link.is_closed and self.link.failure is None

    @functools.cached_property
    def num_hosts(self) -> int:
        """How many hosts the ranks are on; collective the first time."""
        return len(set(self.consensus.exchange(host_name(), topic="the hosts of a context")))

    def report(self) -> list[OpRecord]:
        """One line per problem met, in the order of first calls."""
        exposed = self._exposed_by_problem()
        return [
            OpRecord(
                op=entry.problem.op,
                pass_name=entry.problem.pass_name,
                M=entry.problem.M,
                N=entry.problem.N,
                K=entry.problem.K,
                dtype=entry.problem.dtype,
                group_size=entry.problem.group_size,
                path=entry.plan.path,
                reason=entry.plan.reason,
                algorithm=str(entry.plan.algorithm),
                chunks_per_shard=entry.plan.chunks_per_shard,
                transport=self._collectives if entry.plan.path in _COLLECTIVE_PATHS else self.transport_name,
                gemm=entry.gemm_names,
                calls=entry.calls,
                exposed_comm_us=exposed.get(entry.problem),
                predicted_us=entry.plan.predicted_us,
                measured_us=entry.plan.measured_us,
                attention=None if entry.attention is None else entry.attention.name,
                attention_reason=entry.attention_reason,
                modes={mode: number for mode, number in entry.modes.items() if number},
                details=entry.plan.details,
            )
            for entry in self._prepared.values()
        ]

    def renew(self) -> "OverlapContext":
        """This context if it is usable; else one in its place, for a program that catches exceptions and goes on.

        Every rank whose context has failed must call it before anything else. There is a new context only where all
        are known to be in step (see `renewal`): every rank's exception was of one kind and ended the same operation.
        Otherwise, or when a rank does not come within seconds, what made the context fail is raised once more, with
        what to do. What was computed with the old context has no backward pass any more.
        """
        if self.is_usable:
            return self
        if not self.link.is_closed and not self.is_capturing and self._not_in_step is None:
            number = sum(prepared.calls for prepared in self._prepared.values())
            latest = "none" if self.latest_pass is None else self.latest_pass.problem
            begun = f"{number} operations had begun, the last {latest}"
            self._not_in_step = reason_not_in_step(
                self._place, self.group, self.link, begun, is_captured=self.slots.is_captured
            )
            if self._not_in_step is None:
                self._give_up()
                renewed = OverlapContext(self.group, self.config, _place=self._place.successor)
                renewed.link.advice = self.link.advice
                return renewed
        self.link.raise_failure(self._not_in_step)
        self.link.require_usable()
        raise AssertionError("a context that is not usable has a reason")

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until all transfers are done.

        Raises what made the context fail, UnsupportedError where a call was given up half-way, or TransportTimeoutError
        after `timeout_s` (default: the configured one).
        """
        if self.link.failure is None:
            with self.guard("the end of what is under way"):
                self._require_alone()
        limit_s = self.config.transport.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        look = time.monotonic() + _LOOK_S
        while not self.link.is_idle and self.link.failure is None:
            if time.monotonic() > deadline:
                raise self.link.fail(TransportTimeoutError(f"transfers were still in flight after {limit_s} s"))
            if time.monotonic() > look:  # they wait for a rank that goes no further, perhaps
                self.link.learn_of_peers()
                look = time.monotonic() + _LOOK_S
            time.sleep(1e-4)
        self.link.raise_failure()

    def close(self) -> None:
        """Release transport and buffers; local, may be called again. Raises what made the context fail, if it did."""
        if self.link.is_closed:
            return
        try:
            self.synchronize()
        finally:
            self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: BaseException | None, traceback: object) -> None:
        if exc_type is None:
            self.close()
        else:  # the peers may never come: do not wait for what is in flight
            self.link.note_leaving(exc)
            self._give_up()

    # -- details ------------------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Release all that nothing in flight uses, and the rest when nothing is."""
        self.link.is_closed = True
        self.forget_programs()
        deadline = time.monotonic() + _LETTING_GO_S
        while self.link.failure is not None and self.link.is_in_flight and time.monotonic() < deadline:
            time.sleep(1e-3)  # what was given up is let go at once, as a rule
        self._finalizer()
        release_what_is_done(self.link)

    @property
    def _collectives(self) -> str:
        """What carries the group's own collectives."""
        try:
            return str(self.group._get_backend(self.device).name())
        except RuntimeError:  # the group serves other devices only
            return "none"

    def _exposed_by_problem(self) -> dict[Problem, float]:
        if self.recorder is None:
            return {}
        return {
            problem: sum(map(exposed_us, calls)) / len(calls)
            for problem, calls in self.recorder.calls_by_problem().items()
        }


def _release(link: Link, lanes: Lanes, slots: Slots, driver: Driver) -> None:
    link.stop_watching()
    try:
        if link.failure is None:
            link.transport.close()
            lanes.close()
    finally:
        if not is_process_ending():
            with torch.cuda.device(slots.device) if slots.device.type == "cuda" else nullcontext():
                if link.last_done is not None:
                    link.last_done.wait(driver.current_stream(slots.device))
                slots.release()


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    if not dist.is_initialized():
        return tuple(range(group.size()))
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # a group made without torch.distributed's registry
        return tuple(range(group.size()))
