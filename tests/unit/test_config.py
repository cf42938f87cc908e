"""OverlapConfig: files, errors with advice, defaults equal to the shipped file."""

import importlib.util
import re
from pathlib import Path

import pytest

from commfuse_megatron.config import (
    FallbackConfig,
    KernelConfig,
    LinearConfig,
    OverlapConfig,
    PassConfig,
    TransportConfig,
)
from commfuse_megatron.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def test_round_trip():
    config = OverlapConfig(
        linear=LinearConfig(fprop=PassConfig(algorithm="ring", chunks_per_shard=3)),
        transport=TransportConfig(timeout_s=5.0),
        check_agreement=True,
    )
    assert OverlapConfig.from_dict(config.to_dict()) == config


def test_the_default_file_says_what_the_code_does():
    text = (CONFIGS / "default.yaml").read_text()
    assert OverlapConfig.from_file(CONFIGS / "default.yaml") == OverlapConfig()
    for section, values in OverlapConfig().to_dict().items():
        for key in values if isinstance(values, dict) else {section: None}:
            assert key in text, f"default.yaml does not list {section}.{key}"


def test_the_page_of_options_is_what_the_docstrings_say():
    file = CONFIGS.parent / "docs" / "make_configuration.py"
    spec = importlib.util.spec_from_file_location("make_configuration", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.write_page()
    assert module.FILE.read_text(encoding="utf-8") == page, "run `python docs/make_configuration.py`"
    for key in re.findall(r"^ *(\w+):", (CONFIGS / "default.yaml").read_text(), re.MULTILINE):
        assert re.search(rf"`(?:\w+\.)*{key}`", page), key


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_file_loads_and_is_listed(path):
    OverlapConfig.from_file(path)
    assert path.name in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize(("text", "message"), [
    ("linear:\n  fprop:\n    chunk_per_shard: 2\n", 'unknown key "linear.fprop.chunk_per_shard". Did you mean'),
    ("zebra: 1\n", 'unknown key "zebra". Known keys: linear, attention, ulysses, transport'),
    ("linear: 3\n", "linear must be a mapping of keys to values, got 3"), ("- 1\n", "the file must be a mapping"),
    ("linear:\n  fprop:\n    path: fast\n",
     "linear.fprop.path must be one of auto, sliced, grouped, bulk, async, sequential; got 'fast'"),
    ("linear:\n  fprop:\n    chunks_per_shard: two\n", "linear.fprop.chunks_per_shard must be int or null; got 'two'"),
    ("linear:\n  fprop:\n    chunks_per_shard: true\n", "linear.fprop.chunks_per_shard must be int or null; got True"),
    ("linear:\n  fprop:\n    chunks_per_shard: 0\n", "linear.fprop.chunks_per_shard must be at least 1, got 0"),
    ("transport:\n  timeout_s: -1\n", "transport.timeout_s must be positive and at most 1e+09, got -1"),
    ("transport:\n  graph_memory_mib: -1\n", "transport.graph_memory_mib must not be negative, got -1"),
    ("transport:\n  cuda_graphs: 256\n", 'key "transport.cuda_graphs". Did you mean "graph_memory_mib"?'),
    ("transport:\n  nccl_channels: 65\n", "transport.nccl_channels must be between 1 and 64, got 65"),
    ("kernel:\n  reserved_sms: -1\n", "kernel.reserved_sms must not be negative, got -1"),
    ("check_agreement: maybe\n", "check_agreement must be bool or null; got 'maybe'"), ("a: [1\n", "not valid YAML"),
])  # fmt: skip
def test_errors_name_file_key_and_advice(tmp_path, text, message):
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        OverlapConfig.from_file(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("part", "values", "message"), [
    (PassConfig, {"path": "slice"}, "path must be one of auto, sliced, grouped, bulk, async, sequential; got 'slice'"),
    (TransportConfig, {"timeout_s": 10**400}, "timeout_s must be a number that a float can hold; got one of 401"),
    (PassConfig, {"chunks_per_shard": 2.5}, "chunks_per_shard must be int or null; got 2.5"),
    (TransportConfig, {"backend": "glo"}, "backend must be one of auto, gloo, nccl, copy_engine; got 'glo'"),
    (TransportConfig, {"timeout_s": float("inf")}, "timeout_s must be positive and at most 1e+09, got inf"),
    (KernelConfig, {"gemm": "cutlass"}, "gemm must be one of auto, persistent, torch; got 'cutlass'"),
    (FallbackConfig, {"unsupported": "error"}, "unsupported must be one of stock, raise; got 'error'"),
    (OverlapConfig, {"linear": {"fprop": {}}}, "linear must be a LinearConfig, got {'fprop': {}}; from_dict"),
])  # fmt: skip
def test_what_is_built_in_python_is_checked_like_a_file(part, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        part(**values)


def test_a_missing_file_and_an_empty_one(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        OverlapConfig.from_file(tmp_path / "none.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert OverlapConfig.from_file(tmp_path / "empty.yaml") == OverlapConfig()


def test_integers_widen_to_floats(tmp_path):
    assert OverlapConfig.from_dict({"transport": {"timeout_s": 5}}).transport.timeout_s == 5.0
    assert isinstance(TransportConfig(timeout_s=5).timeout_s, float)  # ranks compare what is printed
