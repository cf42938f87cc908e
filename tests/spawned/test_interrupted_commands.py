"""Ctrl-C, as a terminal sends it to all processes of a command or somebody to the first one: one line, and nobody left.

Fails without what it is about: a rank that imports shows a traceback, C++ that imports loses the exception, so that
the command goes on, or has Python take it for unhandled, so that it ends by the signal.
"""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
]

# A shell that runs the tests in the background has them, and all they start, ignore Ctrl-C.
COMMAND = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from commfuse_megatron.tools.main import main; sys.exit(main(['verify', '--ranks', '2', '--dtype', 'float32']))"
)


def processes_of(group: int) -> dict[int, bytes]:
    """Command line of every process of a process group that still runs."""
    found = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, its_group = Path("/proc", entry, "stat").read_text("utf-8").rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                found[int(entry)] = Path("/proc", entry, "cmdline").read_bytes()
        except OSError:  # it has gone meanwhile
            continue
    return found


def is_at(moment: str, pid: int, said: bytes) -> bool:
    if moment == "import":
        return "libtorch" in Path(f"/proc/{pid}/maps").read_text("utf-8")
    if moment == "start":
        return any(b"spawn_main" in line for line in processes_of(pid).values())
    return b"verifying" in said


@pytest.mark.parametrize(("moment", "to_group"), [("import", True), ("start", True), ("start", False), ("run", True)])
def test_an_interrupted_command_says_so_and_leaves_nobody_behind(moment: str, to_group: bool) -> None:
    terminal, its_end = pty.openpty()
    command = subprocess.Popen(
        [sys.executable, "-c", COMMAND], start_new_session=True, stdout=subprocess.DEVNULL, stderr=its_end
    )
    os.close(its_end)
    said = b""
    deadline = time.monotonic() + 120
    try:
        while not is_at(moment, command.pid, said):
            assert command.poll() is None, f"it ended before: {said!r}"
            assert time.monotonic() < deadline, f"it did not come to {moment}: {said!r}"
            if select.select([terminal], [], [], 0.01)[0]:
                said += os.read(terminal, 4096)
        before = said
        (os.killpg if to_group else os.kill)(command.pid, signal.SIGINT)
        interrupted_at = time.monotonic()
        while command.poll() is None or processes_of(command.pid):
            assert time.monotonic() < interrupted_at + 20, f"{processes_of(command.pid)} still run: {said!r}"
            if select.select([terminal], [], [], 0.01)[0]:
                said += read_or_end(terminal)
        while more := read_or_end(terminal):
            said += more
    finally:
        for pid in processes_of(command.pid):
            os.kill(pid, signal.SIGKILL)
        command.wait()
        os.close(terminal)
    assert command.returncode == 130, said
    assert said.endswith(b"\x1b[?25h\r\ninterrupted\r\n"), said
    assert said.count(b"interrupted") == 1
    assert b"Traceback" not in said
    if moment != "run":  # no progress bar between
        assert said == before + b"\x1b[?25h\r\ninterrupted\r\n"


def read_or_end(terminal: int) -> bytes:
    """What stands there; nothing where the last process has closed it, which Linux reports as an error."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
