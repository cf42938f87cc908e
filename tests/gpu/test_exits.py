"""Programs that end while a stream waits for a rank that never comes."""

import os
import socket
import subprocess
import sys
import time

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu(2), pytest.mark.slow, pytest.mark.timeout(120)]

PROGRAM = """
import contextlib, os, time
import torch
from torch import distributed as dist
from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import LinearConfig, PassConfig, TransportConfig
from commfuse_megatron.runtime import shutdown

shutdown._AFTER_AN_ERROR_S, shutdown._TO_END_S = 3.0, 5
backend, way = BACKEND, WAY
rank = int(os.environ["RANK"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
sliced = PassConfig(path="sliced", chunks_per_shard=1)
transport = TransportConfig(backend=backend, timeout_s=8.0 if way == "returns" else 600.0)
config = OverlapConfig(linear=LinearConfig(fprop=sliced, dgrad=sliced), transport=transport)
context = OverlapContext(dist.group.WORLD, config)
x = torch.ones(512, 1, 256, device=device, dtype=torch.bfloat16)
weight = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
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


@pytest.mark.parametrize("way", ["raises", "raises in the context", "returns"])
@pytest.mark.parametrize("backend", ["copy_engine", "nccl"])
def test_a_rank_that_ends_alone_ends(backend, way, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("BACKEND", repr(backend)).replace("WAY", repr(way)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path[1:]])}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    launch = [*torchrun, "--nproc-per-node", "2", "--master-port", f"{port}", str(program)]
    began = time.monotonic()
    done = subprocess.run(launch, capture_output=True, text=True, timeout=100, env=environment, check=False)
    took_s = time.monotonic() - began
    assert took_s < 60, done.stderr
    if way != "returns":
        assert done.returncode != 0
        assert "a fault of the program" in done.stderr


ENDS = """
import os
import torch
from torch import distributed as dist
from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import TransportConfig

device = torch.device("cuda", int(os.environ["RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
context = OverlapContext(dist.group.WORLD, OverlapConfig(transport=TransportConfig(backend=BACKEND)))
x = torch.ones(512, 1, 256, device=device, dtype=torch.bfloat16)
weight = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
for _ in range(5):
    ops.all_gather_linear(x, weight, context=context)
if DESTROYS:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("destroys", [False, True])
@pytest.mark.parametrize("backend", ["copy_engine", "nccl"])
def test_a_program_that_closes_nothing_ends(backend, destroys, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENDS.replace("BACKEND", repr(backend)).replace("DESTROYS", repr(destroys)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path[1:]])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
