"""`OverlapContext`: everything that overlapped operations of one process group share.

Owns the private transport, the buffers, the plans and the report. Knows no Megatron. Creating one is collective over
its own group only; closing it is local.
"""

import dataclasses
import functools
import json
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Self

import torch
from torch import distributed as dist

from commfuse_megatron.config import OverlapConfig
from commfuse_megatron.errors import CommFuseError, ConfigError, ShapeError, TransportError, TransportTimeoutError
from commfuse_megatron.kernels.attention_choice import AttentionKernels
from commfuse_megatron.plan.linear_plan import LinearPlan
from commfuse_megatron.problem import Problem
from commfuse_megatron.runtime.agreement import Agreement
from commfuse_megatron.runtime.gemm import SliceGemm
from commfuse_megatron.runtime.lanes import Lanes
from commfuse_megatron.runtime.leaving import (
    is_process_ending,
    look_at_exit,
    release_what_is_done,
    release_when_done,
)
from commfuse_megatron.runtime.link import Link, Peers
from commfuse_megatron.runtime.meter import exposed_us
from commfuse_megatron.runtime.planning import Planner, TryOut
from commfuse_megatron.runtime.prepared import PreparedPass
from commfuse_megatron.runtime.recorder import Recorder
from commfuse_megatron.runtime.slots import Slots
from commfuse_megatron.transport.select import choose_backend, choose_nccl_settings, create_transport, device_of_backend
from commfuse_megatron.transport.stream_memory import StreamEvent

__all__ = ["OpRecord", "OverlapContext"]


# Paths on which the group's own collectives carry everything.
_COLLECTIVE_PATHS = ("sequential", "async")

# How long the end of a failed context waits for its streams, before it leaves the rest to later.
_LETTING_GO_S = 2.0

