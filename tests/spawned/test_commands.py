"""Whole commands with real ranks, as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path


def run_commfuse(*arguments: str, timeout_s: float = 55) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commfuse_megatron", *arguments], capture_output=True, text=True, timeout=timeout_s
    )


def test_verify_passes_on_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    ran = run_commfuse("verify", "--ranks", "2", "--dtype", "float32", "--json", str(file))
    assert ran.returncode == 0, ran.stderr
    data = json.loads(file.read_text(encoding="utf-8"))
    assert data["group_size"] == 2
    assert data["failed"] == 0
    assert data["passed"] == len(data["cases"]) > 100
    assert {case["dtype"] for case in data["cases"]} == {"float32"}
    assert f"{data['passed']} passed, 0 failed" in ran.stdout
    assert "verifying" in ran.stderr, "progress belongs on stderr"
    assert "verifying" not in ran.stdout
