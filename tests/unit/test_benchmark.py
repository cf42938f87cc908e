"""The benchmark's arithmetic, without GPUs: cases, rows, intervals."""

import pytest

from commfuse_megatron.benchmark.cases import CASE_NAMES, linear_case
from commfuse_megatron.benchmark.linears import Row, Sliced
from commfuse_megatron.benchmark.overlap_profile import _length_inside
from commfuse_megatron.benchmark.timing import _summary
from commfuse_megatron.errors import ConfigError


def test_cases_have_the_sizes_of_their_models():
    assert len(CASE_NAMES) == 16
    qkv, fc2 = linear_case("llama-70b.qkv", 8192, 2), linear_case("llama-70b.fc2", 8192, 2)
    assert (qkv.op, qkv.M, qkv.N, qkv.K, qkv.shard_shape) == ("all_gather_linear", 8192, 5120, 8192, (4096, 8192))
    assert (fc2.op, fc2.M, fc2.N, fc2.K, fc2.shard_shape) == ("linear_reduce_scatter", 8192, 8192, 14336, (4096, 8192))


@pytest.mark.parametrize(
    ("name", "M", "group_size", "match"),
    [
        ("llama-7b.qkv", 8192, 2, 'unknown case "llama-7b.qkv"'),
        ("llama-8b.qkv", 8191, 2, "multiples of the group size"),
    ],
)
def test_unknown_names_and_sizes_that_do_not_divide(name, M, group_size, match):
    with pytest.raises(ConfigError, match=match):
        linear_case(name, M, group_size)


def test_rows_have_the_keys_of_the_report_format():
    times = dict.fromkeys(
        ("median_ms", "p95_ms", "compute_only_ms", "comm_only_ms", "comm_only_collective_ms", "sequential_ms"), 1.0
    )
    row = Row(
        case="llama-70b.fc2",
        op="linear_reduce_scatter",
        pass_name="fprop",
        M=1,
        N=2,
        K=3,
        dtype="bfloat16",
        group_size=2,
        emulated=False,
        variant="sequential",
        path="sequential",
        transport="nccl",
        schedule_bound_ms=None,
        device="none",
        link="nvlink",
        commit="0",
        **times,
    ).as_json()
    wanted = {"case", "op", "pass", "M", "N", "K", "dtype", "group_size", "emulated", "variant", "path", "transport"}
    wanted |= {"device", "link", "commit", *times}
    assert wanted <= set(row)
    assert "pass_name" not in row


def test_a_way_of_ours_is_named_and_configured():
    way = Sliced("direct", 4, 2, "static", regain_sms=False, lanes=2)
    assert way.name == "direct m=4 2x2ch static"
    config = way.config()
    assert config.transport.nccl_lanes == 2
    assert config.linear.dgrad.chunks_per_shard == 4
    assert not config.kernel.regain_sms


def test_covered_length_counts_overlapping_kernels_once():
    gemms = [(0.0, 4.0), (3.0, 6.0), (10.0, 12.0)]
    assert _length_inside((2.0, 11.0), gemms) == 4.0 + 1.0
    assert _length_inside((7.0, 9.0), gemms) == 0.0
    assert _length_inside((3.5, 3.6), gemms) == pytest.approx(0.1)


def test_summaries_are_medians_and_95th_percentiles():
    sample = _summary([float(value) for value in range(1, 22)])
    assert (sample.median_ms, sample.p95_ms) == (11.0, 20.0)
