"""Times one batch {send, receive} of the NCCL transport over message sizes and channel counts, under torchrun:

    torchrun --nproc-per-node 2 -m commfuse_megatron.tools.bench.transfers --channels 8 16 24 --mebibytes 8 64

The curve that schedules rest on: how long a chunk travels, and what a batch costs besides its bytes.
"""

import argparse
import functools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext
from commfuse_megatron.config import TransportConfig
from commfuse_megatron.tools.bench.timing import measure
from commfuse_megatron.transport.base import Message, Transport, TwoSidedTransport

_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, write JSON; 0 when done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--channels", nargs="+", type=int, default=[8, 16, 24, 32])
    parser.add_argument("--mebibytes", nargs="+", type=int, default=[8, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args(arguments)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    rows = _measure(options)
    if dist.get_rank() == 0:
        _print(rows)
        if options.json:
            options.json.write_text(json.dumps({"rows": rows}, indent=1))
    dist.destroy_process_group()
    return 0


def _measure(options: argparse.Namespace) -> list[dict[str, object]]:
    group = dist.group.WORLD
    assert group is not None
    size = max(options.mebibytes) * _MIB
    sent, received = (torch.zeros(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    variants, contexts = {}, []
    for channels in options.channels:
        context = OverlapContext(
            group, OverlapConfig(transport=TransportConfig(backend="nccl", nccl_channels=channels))
        )
        contexts.append(context)
        for mebibytes in options.mebibytes:
            window = slice(0, mebibytes * _MIB)
            call = functools.partial(_exchange, context.link.transport, sent[window], received[window], group)
            variants[f"{channels} {mebibytes}"] = call
    samples = measure(variants, group, rounds=options.rounds)
    for context in contexts:
        context.close()
    link = "host" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "nvlink"
    rows: list[dict[str, object]] = []
    for name, sample in samples.items():
        channels, mebibytes = (int(part) for part in name.split())
        rows.append(
            {
                "channels": channels,
                "mebibytes": mebibytes,
                "median_us": sample.median_ms * 1e3,
                "p95_us": sample.p95_ms * 1e3,
                "bandwidth_gb_s": mebibytes * _MIB / sample.median_ms / 1e6,
                "device": torch.cuda.get_device_name(),
                "link": link,
            }
        )
    return rows


def _exchange(transport: Transport, sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    assert isinstance(transport, TwoSidedTransport)
    to_rank, from_rank = (group.rank() + 1) % group.size(), (group.rank() - 1) % group.size()
    transport.exchange(Message(sent, to_rank, 0), Message(received, from_rank, 0)).wait()


def _print(rows: list[dict[str, object]]) -> None:
    table = Table(title=f"one batch to the next rank, from the previous one: {rows[0]['device']}, {rows[0]['link']}")
    for heading in ("channels", "MiB each way", "median us", "p95 us", "GB/s each way"):
        table.add_column(heading, justify="right")
    for row in rows:
        figures = (row["median_us"], row["p95_us"], row["bandwidth_gb_s"])
        table.add_row(str(row["channels"]), str(row["mebibytes"]), *(f"{figure:.1f}" for figure in figures))
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
