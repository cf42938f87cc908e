"""GPU transports and both linears on them: contract, values, timeouts, CUDA graphs, late streams and ranks."""

import dataclasses
import os
import time

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import KernelConfig, LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.errors import TransportTimeoutError
from commfuse_megatron.runtime import gemm
from commfuse_megatron.transport import nccl
from commfuse_megatron.transport.copy_engine import CopyEngineTransport
from commfuse_megatron.transport.nccl import NcclTransport
from tests.harness import on_processes, run_spawned
from tests.harness.captures import CapturedStep
from tests.harness.linear_cases import OPS, Case, assert_equal, check_linear, draw, drawn, overlapped, reference
from tests.harness.transport_contract import run_contract

BACKENDS = pytest.mark.parametrize("backend", ["nccl", "copy_engine"])

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(180)]


def linear_config(backend, algorithm="direct", m=1, *, path="sliced", transport=None, **others) -> OverlapConfig:
    chosen = PassConfig(path=path, algorithm=algorithm, chunks_per_shard=m)
    transport = dataclasses.replace(transport or TransportConfig(), backend=backend)
    fprop = dataclasses.replace(chosen, path="sliced")
    return OverlapConfig(linear=LinearConfig(fprop=fprop, dgrad=chosen), transport=transport, **others)


@BACKENDS
@on_processes(2)
def test_contract(group, device, backend):
    if backend == "copy_engine":
        transport = CopyEngineTransport(group, device)
        run_contract(transport, group.rank(), group.size(), device)
        torch.cuda.synchronize()
        transport.close()
        return
    nccl._LEAST_BYTES_TO_CUT = 16  # small messages too
    for number in (1, 2, 3):
        store = dist.PrefixStore(f"{number} communicators under test", group.get_group_store())
        transport = NcclTransport(store, group.rank(), group.size(), channels=8, device=device, communicators=number)
        run_contract(transport, group.rank(), group.size(), device)
        torch.cuda.synchronize()
        transport.close()


def _copy_engine_configurations():
    for algorithm, m in (("direct", 1), ("direct", 2), ("direct", 3), ("ring", 1), ("ring", 2)):
        yield torch.bfloat16, linear_config("copy_engine", algorithm, m)
        yield torch.float32, linear_config("copy_engine", algorithm, m)
    yield torch.bfloat16, linear_config("copy_engine", path="bulk")
    yield torch.float32, linear_config("copy_engine", path="bulk")
    yield torch.float16, linear_config("copy_engine", m=2)
    yield torch.bfloat16, linear_config("copy_engine", m=2, kernel=KernelConfig(gemm="persistent"))


def _configurations():
    """(dtype, configuration): every path of the executor in bf16, the main ones in the other dtypes."""
    no_regain = KernelConfig(regain_sms=False)
    two = TransportConfig(nccl_communicators=2, nccl_channels=4)
    for algorithm, m in (("direct", 1), ("direct", 2), ("direct", 3), ("ring", 1), ("ring", 2)):
        yield torch.bfloat16, linear_config("nccl", algorithm, m)
        yield torch.bfloat16, linear_config("nccl", algorithm, m, kernel=no_regain, transport=two)
    yield torch.bfloat16, linear_config("nccl", path="bulk")
    yield torch.float16, linear_config("nccl", m=2)
    yield torch.float32, linear_config("nccl", m=2)
    yield torch.float32, linear_config("nccl", "ring", 2)


@BACKENDS
@on_processes(2)
def test_linears_are_exact_on_integers(group, device, backend):
    gemm._REGAIN_FLOPS = 0  # small problems too
    nccl._LEAST_BYTES_TO_CUT = 16
    for dtype, config in _configurations() if backend == "nccl" else _copy_engine_configurations():
        with OverlapContext(group, config) as context:
            for op in OPS:
                for rows, N, K in ((64, 48, 40), (65, 33, 17), (1, 8, 8), (640, 64, 64)):
                    for has_bias in (True, False):
                        check_linear(
                            Case(op=op, rows=rows, N=N, K=K, dtype=dtype, seed=rows, has_bias=has_bias), group, context
                        )
            assert {record.path for record in context.report()} == {"sliced", config.linear.dgrad.path}
            is_persistent = dtype is not torch.float32 and (backend == "nccl" or config.kernel.gemm == "persistent")
            expected = {"persistent" if is_persistent else "torch"}
            if backend == "copy_engine" and dtype is not torch.float32 and not is_persistent:
                expected.add("cuBLASLt")  # where tapes serve the layouts
            assert {record.gemm for record in context.report()} <= expected


@BACKENDS
@on_processes(2)
def test_a_hundred_runs_are_bit_identical(group, device, backend):
    gemm._REGAIN_FLOPS = 0
    for op in OPS:
        case = Case(op=op, rows=1024, N=512, K=768, dtype=torch.bfloat16, exact=False)
        operands = draw(case, group.rank(), group.size(), device)
        with OverlapContext(group, linear_config(backend, m=2)) as context:
            first = overlapped(case, operands, context)
            for _ in range(99):
                assert_equal(overlapped(case, operands, context), first)


