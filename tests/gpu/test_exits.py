"""Programs that end while a stream waits for a rank that never comes."""

import os
import socket
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(120)]

BEGIN = """
import contextlib, os, time
import torch
from torch import distributed as dist
from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.runtime import shutdown
from commfuse_megatron.transport.select import take_gpu

rank = int(os.environ["RANK"])
device = take_gpu(rank)
dist.init_process_group("nccl", device_id=device)
x = torch.ones(512, 1, 256, device=device, dtype=torch.bfloat16)
weight = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
"""

LEFT_ALONE = """
shutdown._AFTER_AN_ERROR_S, shutdown._TO_END_S = 3.0, 5
sliced = PassConfig(path="sliced", chunks_per_shard=1)
transport = TransportConfig(backend=backend, timeout_s=8.0 if way == "returns" else 600.0)
config = OverlapConfig(linear=LinearConfig(fprop=sliced, dgrad=sliced), transport=transport)
context = OverlapContext(dist.group.WORLD, config)
with context if way == "raises in the context" else contextlib.nullcontext():
    for _ in range(2):
        ops.all_gather_linear(x, weight, context=context)
    torch.cuda.synchronize()
    dist.barrier()
    if rank == 0:
        ops.all_gather_linear(x, weight, context=context)
        if way != "returns":
            raise ValueError("a fault of the program")
    else:
        time.sleep(20 if way == "returns" else 90)
        os._exit(0)
"""

ENDS = """
context = OverlapContext(dist.group.WORLD, OverlapConfig(transport=TransportConfig(backend=backend)))
for _ in range(5):
    ops.all_gather_linear(x, weight, context=context)
if destroys:
    dist.destroy_process_group()
"""


def run_on_two_gpus(folder, text, *rendezvous, **given):
    """As torchrun does with these options; `given` are variables of the program."""
    program = folder / "program.py"
    program.write_text("".join(f"{name} = {value!r}\n" for name, value in given.items()) + BEGIN + text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path[1:]])}
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, "--nproc-per-node", "2"]
    return subprocess.run(
        [*torchrun, program], capture_output=True, text=True, timeout=100, env=environment, check=False
    )


@pytest.mark.parametrize("way", ["raises", "raises in the context", "returns"])
@pytest.mark.parametrize("backend", ["copy_engine", "nccl"])
def test_a_rank_that_ends_alone_ends(backend, way, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    began = time.monotonic()
    done = run_on_two_gpus(tmp_path, LEFT_ALONE, "--master-port", f"{port}", backend=backend, way=way)
    took_s = time.monotonic() - began
    assert took_s < 60, done.stderr
    if way != "returns":
        assert done.returncode != 0
        assert "a fault of the program" in done.stderr


@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.parametrize("backend", ["copy_engine", "nccl"])
def test_a_program_that_closes_nothing_ends(backend, destroys, tmp_path):
    done = run_on_two_gpus(tmp_path, ENDS, "--standalone", backend=backend, destroys=destroys)
    assert done.returncode == 0, done.stderr
