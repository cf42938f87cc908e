"""The log of losses that Megatron takes for TensorBoard's writer."""

import json
from pathlib import Path

import torch

from commfuse_megatron.plugin.pretraining import ScalarLog


def lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_one_line_per_step(tmp_path: Path) -> None:
    file = tmp_path / "made" / "log.jsonl"
    log = ScalarLog(file)
    log.add_text("args", "ignored", global_step=0)
    for step in (1, 2):
        log.add_scalar("lm loss", torch.tensor(step / 3), step)
        log.add_scalar("lm loss vs samples", 99.0, 8 * step)
        log.add_scalar("grad-norm", 0.5, step)
    assert [line["step"] for line in lines(file)] == [1], "a step is written when the next one begins"
    log.close()
    loss = float(torch.tensor(2 / 3))
    assert lines(file)[1] == {"step": 2, "lm loss": loss, "grad-norm": 0.5}


def test_a_new_run_begins_anew_and_a_resumed_one_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    for is_resumed, expected in ((False, [1]), (True, [1, 1]), (False, [1])):
        log = ScalarLog(file, is_resumed=is_resumed)
        log.add_scalar("lm loss", 1.0, 1)
        log.close()
        assert [line["step"] for line in lines(file)] == expected
