"""Threads for calls on the slab file, and what they are doing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

T = TypeVar("T")


class IoThreads:
    """Runs blocking calls for an event loop; a call that hangs is seen, not waited for."""

    def __init__(self, num_threads: int) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="nvme-io")
        self._call_ids = count()
        self._running: dict[int, float] = {}  # call -> when it began on its thread

    @property
    def is_busy(self) -> bool:
        """A call has not come back."""
        return bool(self._running)

    def oldest_call_s(self, now_s: float) -> float:
        """How long the oldest call has been running; 0 when none is."""
        return now_s - min(list(self._running.values()), default=now_s)

    async def run(self, call: Callable[[], T]) -> T:
        """The call's result."""
        call_id = next(self._call_ids)

        def watched() -> T:
            self._running[call_id] = time.monotonic()
            try:
                return call()
            finally:
                del self._running[call_id]

        return await asyncio.get_running_loop().run_in_executor(self._threads, watched)

    def shut_down(self) -> None:
        """Take no more calls; those that run are not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)
