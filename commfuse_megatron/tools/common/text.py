"""Real text as tokens: every byte is one. Nothing is downloaded; the default text came with the interpreter."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch


def standard_library_text(max_bytes: int = 2_000_000) -> bytes:
    """The Python sources of the running interpreter's standard library, in the order of their names.

    Raises FileNotFoundError where the interpreter came without sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    pieces: list[bytes] = []
    for file in sorted(folder.glob("*.py")):
        pieces.append(file.read_bytes())
        if sum(map(len, pieces)) >= max_bytes:
            break
    if not pieces:
        raise FileNotFoundError(f"no Python sources in {folder}")
    return b"".join(pieces)[:max_bytes]


def batch_of(text: bytes, *, step: int, batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Tokens [batch, length] of `step`: pieces of `text` from places drawn anew each step, the same in every run."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(100_003 * seed + step)
    starts = torch.randint(0, len(text) - length + 1, (batch,), generator=generator)
    return torch.stack([data[start : start + length] for start in starts.tolist()]).long()
