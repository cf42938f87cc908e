"""Writes the measured steps that `commfuse simulate --step` says its error on, from the newest in `docs/results`.

python docs/make_measured_steps.py
"""

import json
from pathlib import Path

from commfuse_megatron.tools.simulate.predict_step import SHIPPED, VARIANTS

ROWS = Path(__file__).parent / "results" / "whole_step_h200_202611.json"

_OF_A_RUN = ("commit", "device", "transport", "model", "layers", "sequence", "batch", "group_size")
_OF_A_ROW = ("op", "variant", "step_ms")


def make() -> str:
    """The file's text: runs of the newest commit, which stands first, with their times alone."""
    runs = json.loads(ROWS.read_text(encoding="utf-8"))["runs"]
    kept = [
        {name: run[name] for name in _OF_A_RUN}
        | {"rows": [{name: row[name] for name in _OF_A_ROW} for row in run["rows"] if row["variant"] in VARIANTS]}
        for run in runs
        if run["commit"] == runs[0]["commit"]
    ]
    return json.dumps({"runs": kept}, indent=1) + "\n"


if __name__ == "__main__":
    SHIPPED.write_text(make(), encoding="utf-8")
