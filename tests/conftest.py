"""What all tests share: SIGINT interrupts, even where the caller started the run in the background and ignores it."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A process that inherits an ignored SIGINT would pass that on to every program under test."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
