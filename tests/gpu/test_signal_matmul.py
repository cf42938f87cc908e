"""`signal_matmul` on one GPU: a second stream brings rows late, in any order, and takes them when they are counted.

Rows that have not come, and results that are not stored, are NaN, so whoever reads too early shows.
"""

import itertools
import random

import pytest
import torch

from commfuse_megatron.errors import ShapeError, UnsupportedError
from commfuse_megatron.kernels import RowChunk, TileTable, signal_matmul
from commfuse_megatron.kernels.signal_variant import SIGNAL_TILES
from commfuse_megatron.kernels.support import signal_matmul_unavailable_reason
from commfuse_megatron.transport.stream_memory import StreamMemory, batch
from tests.harness.captures import capture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

BF16 = torch.bfloat16
DEVICE = torch.device("cuda", 0)
PASSES = ("fprop", "dgrad")
NUM_SMS = 120  # leaves some for the kernels by which tests delay things


@pytest.fixture(autouse=True, scope="module")
def _needs_the_kernel():
    reason = signal_matmul_unavailable_reason(DEVICE)
    if reason is not None:
        pytest.skip(reason)


def integers(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device=DEVICE).to(dtype)


def padded(values: torch.Tensor, pad: int = 0) -> torch.Tensor:
    """The same matrix, with rows at multiples of 16 bytes and `pad` elements more between them."""
    *sizes, cols = values.shape
    buffer = torch.full((*sizes, -(-cols // 8) * 8 + pad), torch.nan, dtype=values.dtype, device=DEVICE)
    return buffer[..., :cols].copy_(values)


def poison(*shape: int) -> torch.Tensor:
    return padded(torch.full(shape, torch.nan, dtype=BF16, device=DEVICE))


def operands(M, N, K, pass_name, seed=0, pad=0):
    a, b = integers(M, K, seed=seed), integers(K, N, seed=seed + 1)
    return padded(a, pad), padded(b.t(), pad).t() if pass_name == "fprop" else padded(b, pad)


class Side:
    """A second stream, flags and counters, and what happens on it."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.flags = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        self.counters = torch.zeros(64, dtype=torch.int32, device=DEVICE)
        self._memory = StreamMemory()

    def follow(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream())

    def join(self) -> None:
        torch.cuda.current_stream().wait_stream(self.stream)

    def delay(self, cycles: int) -> None:
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(cycles)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self.stream):
            target.copy_(source)

    def set(self, flag: int) -> None:
        self._run(self._memory.write_value(self.flags[flag].data_ptr(), 1))

    def wait_for(self, counter: int, count: int) -> None:
        """Wait, and make the counter zero again."""
        at = self.counters[counter].data_ptr()
        self._run(self._memory.wait_for(at, count), self._memory.write_value(at, 0))

    def _run(self, *ops) -> None:
        self._memory.run(self._memory.handle(self.stream.cuda_stream), batch(ops))


def assert_same(result: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    assert torch.equal(result.double().nan_to_num(777.5), wanted.double()), what


def cut(M: int, number: int, rng: random.Random) -> list[tuple[int, int]]:
    """Rows 0 to M in so many ranges of any size."""
    ends = sorted(rng.sample(range(1, M), min(number, M) - 1))
    return list(itertools.pairwise([0, *ends, M]))


def even(M: int, number: int) -> list[tuple[int, int]]:
    return [(M * i // number, M * (i + 1) // number) for i in range(number)]


# ---- arrival ----


@pytest.mark.parametrize("tile", SIGNAL_TILES, ids=lambda tile: str(tile.block_n))
@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("sizes", [(1024, 768, 320), (2048, 1544, 1000), (777, 120, 65)], ids=str)
def test_no_row_is_read_before_its_flag_is_set(sizes, pass_name, tile):
    M, N, K = sizes
    rng, side = random.Random(M), Side()
    for trial in range(8):
        ranges = even(M, 4) if trial < 4 else cut(M, 5, rng)
        rng.shuffle(ranges)
        chunks = [RowChunk(*rows, flag=index or None) for index, rows in enumerate(ranges)]
        table = TileTable(chunks, M, N, DEVICE, num_sms=NUM_SMS, tile=tile)
        source, b = operands(M, N, K, pass_name, seed=trial)
        a, out = poison(M, K), poison(M, N)
        arrivals = list(range(1, len(ranges)))
        rng.shuffle(arrivals)
        # First with all flags set: CUDA loads a kernel when it is first launched, for which it waits for the device.
        for is_late in (False, True):
            a.fill_(torch.nan)
            out.fill_(torch.nan)
            a[slice(*ranges[0])] = source[slice(*ranges[0])]
            side.flags.fill_(0 if is_late else 1)
            side.follow()
            signal_matmul(a, b, out=out, table=table, flags=side.flags)
            for index in arrivals:
                side.delay(rng.choice((1, 20_000, 200_000)))
                rows = slice(*ranges[index])
                side.copy(a[rows], source[rows])
                side.set(index)
            side.join()
            torch.cuda.synchronize()
        assert_same(out, (source.double() @ b.double()).to(BF16), trial)


# ---- departure ----


@pytest.mark.parametrize("tile", SIGNAL_TILES, ids=lambda tile: str(tile.block_n))
@pytest.mark.parametrize("pass_name", PASSES)
@pytest.mark.parametrize("sizes", [(1024, 768, 64), (4096, 1544, 320), (777, 120, 65)], ids=str)
def test_rows_are_in_memory_when_they_are_counted(sizes, pass_name, tile):
    M, N, K = sizes
    rng, side = random.Random(M), Side()
    for trial in range(12):
        ranges = even(M, 8) if trial % 2 else cut(M, 5, rng)
        chunks = [RowChunk(*rows, counter=index) for index, rows in enumerate(ranges)]
        rng.shuffle(chunks)
        table = TileTable(chunks, M, N, DEVICE, num_sms=NUM_SMS, tile=tile)
        a, b = operands(M, N, K, pass_name, seed=trial)
        out, sent = poison(M, N), poison(M, N)
        side.follow()
        signal_matmul(a, b, out=out, table=table, counters=side.counters)
        for chunk in chunks:
            side.wait_for(chunk.counter, table.counts[chunk.counter])
            rows = slice(chunk.first_row, chunk.end_row)
            side.copy(sent[rows], out[rows])
            side.delay(rng.choice((0, 20_000)))
        side.join()
        wanted = (a.double() @ b.double()).to(BF16)
        assert_same(out, wanted, trial)
        assert_same(sent, wanted, trial)
        assert side.counters.tolist() == [0] * 64


# ---- both, and partials ----


class ReduceScatter:
    """A rank's part of a reduce-scatter: others' rows leave as they are done, the own ones add what has arrived."""

    def __init__(self, sizes, ranks, rank, pass_name="dgrad", **how) -> None:
        self.M, self.N, self.K = sizes
        self.own = (self.M * rank // ranks, self.M * (rank + 1) // ranks)
        others = [rows for rows in even(self.M, ranks) if rows != self.own]
        chunks = [RowChunk(*rows, counter=index) for index, rows in enumerate(others)]
        chunks.append(RowChunk(*self.own, partials=tuple(range(ranks - 1))))
        self.table = TileTable(chunks, self.M, self.N, DEVICE, **{"num_sms": NUM_SMS, **how})
        self.others, self.side = others, Side()
        self.a, self.b = operands(self.M, self.N, self.K, pass_name)
        rows = self.own[1] - self.own[0]
        self.source = padded(integers(ranks - 1, rows, self.N, seed=5))
        self.arrived = poison(ranks - 1, rows, self.N)
        self.out, self.sent = poison(self.M, self.N), poison(self.M, self.N)
        self.side.flags.fill_(1)  # so that nothing is late, and all kernels are loaded afterwards
        self.run((1,))
        torch.cuda.synchronize()

    def poison(self) -> None:
        for tensor in (self.arrived, self.out, self.sent):
            tensor.fill_(torch.nan)

    def run(self, delays=(0,)) -> None:
        side, delays = self.side, itertools.cycle(delays)
        side.follow()
        signal_matmul(self.a, self.b, out=self.out, table=self.table, flags=side.flags, counters=side.counters,
                      partials=self.arrived)  # fmt: skip
        for index, rows in enumerate(self.others):
            side.wait_for(index, self.table.counts[index])
            side.copy(self.sent[slice(*rows)], self.out[slice(*rows)])
            delay = next(delays)
            if delay:
                side.delay(delay)
            side.copy(self.arrived[index], self.source[index])
            side.set(index)
        side.join()
        side.flags.zero_()

    def check(self, what: object = "") -> None:
        wanted = self.a.double() @ self.b.double()
        own = slice(*self.own)
        for rows in self.others:
            assert_same(self.sent[slice(*rows)], wanted[slice(*rows)].to(BF16), what)
        assert_same(self.out[own], (wanted[own] + self.source.double().sum(0)).to(BF16), what)


@pytest.mark.parametrize("tile", SIGNAL_TILES, ids=lambda tile: str(tile.block_n))
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (4, 2), (8, 7)])
def test_own_rows_add_what_arrives(ranks, rank, tile):
    for sizes, pass_name in itertools.product([(2048, 768, 320), (1000, 776, 136)], PASSES):
        call = ReduceScatter(sizes, ranks, rank, pass_name, tile=tile)
        for delays in ((0,), (0, 100_000, 5_000), (1_000_000, 0)):
            call.poison()
            call.run(delays)
            call.check(delays)


def test_partials_are_added_in_order_and_rounded_once():
    call = ReduceScatter((1024, 512, 256), 4, 1)
    call.a.normal_()
    call.source.normal_().mul_(30)
    call.poison()
    call.run()
    own = slice(*call.own)
    signal_rows = TileTable([RowChunk(0, 256)], 256, 512, DEVICE, tile=call.table.tile)
    product = torch.empty(256, 512, dtype=BF16, device=DEVICE)
    signal_matmul(call.a[own].contiguous(), call.b, out=product, table=signal_rows)
    exact = call.a[own].double() @ call.b.double()
    total = exact + call.source.double().sum(0)
    error = (call.out[own].double() - total).abs()
    summed = call.a[own].double().abs() @ call.b.double().abs() + call.source.double().abs().sum(0)
    assert (error <= 1.01 * 2**-8 * total.abs() + 2**-20 * summed).all(), error.max()
    assert not torch.equal(call.out[own], (product.float() + call.source.float().sum(0)).to(BF16)), "rounded twice"


def test_bits_depend_on_no_delay_and_no_number_of_blocks():
    first = None
    for num_sms in (120, 64, 1):
        call = ReduceScatter((1024, 768, 1000), 4, 2, num_sms=num_sms, tile=SIGNAL_TILES[0])
        torch.manual_seed(0)
        call.a.normal_()
        call.source.normal_()
        for delays in ((0,), (50_000, 0, 3_000)):
            call.poison()
            call.run(delays)
            first = call.out[slice(*call.own)].clone() if first is None else first
            assert torch.equal(call.out[slice(*call.own)], first), (num_sms, delays)


def test_graphs_replay_with_new_data():
    call = ReduceScatter((1000, 776, 136), 4, 1)
    call.poison()
    graph = capture(call.run)
    for seed in range(4):
        call.poison()
        call.a.copy_(integers(1000, 136, seed=seed))
        call.source.copy_(integers(*call.source.shape, seed=50 + seed))
        graph.replay()
        call.check(seed)


@pytest.mark.slow
def test_ten_thousand_calls_end_and_are_right():
    call = ReduceScatter((1024, 512, 128), 4, 3)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    call.run()
    call.check()
    wanted, sent = call.out.clone(), call.sent.clone()
    for _ in range(10_000):
        call.poison()
        call.run()
        wrong += (call.out != wanted).sum()
        for rows in call.others:
            wrong += (call.sent[slice(*rows)] != sent[slice(*rows)]).sum()
    assert wrong.item() == 0


# ---- shapes ----


@pytest.mark.slow
def test_a_thousand_random_shapes():
    rng, side = random.Random(7), Side()
    side.flags.fill_(3)
    for trial in range(1000):
        M, N, K = (rng.choice((rng.randint(1, 40), rng.randint(1, 700), 128 * rng.randint(1, 6))) for _ in range(3))
        ranges = cut(M, rng.randint(1, 6), rng)
        added = sorted(rng.sample(range(len(ranges) + 1), 2))
        num_partials = rng.randint(0, 3) if added[0] < added[1] else 0
        chunks = [
            RowChunk(*rows, rng.choice((None, index)), rng.choice((None, 0, index)),
                     (index,) * num_partials if added[0] <= index < added[1] else ())
            for index, rows in enumerate(ranges)
        ]  # fmt: skip
        rng.shuffle(chunks)
        tile, num_sms = rng.choice((None, *SIGNAL_TILES)), rng.choice((None, 1, 7))
        table = TileTable(chunks, M, N, DEVICE, num_sms=num_sms, tile=tile)
        a, b = operands(M, N, K, rng.choice(PASSES), seed=trial, pad=rng.choice((0, 8, 24)))
        wanted = a.double() @ b.double()
        partials = None
        if num_partials:
            first, end = ranges[added[0]][0], ranges[added[1] - 1][1]
            partials = padded(integers(num_partials, end - first, N, seed=trial))
            wanted[first:end] += partials.double().sum(0)
        around = torch.full((M + 2, -(-N // 8) * 8 + 8), 77.0, dtype=BF16, device=DEVICE)
        out = around[1 : M + 1, :N]
        side.counters.zero_()
        what = (trial, M, N, K, chunks, tile, num_sms)
        signal_matmul(a, b, out=out, table=table, flags=side.flags, counters=side.counters, partials=partials,
                      flag_value=3)  # fmt: skip
        assert_same(out, wanted.to(BF16), what)
        counts = [table.counts.get(index, 0) for index in range(64)]
        assert side.counters.tolist() == counts, what
        out.fill_(77.0)
        assert (around == 77.0).all(), what


def test_float16():
    a, b = integers(300, 200, dtype=torch.float16), integers(200, 104, dtype=torch.float16, seed=1)
    out = torch.empty(300, 104, dtype=torch.float16, device=DEVICE)
    table = TileTable([RowChunk(0, 300)], 300, 104, DEVICE)
    assert_same(signal_matmul(a, b, out=out, table=table), (a.double() @ b.double()).half())


# ---- refusals ----


def test_refuses_what_does_not_fit():
    a, b, out = integers(64, 128), integers(128, 96), torch.empty(64, 96, dtype=BF16, device=DEVICE)
    flags = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    plain = TileTable([RowChunk(0, 64)], 64, 96, DEVICE)
    waits = TileTable([RowChunk(0, 32), RowChunk(32, 64, flag=2)], 64, 96, DEVICE)
    counts = TileTable([RowChunk(0, 64, counter=0)], 64, 96, DEVICE)
    adds = TileTable([RowChunk(0, 32, partials=(0,)), RowChunk(32, 64)], 64, 96, DEVICE)
    for keywords, error, words in (
        ({"a": integers(65, 128)}, ShapeError, "the table of tiles"),
        ({"b": b.half()}, UnsupportedError, "all must be"),
        ({"a": integers(64, 132)[:, :128]}, UnsupportedError, "multiple of 16 bytes"),
        ({"out": out.cpu()}, ShapeError, "CUDA device -1"),
        ({"out": out.t().contiguous().t()}, UnsupportedError, "contiguous along its rows"),
        ({"table": waits, "flags": flags}, ShapeError, "at least 3"),
        ({"table": waits}, ShapeError, "flags are none"),
        ({"table": counts}, ShapeError, "counters are none"),
        ({"table": adds, "flags": flags}, ShapeError, "partials are none"),
        ({"partials": out[None]}, ShapeError, "none, as no chunk"),
        ({"table": adds, "flags": flags, "partials": out[None, :32].double()}, UnsupportedError, "partials are"),
        ({"a": integers(64, 128), "out": None}, ShapeError, "overlaps a"),
    ):
        arguments = {"a": a, "b": b, "out": out, "table": plain, **keywords}
        if arguments["out"] is None:
            arguments["out"] = arguments["a"][:, :96]
        with pytest.raises(error, match=words):
            signal_matmul(**arguments)
