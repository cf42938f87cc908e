"""Puts programs on tapes: lists of driver and cuBLASLt calls over addresses, for the copy engine.

A tape is made at the first call of a program with layouts like these, and holds numbers only. Its computations are what
cuBLASLt serves; all others are given tensors (`tensor_tape`).
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from commfuse_megatron.kernels.attention import BoundAttention
from commfuse_megatron.kernels.blas import Matrix, alignment_of
from commfuse_megatron.runtime.buffers import buffers_of
from commfuse_megatron.runtime.link import Link, Watched
from commfuse_megatron.runtime.tensor_program import Means, name_of
from commfuse_megatron.schedule import program as prog
from commfuse_megatron.schedule.lower_linear import Asked
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.copy_flags import Key
from commfuse_megatron.transport.copy_steps import BoundOperation, Ref, Step
from commfuse_megatron.transport.copy_tape import CopyTape

# Layouts and scales that vary from call to call must not fill the memory.
_MOST_TAPES = 64

_NEVER = -2

# Bytes of which the starts of scratch memory are multiples, as the allocator's.
_SCRATCH_ALIGNMENT = 256


class Unservable(Exception):
    """A call of these layouts is not for a tape."""


class _Bound(NamedTuple):
    operation: BoundOperation | None  # None: these layouts are not for a tape
    generation: int  # of the buffers whose addresses it holds
    # Where the scratch memory of each lane begins in what a call allocates, and where the last ends; empty: none.
    scratch: tuple[int, ...] = ()


_UNKNOWN = _Bound(None, _NEVER)


def addresses_of(tensors: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """Those of a call: zero, and where each operand begins."""
    return (0, *[tensor.data_ptr() for tensor in tensors.values()])


class Tapes:
    """The tapes of one pass. lower: makes the program for what is asked."""

    def __init__(self, lower: Callable[[Asked], prog.Program], means: Means) -> None:
        self._lower, self._means, self._buffers = lower, means, means.buffers
        self._known: dict[Hashable, _Bound] = {}

    def run(
        self,
        asked: Asked,
        tensors: Mapping[str, torch.Tensor],
        kernels: "Mapping[str, TapeKernel] | None",
        layout: Hashable,
    ) -> Literal["tape", "graph"] | None:
        """Run the program for what is asked on these operands, as what it says; None, and nothing done, where that is
        not for a tape.

        tensors: as for `TensorProgram.run`, and what kernels use. layout: what else the tape depends on.
        """
        found = self._look_up(asked, tensors, kernels, layout)
        if found is None:
            return None
        # The memory is kept until the call is submitted: what the current stream does next comes after all lanes.
        operation, addresses, _ = found
        return self._means.link.replay(operation, addresses)

    def in_parts(
        self,
        asked: Asked,
        tensors: Mapping[str, torch.Tensor],
        kernels: "Mapping[str, TapeKernel] | None",
        layout: Hashable,
    ) -> "TapeInParts | None":
        """One call of the program for what is asked, whose parts are to be run; None where that is not for a tape."""
        found = self._look_up(asked, tensors, kernels, layout)
        return None if found is None else TapeInParts(self._means.link, *found)

    def _look_up(
        self,
        asked: Asked,
        tensors: Mapping[str, torch.Tensor],
        kernels: "Mapping[str, TapeKernel] | None",
        layout: Hashable,
    ) -> tuple[BoundOperation, tuple[int, ...], torch.Tensor | None] | None:
        """The tape, the addresses of this call, and its scratch memory."""
        addresses = addresses_of(tensors)
        alignment = alignment_of(*addresses)
        weight, grad_weight = tensors.get("weight"), tensors.get("grad_weight")
        strides = None if weight is None else weight.stride()
        target = None if grad_weight is None else (grad_weight.dtype, grad_weight.shape, grad_weight.stride())
        key = (asked, layout, alignment, strides, target)
        bound = self._known.get(key, _UNKNOWN)
        if bound.generation != self._buffers.generation:
            if bound.operation is None and bound is not _UNKNOWN:
                return None
            bound = self._bind(key, asked, tensors, kernels or {}, alignment)
        operation, _, scratch = bound
        if operation is None:
            return None
        memory = None
        if scratch:
            *starts, size_bytes = scratch
            memory = torch.empty(size_bytes, dtype=torch.uint8, device=self._buffers.device)
            addresses = (*addresses, *[memory.data_ptr() + start for start in starts])
        return operation, addresses, memory

    @property
    def operations(self) -> list[BoundOperation | None]:
        """All tapes; None for layouts that none serves."""
        return [bound.operation for bound in self._known.values()]

    def forget(self) -> None:
        """Free all tapes; they are made anew where they are needed again."""
        self._known.clear()

    def _bind(
        self,
        key: Hashable,
        asked: Asked,
        tensors: Mapping[str, torch.Tensor],
        kernels: "Mapping[str, TapeKernel]",
        alignment: int,
    ) -> _Bound:
        bound = _Bound(None, _NEVER)
        try:
            binder = TapeBinder(self._lower(asked), self._means, tensors, alignment)
            generation = self._buffers.generation
            bound = _Bound(binder.bind(kernels), generation, binder.scratch)
            if self._buffers.generation != generation:  # a GEMM wanted more scratch memory than those bound before it
                return self._bind(key, asked, tensors, kernels, alignment)
        except Unservable:
            pass
        if len(self._known) >= _MOST_TAPES:
            self._known.clear()
        self._known[key] = bound
        return bound


class TapeInParts:
    """One call of a tape, part by part. memory: kept as long as this is."""

    mode: Literal["stepped", "tape"] = "tape"

    def __init__(
        self, link: Link, operation: BoundOperation, addresses: tuple[int, ...], memory: torch.Tensor | None
    ) -> None:
        self._link, self._operation, self._addresses, self._memory = link, operation, addresses, memory

    @property
    def num_parts(self) -> int:
        """As `TensorProgram.num_parts`."""
        return len(self._operation.parts)

    def run_part(self, number: int) -> None:
        """Run one part, all of which are run, in their order."""
        self._link.replay_part(self._operation, self._addresses, number)

    def run_held(self, number: int) -> None:
        """Run what was held back at a pause, behind the caller's kernel, unless it has been run."""
        self._link.replay_held(self._operation, self._addresses, number)


