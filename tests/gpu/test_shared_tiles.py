"""Two launches that share one product's tiles: the second joins when its stream lets it."""

import pytest
import torch

from commfuse_megatron.errors import ShapeError
from commfuse_megatron.kernels import TileShare, persistent_matmul
from tests.harness.captures import capture

pytestmark = pytest.mark.gpu

SIZES = [(512, 512, 64), (1000, 776, 40), (128, 256, 64), (1, 8, 8), (4096, 2048, 256)]


def operands(sizes, seed=0):
    M, N, K = sizes
    generator = torch.Generator(device="cuda").manual_seed(seed)

    def draw(rows, cols):
        return torch.randint(-2, 3, (rows, cols), generator=generator, device="cuda").to(torch.bfloat16)

    return draw(M, K), draw(N, K).t(), torch.full((M, N), 777.0, device="cuda")


def counter_and_stream():
    return torch.zeros(8, dtype=torch.int32, device="cuda"), torch.cuda.Stream()


def shared(a, b, out, counter, side, *, delay=0, team=(100, 32)):
    """Both launches: the second on `side`, `delay` cycles late; joined."""
    first, second = (TileShare(counter.data_ptr(), *team, is_second) for is_second in (False, True))
    side.wait_stream(torch.cuda.current_stream())
    persistent_matmul(a, b, out=out, share=first)
    with torch.cuda.stream(side):
        if delay:
            torch.cuda._sleep(delay)
        persistent_matmul(a, b, out=out, share=second)
    torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("delay", [0, 200_000, 20_000_000])
@pytest.mark.parametrize("team", [(100, 32), (1, 131), (131, 1)])
def test_every_tile_is_computed_whenever_the_second_joins(sizes, delay, team):
    counter, side = counter_and_stream()
    for seed in range(3):
        a, b, out = operands(sizes, seed)
        shared(a, b, out, counter, side, delay=delay, team=team)
        torch.testing.assert_close(out, a.float() @ b.float(), atol=0, rtol=0)
        assert counter.tolist() == [0] * 8


def test_bits_do_not_depend_on_who_computes_a_tile():
    counter, side = counter_and_stream()
    a, b = torch.randn(2048, 1024, device="cuda").bfloat16(), torch.randn(1024, 1536, device="cuda").bfloat16()
    out = torch.empty(2048, 1536, device="cuda")
    shared(a, b, out, counter, side)
    first = out.clone()
    for delay in range(0, 100_000, 10_000):
        out.fill_(0)
        shared(a, b, out, counter, side, delay=delay)
        assert torch.equal(out, first)


def test_capture_and_replay():
    counter, side = counter_and_stream()
    a, b, out = operands((1000, 776, 40))
    graph = capture(lambda: shared(a, b, out, counter, side))
    for seed in range(1, 4):
        new_a, new_b, _ = operands((1000, 776, 40), seed)
        a.copy_(new_a)
        b.copy_(new_b)
        out.fill_(-1)
        graph.replay()
        torch.testing.assert_close(out, a.float() @ b.float(), atol=0, rtol=0)


def test_the_share_gives_the_number_of_blocks():
    a, b, out = operands((64, 64, 64))
    with pytest.raises(ShapeError, match="share gives the blocks"):
        persistent_matmul(a, b, out=out, num_sms=3, share=TileShare(0, 100, 32, False))