# Sequence lengths that vary from call to call must not fill the memory.
_MOST_REASONS = 1024


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One line of the report: a problem, the path it takes and how often it ran.

    M, N, K: tokens of the full sequence, output and input features of this rank's weight. transport: what carries it;
    on paths without transfers of ours the backend of the group's collectives.
    exposed_comm_us: mean over the latest recorded calls of the time in which a transfer ran and nothing computed; None
    unless the configuration records. predicted_us, measured_us: what the planner knew of the path taken; None where it
    did not ask. attention: the kernel of an attention, "flash (FA3)" say where the program activated FlashAttention-3;
    None for a linear, and where Megatron's own attention runs. attention_reason: why that and no faster one.
    """

    op: str
    pass_name: str
    M: int
    N: int
    K: int
    dtype: str
    group_size: int
    path: str
    reason: str
    algorithm: str
    chunks_per_shard: int
    transport: str
    gemm: str
    calls: int
    exposed_comm_us: float | None
    predicted_us: float | None = None
    measured_us: float | None = None
    attention: str | None = None
    attention_reason: str = ""

    def __str__(self) -> str:
        how = self.path if self.path != "sliced" else f"sliced, {self.algorithm}, m={self.chunks_per_shard}"
        kernel = "" if self.attention is None else f", {self.attention} attention"
        problem = f"{self.op} {self.pass_name}, M {self.M} N {self.N} K {self.K} {self.dtype}"
        return (
            f"{problem}: {how}, {self.transport}{kernel},"
            f" {self.calls} call{'' if self.calls == 1 else 's'} ({self.reason})"
        )


class OverlapContext:
    """Transport, buffers, plans and report for the overlapped operations of `group`.

    Args:
        group: the (tensor-parallel) process group. All its members must create the context, in the same order relative
            to other contexts of this group; nobody else takes part.
        config: equal on all ranks.

    Operations may be called on any stream; each is ordered after the one before. The replay of a CUDA graph that
    captured some is out of sight: order it and the calls beside it by stream or event.

    Raises (before any operation is run):
        ConfigError: the ranks bring different configurations, or one that cannot be served here; or `group` is none.
        TransportTimeoutError: a member did not come within `config.transport.timeout_s`.
    """

    def __init__(self, group: dist.ProcessGroup, config: OverlapConfig | None = None) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise ConfigError(
                f"OverlapContext takes a torch.distributed process group that this rank belongs to, got {group!r}. "
                "torch.distributed.group.WORLD is None before init_process_group."
            )
        self.config = OverlapConfig() if config is None else config
        self.group = group
        self.group_size: int = group.size()
        self.group_rank: int = group.rank()
        timeout_s = self.config.transport.timeout_s
        store = _private_store(group, self.group_rank)
        self._agreement = Agreement(store, self.group_rank, self.group_size, timeout_s)
        try:
            self._agreement.agree(f"context with {json.dumps(self.config.to_dict(), sort_keys=True)}")
        except ShapeError as error:
            raise ConfigError(f"the configurations differ between ranks: {error}") from None
        try:
            backend = choose_backend(group, self.config.transport, self._agreement.exchange)
        except ConfigError as error:
            self._agreement.refuse(error, wait=False)
            raise
        self.device = device_of_backend(backend)
        try:
            private = dist.PrefixStore("transport", store)
            exchange = self._agreement.exchange
            self.nccl = choose_nccl_settings(group, backend, self.config, exchange)
            transport = create_transport(backend, group, private, self.config.transport, self.nccl, exchange)
        except Exception as error:
            self._agreement.refuse(error, wait=False)
            raise
        # Who is still connecting would fail if the others closed their ends already.
        try:
            self._agreement.agree(f"the {backend} transport is made")
        except CommFuseError as error:
            transport.abort()
            raise error if not isinstance(error, ShapeError) else TransportError(str(error)) from None
        self.slots = Slots(self.device, transport.window)
        #: Side streams for work that may run beside other work of the same operation.
        self.lanes = Lanes(self.device)
        self.attention_kernels = AttentionKernels(self.device)
        self._recorder = Recorder(self.device) if self.config.record else None
        peers = Peers(self.group_rank, _global_ranks(group))
        self.link = Link(transport, peers, timeout_s, self._recorder)
        self._prepared: dict[Problem, PreparedPass] = {}
        #: Of the call that began last.
        self.latest_plan: LinearPlan | None = None
        #: Calls whose arguments were seen before, by everything a check looks at: `ops.arguments` fills and reads it.
        self.known_calls: dict[Hashable, PreparedPass] = {}
        self._first_reasons: dict[Hashable, str] = {}
        self._gemms: dict[tuple[torch.dtype, bool], SliceGemm] = {}
        self.planner = Planner(self)
        self._is_closed = False
        check = self.config.check_agreement
        self._agrees_every_call = backend == "gloo" if check is None else check
        self.link.last_done = StreamEvent() if self.device.type == "cuda" else None
        self._last_stream = 0
        # Runs at garbage collection and at interpreter exit: an unclosed communicator would outlive what it needs.
        release = functools.partial(_release, self.link, self.lanes, self.slots)
        self._finalizer = weakref.finalize(self, release_when_done, self.link, release)
        look_at_exit(self.link)

    # -- what operations use ------------------------------------------------------------------------------------------

    def prepare(self, problem: Problem, try_out: TryOut | None = None) -> PreparedPass:
        """The plan and programs of `problem`; the same object at every call.

        try_out: times plans of this problem, where the planner wants it. What it raises, raises here.
        """
        prepared = self._prepared.get(problem)
        if prepared is None:
            prepared = self.make_pass(problem, self.planner.plan(problem, try_out))
            self._prepared[problem] = prepared
        return prepared

    def prepare_like(self, problem: Problem, plan: LinearPlan, reason: str) -> PreparedPass:
        """The pass of `problem` under a plan that was made for another one."""
        prepared = self._prepared.get(problem)
        if prepared is None:
            plan = dataclasses.replace(plan, reason=reason, predicted_us=None, measured_us=None)
            prepared = self._prepared[problem] = self.make_pass(problem, plan)
        return prepared

    def make_pass(self, problem: Problem, plan: LinearPlan) -> PreparedPass:
        """What `plan` works with; neither kept nor reported."""
        dtype = getattr(torch, problem.dtype)
        # Beside or between the group's own collectives, a GEMM takes what is fastest alone.
        gemm = self.slice_gemm(dtype) if plan.is_scheduled else self._gemm(dtype, is_beside_transfers=False)
        return PreparedPass(self, problem, plan, gemm)

    def known_plan(self, problem: Problem) -> LinearPlan | None:
        """What `prepare` would neither measure nor ask other ranks for; None if it would."""
        prepared = self._prepared.get(problem)
        return None if prepared is None else prepared.plan

    def has_run(self, problem: Problem) -> bool:
        """Whether a call of `problem` was made outside of CUDA graphs: planned, agreed on, its buffers large enough.

        A graph may then capture further calls: they need nothing of the host and of other ranks. Equal on all ranks,
        which make the same calls.
        """
        prepared = self._prepared.get(problem)
        return prepared is not None and prepared.is_agreed and prepared.calls > 0

    def slice_gemm(self, dtype: torch.dtype) -> SliceGemm:
        """The GEMM that runs beside this context's transfers."""
        return self._gemm(dtype, is_beside_transfers=True)

    def forget_programs(self) -> None:
        """Free what calls replay; it is made anew where it is needed again. What was agreed and counted stays."""
        self.known_calls.clear()
        for prepared in self._prepared.values():
            prepared.forget_programs()

    def agree_on(self, prepared: PreparedPass) -> None:
        """Compare a problem with the other ranks', if it is new or every call is to be compared."""
        self.require_usable()
        if (self._agrees_every_call or not prepared.is_agreed) and self.group_size > 1:
            if self.is_capturing:  # what is captured now is agreed on at the first call outside
                return
            plan = prepared.plan
            orders = [order for order in (plan.scatter_order, plan.gather_order) if order is not None]
            owners = f", owners {orders}" if orders else ""
            self.agree(f"{prepared.problem}, {plan.path} {plan.algorithm} {plan.chunks_per_shard}{owners}")
        prepared.is_agreed = True

    def agree(self, statement: str) -> None:
        """Return if all ranks bring the same `statement`; else raise ShapeError on all of them."""
        self._in_step(statement, lambda: self._agreement.agree(statement))

    def exchange(self, text: str) -> list[str]:
        """What every rank brings, by rank."""
        return self._in_step("an exchange between ranks", lambda: self._agreement.exchange(text))

    def first_reason(self, key: Hashable, reason: str | None) -> str | None:
        """`reason`, or that of the first rank that has one; None if none has. Collective the first time of each key.

        While a graph is captured nobody can be asked: then this rank's own, of a new key.
        """
        known = self._first_reasons.get(key)
        if known is None:
            if self.is_capturing:
                return reason
            if len(self._first_reasons) >= _MOST_REASONS:
                self._first_reasons.clear()
            everyone = enumerate(self.exchange(reason or ""))
            found = next(((rank, text) for rank, text in everyone if text), (self.group_rank, ""))
            elsewhere = f"group rank {found[0]}: " if found[1] and not reason else ""
            known = self._first_reasons[key] = elsewhere + found[1]
        return known or None

    def make_together[T](self, make: Callable[[], T]) -> T | str:
        """What `make` makes, if no rank runs out of memory; else, on all ranks, which one did."""
        made: T | None = None
        complaint = ""
        try:
            made = make()
        except torch.OutOfMemoryError as error:
            complaint = f"group rank {self.group_rank}: {str(error).partition('.')[0]}"
        complaints = [text for text in self.exchange(complaint) if text]
        if complaints:
            return "; ".join(complaints)
        assert made is not None
        return made

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Record nothing inside the with-block: what runs there is no call of the user's."""
        recorder = self._recorder
        self._recorder = self.link.recorder = None
        try:
            yield
        finally:
            self._recorder = self.link.recorder = recorder

    def refuse(self, error: Exception) -> None:
        """Raise `error` here, and on the other ranks where they look: at every call, or at a new problem."""
        self.require_usable()
        if self.group_size == 1:
            raise error
        try:
            self._agreement.refuse(error, wait=self._agrees_every_call)
        except CommFuseError as raised:
            raise self._fail_unless_in_step(raised) from raised.__cause__

    def enter(self, problem: Problem) -> Link:
        """Start one operation's use of the buffers, ordered after the one before, whatever stream that ran on."""
        link = self.link
        if self.link.last_done is not None:
            link.is_capturing = torch._C._cuda_isCurrentStreamCapturing()
            stream = torch._C._cuda_getCurrentRawStream(self.device.index)
            if link.is_capturing:
                self.slots.note_capture()
            elif stream != self._last_stream:
                self.link.last_done.wait(stream)
                self._last_stream = stream
        if self._recorder is not None:
            self._recorder.begin_call(problem)
        return link

    def leave(self) -> None:
        """End what `enter` began."""
        if self._recorder is not None:
            self._recorder.end_call()
        done = self.link.release()
        if done is not None:
            self.link.last_done = done
        elif self.link.last_done is not None and not self.link.is_capturing:
            self.link.last_done.record(torch._C._cuda_getCurrentRawStream(self.device.index))

    def require_usable(self) -> None:
        """Raise what made the context fail, if it did, or TransportError if it is closed."""
        if self.link.failure is not None:
            raise self.link.failure
        if self._is_closed:
            raise TransportError("this OverlapContext is closed; create a new one")

    # -- what users see -----------------------------------------------------------------------------------------------

    @property
    def transport_name(self) -> str:
        """ "gloo", "nccl" or "copy_engine"."""
        return self.link.transport.name

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, if the configuration asks for one."""
        return self._recorder

    @property
    def buffer_bytes(self) -> int:
        """Memory that the context's buffers hold on this rank."""
        return self.slots.size_bytes

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being captured on the current stream."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    @property
    def is_usable(self) -> bool:
        """Whether the context is neither closed nor failed."""
        return not self._is_closed and self.link.failure is None

    def report(self) -> list[OpRecord]:
        """One record per problem met, in the order of first calls."""
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
                gemm=entry.gemm.name,
                calls=entry.calls,
                exposed_comm_us=exposed.get(entry.problem),
                predicted_us=entry.plan.predicted_us,
                measured_us=entry.plan.measured_us,
                attention=None if entry.attention is None else entry.attention.name,
                attention_reason=entry.attention_reason,
            )
            for entry in self._prepared.values()
        ]

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block until all transfers are done.

        Raises what made the context fail, or TransportTimeoutError after `timeout_s` (default: the configured one).
        """
        limit_s = self.config.transport.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + limit_s
        while not self.link.is_idle and self.link.failure is None:
            if time.monotonic() > deadline:
                raise self.link.fail(TransportTimeoutError(f"transfers were still in flight after {limit_s} s"))
            time.sleep(1e-4)
        if self.link.failure is not None:
            raise self.link.failure

    def close(self) -> None:
        """Release transport and buffers; local, may be called again. Raises what made the context fail, if it did."""
        if self._is_closed:
            return
        try:
            self.synchronize()
        finally:
            self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        if exc_type is None:
            self.close()
        else:  # the peers may never come: do not wait for what is in flight
            self._give_up()

    # -- details ------------------------------------------------------------------------------------------------------

    def _give_up(self) -> None:
        """Release all that nothing in flight uses, and the rest when nothing is."""
        self._is_closed = True
        self.forget_programs()
        deadline = time.monotonic() + _LETTING_GO_S
        while self.link.failure is not None and self.link.is_in_flight and time.monotonic() < deadline:
            time.sleep(1e-3)  # what was given up is let go at once, as a rule
        self._finalizer()
        release_what_is_done(self.link)

    def _fail_unless_in_step(self, error: Exception) -> Exception:
        """`error` for raising; the context fails unless all ranks are known to have stopped at the same call.

        Else this rank's next call could meet another one's present call, and give wrong numbers.
        """
        is_in_step = self._agrees_every_call and isinstance(error, ShapeError)
        return error if is_in_step else self.link.fail(error)

    def _in_step[T](self, statement: str, meet: Callable[[], T]) -> T:
        """What `meet` gives, with the context failed where ranks may have stopped at different calls."""
        self.require_usable()
        try:
            return meet()
        except CommFuseError as error:
            raise self._fail_unless_in_step(error) from error.__cause__
        except BaseException as error:  # Ctrl-C while waiting: the others may yet go on with this call
            self.link.fail(TransportError(f"{statement} was interrupted by {type(error).__name__}: {error}"))
            raise

    def _gemm(self, dtype: torch.dtype, *, is_beside_transfers: bool) -> SliceGemm:
        key = (dtype, is_beside_transfers)
        if key not in self._gemms:
            self._gemms[key] = SliceGemm(
                self.config.kernel,
                self.transport_name if is_beside_transfers else "none",
                self.nccl.channels * self.nccl.lanes,
                self.device,
                dtype,
                regains_sms=self.nccl.regains_sms,
            )
        return self._gemms[key]

    @property
    def _collectives(self) -> str:
        """What carries the group's own collectives."""
        try:
            return str(self.group._get_backend(self.device).name())
        except RuntimeError:  # the group serves other devices only
            return "none"

    def _exposed_by_problem(self) -> dict[Problem, float]:
        if self._recorder is None:
            return {}
        return {
            problem: sum(map(exposed_us, calls)) / len(calls)
            for problem, calls in self._recorder.calls_by_problem().items()
        }


def _release(link: Link, lanes: Lanes, slots: Slots) -> None:
    link.stop_watching()
    try:
        if link.failure is None:
            link.transport.close()
            lanes.close()
    finally:
        if not is_process_ending():
            with torch.cuda.device(slots.device) if slots.device.type == "cuda" else nullcontext():
                if link.last_done is not None:
                    link.last_done.wait(torch._C._cuda_getCurrentRawStream(slots.device.index))
                slots.release()


def _private_store(group: dist.ProcessGroup, group_rank: int) -> dist.Store:
    """A part of the group's store that only this context uses: all members make their n-th context together."""
    store = group.get_group_store()
    ordinal = store.add(f"commfuse/contexts/{group_rank}", 1)
    return dist.PrefixStore(f"commfuse/context-{ordinal}", store)


def _global_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    if not dist.is_initialized():
        return tuple(range(group.size()))
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):  # a group made without torch.distributed's registry
        return tuple(range(group.size()))
