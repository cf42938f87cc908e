"""What happens when the process ends while transfers wait for ranks that never come."""

import signal
import sys

import pytest

from commfuse_megatron.runtime import leaving


class Link:
    def __init__(self, is_idle, timeout_s=600.0):
        self.is_idle, self.timeout_s = is_idle, timeout_s


@pytest.fixture
def alarms(monkeypatch):
    """Seconds of the alarms that were set; none is."""
    found = []
    monkeypatch.setattr(leaving, "_open", [])
    monkeypatch.setattr(leaving, "_left", [])
    monkeypatch.setattr(signal, "signal", lambda number, handler: found.append((number, handler)))
    monkeypatch.setattr(signal, "alarm", found.append)
    monkeypatch.delattr(sys, "last_exc", raising=False)
    return found


def test_nothing_happens_where_nothing_is_in_flight(alarms):
    links = [Link(is_idle=True) for _ in range(2)]
    for link in links:
        leaving.look_at_exit(link)
    leaving.forget_at_exit(links[0])
    leaving._limit_the_exit()
    assert alarms == []


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize(
    ("timeout_s", "error", "limit_s"),
    [(600.0, None, 600), (600.0, ValueError(), 30), (2.5, ValueError(), 3), (float("inf"), None, 1_000_000)],
)
def test_the_exit_takes_a_limited_time(is_closed, timeout_s, error, limit_s, alarms, monkeypatch, caplog):
    if error is not None:
        monkeypatch.setattr(sys, "last_exc", error, raising=False)
    link = Link(is_idle=False, timeout_s=timeout_s)
    leaving.look_at_exit(link)
    leaving.look_at_exit(Link(is_idle=False, timeout_s=1.0))
    if is_closed:
        leaving.forget_at_exit(link)
    leaving._limit_the_exit()
    assert alarms == [(signal.SIGALRM, signal.SIG_DFL), limit_s]
    assert f"killed in {limit_s} s" in caplog.text


def test_links_are_forgotten_when_they_are_idle(alarms):
    links = [Link(is_idle=False) for _ in range(3)]
    for link in links:
        leaving.look_at_exit(link)
    leaving.forget_at_exit(links[0])
    assert leaving._left == [links[0]]
    links[0].is_idle = links[1].is_idle = True
    leaving.forget_at_exit(links[1])
    assert (leaving._open, leaving._left) == ([links[2]], [])
