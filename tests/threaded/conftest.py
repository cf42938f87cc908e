"""What tests of several ranks share."""

import threading

import pytest


@pytest.fixture
def event() -> threading.Event:
    """One of all ranks."""
    return threading.Event()