@pytest.mark.parametrize("calls_before", [1, 6])
@BACKENDS
@on_processes(2)
def test_the_watchdog_frees_the_stream_and_names_who_is_missing(group, device, backend, calls_before):
    context = OverlapContext(group, linear_config(backend, transport=TransportConfig(timeout_s=3.0)))
    x = torch.ones(64, 1, 64, device=device, dtype=torch.bfloat16)
    weight = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    for _ in range(calls_before):  # over the copy engine the fourth is captured, and later ones are launched as graphs
        ops.all_gather_linear(x, weight, context=context)
    torch.cuda.synchronize()
    if group.rank() == 0:
        began = time.monotonic()
        ops.all_gather_linear(x, weight, context=context)  # the host goes on; the stream waits for rank 1
        torch.cuda.synchronize()
        assert time.monotonic() - began < 20
        expected = "group rank 0 (global rank 0) got nothing from group rank 1 (global rank 1) for 3.0 s"
        for again in (lambda: ops.all_gather_linear(x, weight, context=context), context.synchronize, context.close):
            with pytest.raises(TransportTimeoutError) as error:
                again()
            assert expected in str(error.value)
    dist.barrier()


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
@pytest.mark.parametrize("path", ["sliced", "bulk"])
@BACKENDS
@on_processes(2)
def test_forward_and_backward_replay_from_a_cuda_graph(group, device, backend, path):
    gemm._REGAIN_FLOPS = 0
    with OverlapContext(group, linear_config(backend, m=2 if path == "sliced" else 1, path=path)) as context:
        x = torch.randn(512, 1, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(512, 1, 256, device=device, dtype=torch.bfloat16)

        def step():
            hidden = ops.all_gather_linear(x, weight, context=context)
            y = ops.linear_reduce_scatter(hidden, weight, context=context)
            return y, *torch.autograd.grad(y, [x, weight], grad)

        captured = CapturedStep(step, capture_error_mode="thread_local")
        for _ in range(3):
            with torch.no_grad():
                x.copy_(torch.randn_like(x))
            captured.replay()
            eager = captured.run()
            torch.cuda.synchronize()
            for found, expected in zip(captured.results, eager, strict=True):
                assert torch.equal(found, expected)
        bigger = torch.randn(1024, 1, 256, device=device, dtype=torch.bfloat16)
        with torch.no_grad():  # growth after a capture: the graph keeps the memory that it uses
            ops.all_gather_linear(bigger, weight, context=context)
        captured.replay()
        torch.cuda.synchronize()
        for found, expected in zip(captured.results, eager, strict=True):
            assert torch.equal(found, expected)
        del captured


@BACKENDS
@on_processes(2)
def test_late_ranks_two_contexts_and_two_streams(group, device, backend):
    late_ranks(group, device, backend)


def late_ranks(group, device, backend):
    gemm._REGAIN_FLOPS = 0
    nccl._LEAST_BYTES_TO_CUT = 16
    case = Case(op=OPS[1], rows=4096, N=64, K=64, dtype=torch.bfloat16)  # partials below 256: exact in bf16
    operands, expected = drawn(case, group, device)
    two = TransportConfig(nccl_communicators=2, nccl_channels=4)
    with (
        OverlapContext(group, linear_config(backend, m=2)) as context,
        OverlapContext(group, linear_config(backend, "ring", 2, transport=two)) as other,
    ):
        for late in (0, 1):
            if group.rank() == late:
                torch.cuda._sleep(200_000_000)  # this rank's compute stream runs about 0.1 s behind
            for _ in range(3):
                found, interleaved = overlapped(case, operands, context), overlapped(case, operands, other)
                blocks = [torch.empty(1 << 22, device=device) for _ in range(8)]  # allocator traffic meanwhile
                del blocks
            assert_equal(found, expected)
            assert_equal(interleaved, expected)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # the same context from another stream
            on_side = overlapped(case, operands, context)
        assert_equal(overlapped(case, operands, context), expected)
        side.synchronize()
        assert_equal(on_side, expected)


@on_processes(2)
def test_what_is_sent_may_be_freed_at_once(group, device):
    """Transfers run late, and what they send is freed and its memory written to as soon as PyTorch allows."""
    case = Case(op=OPS[0], rows=2048, N=64, K=64, dtype=torch.bfloat16)
    operands = draw(case, group.rank(), group.size(), device)
    expected = reference(case, operands, group)["y"]
    with torch.no_grad(), OverlapContext(group, linear_config("copy_engine", m=2)) as context:
        copies = context.link.transport._stream.torch
        reused = 0
        for _ in range(20):  # step by step, rehearsed, and as graphs
            with torch.cuda.stream(copies):
                torch.cuda._sleep(20_000_000)  # about 10 ms
            x = operands.x.clone()
            address, size = x.data_ptr(), x.shape
            y = ops.all_gather_linear(x, operands.weight, operands.bias, context=context)
            del x
            storm = [torch.full(size, float("nan"), device=device, dtype=case.dtype) for _ in range(64)]
            reused += any(tensor.data_ptr() == address for tensor in storm)
            assert torch.equal(y, expected)
            del storm, y
        assert reused, "the allocator did not hand the memory out again: nothing was tested"


@on_processes(2)
def test_the_first_messages_in_new_memory_stay_there(group, device):
    """The default stream is late, on one rank or the other, when windows are made and first written to."""
    case = Case(op=OPS[1], rows=512, N=64, K=64, dtype=torch.bfloat16)
    operands, expected = drawn(case, group, device)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for late in (0, 1, 0, 1):
        if group.rank() == late:
            torch.cuda._sleep(200_000_000)  # about 0.1 s
        with torch.cuda.stream(side), OverlapContext(group, linear_config("copy_engine")) as context:
            found = overlapped(case, operands, context)
            side.synchronize()
            assert_equal(found, expected)
        torch.cuda.synchronize()


@pytest.mark.parametrize("connections", ["1", "8", "32"])
@BACKENDS
def test_any_number_of_hardware_queues(backend, connections, monkeypatch):
    monkeypatch.setitem(os.environ, "CUDA_DEVICE_MAX_CONNECTIONS", connections)
    run_spawned(2, late_ranks, backend, backend="nccl")
