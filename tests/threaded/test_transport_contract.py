"""The transport contract on gloo, ranks as threads."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

from commfuse_megatron.errors import TransportError
from commfuse_megatron.transport.base import Message, PeerTimeoutError
from commfuse_megatron.transport.gloo import GlooTransport
from tests.harness import on_ranks, run_threads
from tests.harness.transport_contract import CHECKS, Box


def gloo(group, timeout_s=20.0) -> GlooTransport:
    store = dist.PrefixStore("transport under test", group.get_group_store())
    return GlooTransport(store, group.rank(), group.size(), timeout_s)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("group_size", [2, 3, 4])
@on_ranks("group_size")
def test_contract(group, device, check, group_size):
    transport = gloo(group)
    check(Box(transport, device), group.rank(), group.size(), device)
    transport.close()


def test_a_peer_that_does_not_send_is_named_in_time():
    seen = threading.Event()

    def body(group, device):
        transport = gloo(group, timeout_s=0.5)
        if group.rank() == 0:
            transfer = transport.exchange(None, Message(torch.empty(3), 1, 5))
            with pytest.raises(PeerTimeoutError, match=r"got nothing from group rank 1 for 0\.5 s"):
                transfer.wait()
            seen.set()
        assert seen.wait(20)  # the peer lives on meanwhile: it is late, not gone

    run_threads(2, body)


@on_ranks(2)
def test_a_peer_that_is_gone_raises_at_once(group, device):
    transport = gloo(group)
    if group.rank() == 0:
        # Noticed at the call or in the wait, whichever comes after the connection has gone.
        with pytest.raises(TransportError, match=r"group rank 1: .*"):
            transport.exchange(None, Message(torch.empty(3), 1, 5)).wait()


def start(*_):
    pass


def fail(*_):
    raise RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("sends", "receives", "fails"), [(1, 0, "send"), (0, 1, "recv"), (1, 2, "send"), (1, 2, "recv")]
)
@on_ranks(1)
def test_the_error_names_the_peer_whose_connection_is_gone(group, device, sends, receives, fails):
    """0: no such message."""
    transport = gloo(group)
    transport._group = SimpleNamespace(**{"send": start, "recv": start, fails: fail})
    send, receive = (Message(torch.empty(3), peer, 5) if peer else None for peer in (sends, receives))
    peer = sends if fails == "send" else receives
    with pytest.raises(TransportError, match=f"no connection to group rank {peer}"):
        transport.exchange(send, receive)


@on_ranks(2)
def test_a_group_that_is_not_complete_raises(group, device):
    if group.rank() == 0:
        with pytest.raises(TransportError, match="gloo group of 2 ranks could not be formed"):
            gloo(group, timeout_s=0.5)
