"""The load under which faults are caused: streams that know what they should say."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.flow.talk import body

RETRY_S = 0.1
MAX_TOKENS = 120


def prompt(number: int) -> str:
    """The prompt of stream `number`; every fourth is long."""
    return f"chaos stream {number:03d} tells of " + "storms and bridges " * (
        1 + 5 * (number % 4 == 0)
    )


@dataclass
class Reader:
    """One job, read over as many connections to as many gateways as it takes."""

    number: int
    urls: Sequence[str]
    priority: str
    job_id: str = ""
    pieces: dict[int, str] = field(default_factory=dict)
    num_doubled: int = 0
    num_holes: int = 0
    error: str | None = None
    is_done: bool = False
    last_event_s: float = 0.0
    longest_gap_s: float = 0.0
    fault_over_s: float | None = None
    recovery_s: float = 0.0

    @property
    def text(self) -> str:
        return "".join(self.pieces[index] for index in sorted(self.pieces))

    async def submit(self, http: httpx.AsyncClient) -> None:
        """Until a gateway takes it."""
        fields = body(prompt(self.number), max_tokens=MAX_TOKENS, priority=self.priority)
        for url in itertools.cycle(self.urls):
            try:
                answer = await http.post(f"{url}/v1/jobs", json=fields)
            except httpx.HTTPError:
                await asyncio.sleep(RETRY_S)
                continue
            if answer.status_code == 202:
                self.job_id = answer.json()["id"]
                return
            await asyncio.sleep(RETRY_S)

    async def read_to_the_end(self, http: httpx.AsyncClient) -> None:
        """Come back after every break until the stream has ended."""
        for url in itertools.cycle(self.urls):
            with contextlib.suppress(httpx.HTTPError):
                await self._read(http, url)
            if self.is_done:
                return
            await asyncio.sleep(RETRY_S)

    async def _read(self, http: httpx.AsyncClient, url: str) -> None:
        last = max(self.pieces, default=None)
        headers = {} if last is None else {"Last-Event-ID": str(last)}
        stream = http.stream("GET", f"{url}/v1/jobs/{self.job_id}/stream", headers=headers)
        async with stream as answer:
            if answer.status_code == 404:
                self.error, self.is_done = "not found", True
            if answer.status_code != 200:
                return
            index: int | None = None
            async for line in answer.aiter_lines():
                if line.startswith("id: "):
                    index = int(line[4:])
                elif line.startswith("data: "):
                    self._take(index, line[6:])

    def _take(self, index: int | None, data: str) -> None:
        if data == "[DONE]":
            return
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            self.error, self.is_done = str(event["error"]["code"]), True
            return
        now_s = time.monotonic()
        if self.fault_over_s is not None:
            self.recovery_s, self.fault_over_s = now_s - self.fault_over_s, None
        if self.last_event_s:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self.last_event_s)
        self.last_event_s = now_s
        if index is None or index in self.pieces:
            self.num_doubled += 1
            return
        if index != len(self.pieces):
            self.num_holes += 1
        self.pieces[index] = event["text"]
        self.is_done = self.is_done or bool(event.get("finish_reason"))


async def start_readers(
    http: httpx.AsyncClient, urls: Sequence[str], num_streams: int, num_batch: int
) -> tuple[list[Reader], list[asyncio.Task[None]]]:
    """Submit all, and read until each has shown a few tokens (batch ones may still wait)."""
    readers = [Reader(n, urls, "normal") for n in range(num_streams)]
    readers += [Reader(num_streams + n, urls, "batch") for n in range(num_batch)]
    await asyncio.gather(*(reader.submit(http) for reader in readers))
    tasks = [asyncio.create_task(reader.read_to_the_end(http)) for reader in readers]
    async with asyncio.timeout(60):
        while any(len(reader.pieces) < 4 for reader in readers[:num_streams]):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for reader in readers:
        reader.longest_gap_s = 0.0
    return readers, tasks
