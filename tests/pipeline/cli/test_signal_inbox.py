"""Which signals ask a command to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pipeline.cli.signal_inbox import SignalInbox


@pytest.fixture
def hang_up_ends() -> Iterator[None]:
    """SIGHUP as a terminal's program has it, also where these tests run under `nohup`."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


@pytest.mark.usefixtures("hang_up_ends")
def test_signals_to_stop_are_counted_and_the_former_handlers_come_back() -> None:
    former = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    with SignalInbox() as inbox:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        inbox.wait(5.0)
        assert inbox.num_stop_requests == 2
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == former


def test_what_was_started_by_nohup_outlives_its_terminal() -> None:
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            inbox.wait(5.0)
            assert inbox.num_stop_requests == 1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)
