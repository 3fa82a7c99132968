"""Ending asyncio tasks for certain."""

from __future__ import annotations

import asyncio
from typing import Any

CANCEL_AGAIN_S = 0.05


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over; what they raise is of no interest any more.

    One cancellation is not enough: redis-py and, before Python 3.12, `asyncio.wait_for` can lose it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()
