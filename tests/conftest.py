"""Marks that need hardware skip with the reason; everything else runs anywhere."""

import os

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from commfuse_megatron.transport.select import may_share_gpus

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and devices == 0:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, none here"))
        needed = item.get_closest_marker("multi_gpu")
        if needed and devices < needed.args[0] and not (devices and may_share_gpus()):
            item.add_marker(pytest.mark.skip(reason=f"needs {needed.args[0]} CUDA devices, {devices} here"))


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_rank() -> None:
    # Ranks are threads or processes of their own; more threads inside each would only fight for the cores.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _tables_as_in_a_pipe() -> None:
    # Terminals and runners of tests say how wide they are, and our commands squeeze tables to that.
    os.environ.pop("COLUMNS", None)