class TapeBinder:
    """One tape in the making. Operands that a call brings are addresses by number, the context's are fixed ones.

    Args:
        tensors: operands like those of the calls, by name.
        alignment: bytes of which all their addresses are multiples.
    """

    def __init__(
        self, program: prog.Program, means: Means, tensors: Mapping[str, torch.Tensor], alignment: int
    ) -> None:
        buffers, link = means.buffers, means.link
        # Who sends and receives nothing ends nothing: others might do it on tensors, with no release.
        if alignment < 16 or not program.schedules:
            raise Unservable
        assert isinstance(link.transport, CopyEngineTransport)
        self._transport = link.transport
        self.tensors = tensors
        self.dtype, self.device = buffers.dtype, buffers.device
        self.itemsize = self.dtype.itemsize
        # Attention's pieces gain more by lanes than the host loses; of a linear the host's time shows.
        has_attention = any(isinstance(op, prog.Compute) for op in program.ops)
        self.tape = CopyTape(link.transport, lanes_when_stepped=has_attention)
        self._program, self._alignment, self._buffers, self._link = program, alignment, buffers, link
        self._name = ""  # of the computation in the making
        self._slots = {name: number for number, name in enumerate(tensors, start=1)}
        self._bounds = buffers_of(program, tensors)
        self._computed = {rows.operand for op in program.ops for rows in prog.rows_written(op)}
        buffers.reserve(self._bounds)
        self._lanes, self._hardware = means.lanes, means.hardware
        self._handles: tuple[int, ...] = ()
        self._arriving: dict[prog.Batch, Key] = {}
        self._unawaited: dict[prog.Batch, Key] = {}
        self._sends: list[Key] = []
        self._ordered: set[str] = set()
        self._scratch_bytes: dict[int | None, int] = {}  # that any kernel of a lane needs

    def bind(self, kernels: "Mapping[str, TapeKernel]") -> BoundOperation:
        """The tape of the program. Raises Unservable."""
        for op in self._program.ops:
            self._add(op, kernels)
        return self.tape.finish()

    @property
    def scratch(self) -> tuple[int, ...]:
        """Where the scratch memory of each lane begins in what a call allocates, and where the last ends.

        Its addresses follow those of the operands.
        """
        sizes = [-(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT for size in self._scratch_bytes.values()]
        return tuple(itertools.accumulate(sizes, initial=0)) if sizes else ()

    # -- addresses --------------------------------------------------------------------------------------------------

    def at(self, name: str, offset: int = 0) -> Ref:
        """`offset` bytes into an operand."""
        if name in self._bounds:
            return Ref(0, self.operand(name).data_ptr() + offset)
        return Ref(self._slots[name], offset)

    def rows(self, rows: prog.Rows) -> Ref:
        """Where rows begin."""
        return self.at(rows.operand, rows.start * self._features(rows.operand) * self._dtype_of(rows.operand).itemsize)

    def matrix(self, rows: prog.Rows) -> Matrix:
        """Rows as operand of a GEMM."""
        features = self._features(rows.operand)
        return Matrix((rows.count, features), (features, 1), self.dtype)

    def _features(self, name: str) -> int:
        return self._buffers.features if name in self._bounds else self.tensors[name].size(-1)

    def _dtype_of(self, name: str) -> torch.dtype:
        return self.operand(name).dtype if name in self._bounds else self.dtype

    def _alignment_at(self, ref: Ref) -> int:
        alignment = min(self._alignment, alignment_of(ref.offset))
        if alignment < 16:
            raise Unservable
        return alignment

    # -- ops --------------------------------------------------------------------------------------------------------

    def _add(self, op: prog.Op, kernels: "Mapping[str, TapeKernel]") -> None:
        if isinstance(op, prog.Computation):
            self._name = name_of(op)
        match op:
            case prog.Gemm():
                self._add_gemm(op)
            case prog.Issue():
                self._add_issue(op)
            case prog.Wait():
                self.tape.wait(*(self._arriving[batch] for batch in op.batches))
                self._note_arrivals(op.batches)
                for batch in op.batches:
                    self._unawaited.pop(batch, None)
            case prog.Copy():
                self._add_copy(op)
            case prog.Sum():
                self._add_sum(op)
            case prog.WeightGrad():
                self._add_weight_grad(op)
            case prog.Compute():
                kernel = kernels.get(op.kind)
                if kernel is None:
                    raise Unservable
                kernel(self, op)
            case prog.Fork():
                self._handles = self._lanes.handles(op.lanes)
                self.tape.fork(self._handles)
                self.tape.on(None)
            case prog.On():
                self.tape.on(self._lane(op.lane))
            case prog.After():
                self._add_after(op)
            case prog.Join():
                self.tape.join(self._handles)
            case prog.Pause():
                self.tape.pause()
            case prog.Finish():
                self.tape.wait(*self._unawaited.values(), *self._sends)
                self._note_arrivals((op.channel, op.step) for op in self._program.ops if isinstance(op, prog.Issue))

    def _note_arrivals(self, batches: Iterable[prog.Batch]) -> None:
        """Tell a recorder that what comes next is behind these."""
        if self._link.is_recorded:
            note, arrived = self._link.note_arrival, tuple(batches)

            def step(at: tuple[int, ...], stream: int) -> None:
                for batch in arrived:
                    note(batch)

            self.tape.then(step)

    def _lane(self, lane: int | None) -> int | None:
        return None if lane is None else self._handles[lane]

    def _add_after(self, op: prog.After) -> None:
        here = self.tape.lane
        self.tape.on(self._lane(op.lane))
        reached = self.tape.mark()
        self.tape.on(here)
        self.tape.follow(reached)

    def _add_issue(self, op: prog.Issue) -> None:
        tape, batch = self.tape, (op.channel, op.step)
        keys: list[Key] = []
        watched = Watched.of(self._program, op)
        if op.receive is not None:
            place = self._buffers.place(op.channel, op.receive)
            key = (op.receive.peer, place.flag, -1, -1)
            self._arriving[batch] = self._unawaited[batch] = key
            tape.notes.append((key, watched))
            keys.append(key)
        begin, end = self._transfer_marks(watched, keys)
        if self._link.is_recorded:
            tape.beside(begin)
        if op.send is not None:
            self._order(op.send.rows)
            place = self._buffers.place(op.channel, op.send)
            keys.append((-1, -1, op.send.peer, place.flag))
            self._sends.append(keys[-1])
            rows = op.send.rows
            size_bytes = rows.count * self._features(rows.operand) * self.itemsize
            tape.push(op.send.peer, place, self.rows(rows), size_bytes)
        if self._link.is_recorded:
            tape.beside(end)
        tape.issued(keys)

    def _transfer_marks(self, watched: Watched, keys: list[Key]) -> tuple[Step, Step]:
        """Record a batch on the copy stream: from before its push until both of its ends are done."""
        link, transport = self._link, self._transport
        marks: list[Any] = [None]

        def begin(at: tuple[int, ...], stream: int) -> None:
            marks[0] = link.mark(transport.copies)

        def end(at: tuple[int, ...], stream: int) -> None:
            link.note_transfer(watched, marks[0], transport.batches(*keys))

        return begin, end

    def _add_copy(self, op: prog.Copy) -> None:
        size_bytes = op.source.count * self._features(op.source.operand) * self.itemsize
        if not op.is_beside:
            self.tape.compute(self._transport.bind_copy_in_turn(self.rows(op.target), self.rows(op.source), size_bytes))
            return
        self._order(op.source)
        key = self.tape.copy(self.rows(op.target), self.rows(op.source), size_bytes, flag=op.number)
        batch = (prog.COPIES, op.number)
        self._arriving[batch] = self._unawaited[batch] = key

    def _order(self, source: prog.Rows) -> None:
        """The copy stream reads rows next: what a call brings complete is so from the start, the rest as it is now."""
        if source.operand not in self._bounds and source.operand not in self._computed:
            if "" in self._ordered:
                return
            self._ordered.add("")
        self.tape.order()

    def _add_gemm(self, op: prog.Gemm) -> None:
        weight = self.tensors["weight"]
        seen = weight.t() if op.is_forward else weight
        b = Matrix((seen.size(0), seen.size(1)), (seen.stride(0), seen.stride(1)), weight.dtype)
        if len(op.adds) > 1:
            raise Unservable
        addend = self.rows(op.adds[0]) if op.adds else None
        bias = self.at("bias") if op.has_bias else None
        shapes = (self.matrix(op.a), b, self.matrix(op.out))
        self.matmul(shapes, (self.rows(op.a), self.at("weight"), self.rows(op.out)), addend=addend, bias=bias)

    def _add_sum(self, op: prog.Sum) -> None:
        adds = [self.rows(rows) for rows in op.adds]
        distance = adds[1].offset - adds[0].offset if len(adds) > 1 else 0
        shape = (op.out.count, self._features(op.out.operand))
        bias = self.at("bias") if op.has_bias else None
        dtypes = self._dtype_of(op.own.operand), self._dtype_of(op.out.operand)
        self.sum(shape, (self.rows(op.own), adds[0], self.rows(op.out)), len(adds), distance, bias, dtypes)

    def _add_weight_grad(self, op: prog.WeightGrad) -> None:
        out = self.tensors["grad_weight"]
        grad, x = self.matrix(op.grad), self.matrix(op.x)
        (rows, n), k = grad.shape, x.shape[1]
        if out.shape != (n, k) or not out.is_contiguous() or out.dtype not in (self.dtype, torch.float32):
            raise Unservable
        shapes = (Matrix((n, rows), (1, n), self.dtype), x, Matrix((n, k), (k, 1), out.dtype))
        target = self.at("grad_weight")
        addend = target if op.accumulates else None
        self.matmul(shapes, (self.rows(op.grad), self.rows(op.x), target), addend=addend)

    # -- kernels ----------------------------------------------------------------------------------------------------

    def matmul(
        self,
        shapes: tuple[Matrix, Matrix, Matrix],
        refs: tuple[Ref, Ref, Ref],
        *,
        addend: Ref | None = None,
        bias: Ref | None = None,
    ) -> None:
        """out = a @ b (+ addend) (+ bias); nothing where it is empty."""
        if 0 in shapes[0].shape or 0 in shapes[1].shape:
            if 0 in shapes[2].shape:
                return
            raise Unservable
        matrices = [
            matrix._replace(alignment=self._alignment_at(ref)) for matrix, ref in zip(shapes, refs, strict=True)
        ]
        if addend is not None:
            least = min(matrices[2].alignment, self._alignment_at(addend))
            matrices[2] = matrices[2]._replace(alignment=least)
        for matrix in matrices:
            leading = matrix.strides[0] if matrix.strides[1] == 1 else matrix.strides[1]
            if 1 not in matrix.strides or leading * matrix.dtype.itemsize % 16:
                raise Unservable
        multiply = self._hardware.matmul(*matrices, has_addend=addend is not None, has_bias=bias is not None)
        wanted = multiply.workspace_bytes
        workspace_at = self._buffers.workspace(self.tape.lane, wanted) if wanted else 0
        (a, a_at), (b, b_at), (out, out_at) = refs
        extra, extra_at = addend or Ref(0, 0)
        row, row_at = bias or Ref(0, 0)

        def step(at: tuple[int, ...], stream: int) -> None:
            multiply(
                stream,
                workspace_at,
                at[a] + a_at,
                at[b] + b_at,
                at[out] + out_at,
                at[extra] + extra_at,
                at[row] + row_at,
            )

        self._compute(step)

    def sum(
        self,
        shape: tuple[int, int],
        refs: tuple[Ref, Ref, Ref],
        num_partials: int,
        distance_bytes: int,
        bias: Ref | None = None,
        dtypes: tuple[torch.dtype, torch.dtype] | None = None,
    ) -> None:
        """refs: own, partials, out. out = own + so many partials, each that many bytes behind the one before (+ bias);
        all [rows, cols]. dtypes: of own and out, if not the pass's."""
        offsets = [ref.offset for ref in (*refs, bias) if ref is not None]
        if any(size % 16 for size in (shape[1] * self.itemsize, distance_bytes, *offsets)):
            raise Unservable  # sums are bound for rows that begin on 16 bytes
        like = functools.partial(torch.empty, dtype=self.dtype, device="meta")
        own, out = (torch.empty(shape, dtype=dtype, device="meta") for dtype in dtypes or 2 * (self.dtype,))
        stride = distance_bytes // self.itemsize
        others = like(stride * max(0, num_partials - 1) + shape[0] * shape[1])
        others = others.as_strided((num_partials, *shape), (stride, shape[1], 1))
        row = None if bias is None else like(shape[1])
        add = self._hardware.sum(own, others, bias=row, out=out, device=self.device)
        if add is None:
            raise Unservable
        (own_slot, own_at), (partials_slot, partials_at), (out_slot, out_at) = refs

        def step(at: tuple[int, ...], stream: int) -> None:
            bias_at = None if bias is None else at[bias.slot] + bias.offset
            add(stream, at[own_slot] + own_at, at[partials_slot] + partials_at, bias_at, at[out_slot] + out_at)

        self._compute(step)

    def operand(self, name: str) -> torch.Tensor:
        """An operand, for its layout; of the context's its buffer."""
        if name in self._bounds:
            return self._buffers.tensor(name, self._bounds[name])
        return self.tensors[name]

    def ref(self, name: str, view: torch.Tensor) -> Ref:
        """Where a view into an operand begins."""
        return self.at(name, view.data_ptr() - self.operand(name).data_ptr())

    def copy(self, target: torch.Tensor, source: torch.Tensor, names: tuple[str, str]) -> None:
        """target = source, views into the operands of these names."""
        refs = [self.ref(name, view) for name, view in zip(names, (target, source), strict=True)]
        is_aligned = not any(ref.offset % 16 for ref in refs)
        run = self._hardware.copy(target, source, device=self.device, is_aligned=is_aligned)
        if run is None:
            raise Unservable
        (to_slot, to_at), (from_slot, from_at) = refs
        self._compute(lambda at, stream: run(stream, at[to_slot] + to_at, at[from_slot] + from_at))

    def compute(self, bound: BoundAttention, refs: Sequence[Ref]) -> None:
        """A kernel on these addresses, with scratch memory that kernels of one lane share."""
        run = bound.run
        refs = (self._scratch(bound.scratch_bytes), *refs)

        def step(at: tuple[int, ...], stream: int) -> None:
            run(stream, *[at[slot] + offset for slot, offset in refs])

        self._compute(step)

    def _scratch(self, size_bytes: int) -> Ref:
        if not size_bytes:
            return Ref(0, 0)
        lane, sizes = self.tape.lane, self._scratch_bytes
        sizes[lane] = max(size_bytes, sizes.get(lane, 0))
        return Ref(len(self._slots) + 1 + list(sizes).index(lane), 0)

    def _compute(self, step: Step) -> None:
        if not self._link.is_recorded:
            self.tape.compute(step)
            return
        link, name = self._link, self._name

        def recorded(at: tuple[int, ...], stream: int) -> None:
            mark = link.mark(stream)
            step(at, stream)
            link.note_compute(name, mark, None, stream)

        self.tape.compute(recorded)


#: Puts what a `Compute` op says on the tape in the making, or raises Unservable.
TapeKernel = Callable[[TapeBinder, prog.Compute], None]
