"""The harness itself: what ranks as threads of one process must not share."""

import pickle

import pytest
import torch
from torch import distributed as dist

from tests.harness import run_threads


def test_collectives_of_threads_leave_no_record_in_the_process():
    # Groups enter PyTorch's record of collectives without its lock: first collectives of two threads then crash.
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
    if dump is None:
        pytest.skip("this PyTorch shows no record of collectives")

    def body(group, device):
        gathered = torch.empty(2)
        dist.all_gather_into_tensor(gathered, torch.full((1,), float(group.rank())), group=group)
        return gathered.tolist()

    assert run_threads(2, body) == [[0.0, 1.0]] * 2
    record = pickle.loads(dump(True, False, False))
    assert not record.get("entries")
    assert not record.get("pg_status")
