"""Attention over a sequence that is split over ranks: every way checked, and on GPUs timed beside attention alone.

    torchrun --nproc-per-node 2 examples/time_split_sequence.py

On GPUs: torchrun --nproc-per-node 2 examples/time_split_sequence.py --device cuda --rows 8192 32768 65536
"""

import argparse
import os
import statistics
from collections.abc import Callable

import torch
from torch import distributed as dist

from commfuse_megatron import OverlapConfig, OverlapContext, ops
from commfuse_megatron.config import UlyssesConfig
from commfuse_megatron.tools.common.ranks import require_launcher

ROUNDS, CALLS = 7, 5
WAYS = {
    **{f"overlapped m={m}": UlyssesConfig(path="overlapped", head_groups=m) for m in (1, 2, 4)},
    "sequential": UlyssesConfig(path="sequential"),
    "planned": UlyssesConfig(),
}


def read_arguments() -> argparse.Namespace:
    """Sizes: by default those of an 8B model, on the CPU small ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", help="of the sequences that GPUs are timed on (default 32768)")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, help="features (default 128, on the CPU 16)")
    parser.add_argument("--order", choices=("contiguous", "zigzag"), default="zigzag")
    return parser.parse_args()


def draw(rows: int, arguments: argparse.Namespace, device: torch.device, share: int = 1) -> list[torch.Tensor]:
    """q, k, v of so many rows and that share of the heads, and a gradient of the result."""
    heads, kv_heads, features = arguments.heads // share, max(1, arguments.kv_heads // share), arguments.head_dim
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float64
    shapes = ((heads, features), (kv_heads, features), (kv_heads, features), (heads * features,))
    drawn = [torch.randn(rows, 1, *shape, device=device, dtype=torch.float32).to(dtype) for shape in shapes]
    return [*(each.requires_grad_() for each in drawn[:3]), drawn[3]]


def run(given: list[torch.Tensor], attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients."""
    *heads, grad = given
    y = attend(*heads)
    return [y.detach(), *torch.autograd.grad(y, heads, grad)]


def check(found: list[torch.Tensor], expected: list[torch.Tensor], limit: float) -> None:
    """Raise if anything is off by more than that fraction of the largest element."""
    for one, other in zip(found, expected, strict=True):
        error = float((one - other).abs().max() / other.abs().max())
        if not error <= limit:
            raise SystemExit(f"off by {error:.2g} of the largest element, and {limit:.2g} is allowed")


def time_ms(call: Callable[[], object]) -> float:
    """Per call, median over bursts, of the slowest rank."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / CALLS)
    slowest = torch.tensor(statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> None:
    """Check every way on a short sequence; on GPUs time them on long ones."""
    arguments = read_arguments()
    require_launcher()
    is_gpu = arguments.device == "cuda"
    arguments.head_dim = arguments.head_dim or (128 if is_gpu else 16)
    device = torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl" if is_gpu else "gloo")
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    alone = [dist.new_group([member]) for member in range(size)][rank]
    torch.manual_seed(rank)
    short = draw(32, arguments, device)
    expected = run(short, lambda *heads: ops.reference.ulysses_attention(*heads, order=arguments.order, group=group))
    table: dict[tuple[str, int], list[float]] = {}
    for name, config in {**WAYS, "attention alone": UlyssesConfig()}.items():
        is_alone = name == "attention alone"
        with OverlapContext(alone if is_alone else group, OverlapConfig(ulysses=config)) as context:

            def attend(*heads: torch.Tensor, context=context) -> torch.Tensor:
                return ops.ulysses_attention(*heads, order=arguments.order, context=context)

            if not is_alone:
                check(run(short, attend), expected, 5e-2 if is_gpu else 1e-12)
            for rows in (arguments.rows or [32768]) if is_gpu else ():
                given = draw(rows, arguments, device, size) if is_alone else draw(rows // size, arguments, device)
                both = time_ms(lambda given=given, attend=attend: run(given, attend))
                with torch.no_grad():
                    forward = time_ms(lambda given=given, attend=attend: attend(*given[:3]))
                table[name, rows] = [forward, both]
            if rank == 0:
                print(*context.report(), sep="\n")
    if rank == 0:
        print("every way equals the reference")
        for (name, rows), (forward, both) in table.items():
            base = table["attention alone", rows]
            print(f"S {rows:6} {name:16} forward {forward:8.3f} ms (+{forward - base[0]:.3f})", end="  ")
            print(f"with backward {both:8.3f} ms (+{both - base[1]:.3f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
