"""Signals as something a loop can wait for."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalInbox:
    """Counts requests to stop and wakes its waiter on them and on the death of a child.

    Use it as a context manager in the main thread; the former handlers come back at the end.
    """

    def __init__(self) -> None:
        self.num_stop_requests = 0
        self._former: dict[int, Any] = {}
        self._former_wakeup_fd = -1
        self._read_fd, self._write_fd = -1, -1

    def __enter__(self) -> SignalInbox:
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # `nohup`: meant to outlive its terminal
            self._former[number] = signal.signal(number, self._count)
        self._former[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_wakeup_fd)
        os.close(self._read_fd)
        os.close(self._write_fd)

    def wait(self, timeout_s: float) -> None:
        """Return after a signal, or after `timeout_s`."""
        readable, _, _ = select.select([self._read_fd], [], [], max(0.0, timeout_s))
        if readable:
            os.read(self._read_fd, 4096)

    def _count(self, _number: int, _frame: FrameType | None) -> None:
        self.num_stop_requests += 1
