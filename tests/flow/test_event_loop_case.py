"""C090: huge prompts are read, checked and tokenized beside the event loop, not on it."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from tests.flow.rig import Rig
from tests.flow.talk import Transcript, client, stream
from tests.flow.wire import script, write_book

PROBE_S = 0.01
NUM_ATTEMPTS = 4
# Posts ten bodies of 5 MB and a chat of 40,000 tokens at once, from a process of its own: ours would
# be kept from its probes by them.
POSTER = """
import sys, threading, httpx
url = sys.argv[1]
def post(path, fields, statuses):
    statuses.append(httpx.post(url + path, json=fields, timeout=60).status_code)
jobs = [("/v1/completions", {"model": "m", "prompt": f"{n}" + "x" * (5 << 20), "max_tokens": 1}) for n in range(10)]
chat = [{"role": "user", "content": "word " * 8000}]
jobs.append(("/v1/chat/completions", {"model": "m", "messages": chat, "max_tokens": 1}))
statuses = []
threads = [threading.Thread(target=post, args=(*job, statuses)) for job in jobs]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(*sorted(statuses))
"""


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder: Path = tmp_path_factory.mktemp("loop")
    book = write_book(
        folder, {"on": script("on ", ends=False, token_delay_ms=20)}, context_tokens=65536
    )
    return make_rig(engine="script", model=book)


async def probe(url: str, until: asyncio.Event) -> list[float]:
    """How long `/healthz` took, every 10 ms."""
    times_s = []
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        while not until.is_set():
            started_s = time.monotonic()
            assert (await http.get("/healthz")).status_code == 200
            times_s.append(time.monotonic() - started_s)
            await asyncio.sleep(PROBE_S)
    return times_s


@dataclass
class TimedTranscript(Transcript):
    """Notes when text came."""

    arrivals_s: list[float] = field(default_factory=list)

    def take(self, data: object) -> None:
        super().take(data)
        self.arrivals_s.append(time.monotonic())

    def longest_gap_s(self, begin_s: float, end_s: float) -> float:
        """Between two events."""
        within = [at_s for at_s in self.arrivals_s if begin_s < at_s < end_s]
        return max(later - earlier for earlier, later in pairwise([begin_s, *within, end_s]))


def p99(times_s: list[float]) -> float:
    """The 99th percentile, the longest but few."""
    return statistics.quantiles(times_s, n=100, method="inclusive")[98]


async def test_c090_huge_prompts_leave_the_event_loop_free(rig: Rig) -> None:
    transcript = TimedTranscript()

    async def during(work: Callable[[], object]) -> tuple[list[float], float]:
        """Probes, and the longest gap of the running stream, while something goes on."""
        until, begin_s = asyncio.Event(), time.monotonic()
        probing = asyncio.create_task(probe(rig.base_url, until))
        await asyncio.to_thread(work)
        until.set()
        return await probing, transcript.longest_gap_s(begin_s, time.monotonic())

    def post_all() -> None:
        posted = subprocess.run(
            [sys.executable, "-c", POSTER, rig.base_url],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert posted.stdout.split() == ["200"] + ["400"] * 10, posted.stderr

    async with client(rig) as http:
        running = asyncio.create_task(stream(http, "[[on]]", transcript, max_tokens=60_000))
        await transcript.has_chunks(3)
        # A loop that is kept from its work is kept from it each time, a busy machine is not busy for ever.
        for _ in range(NUM_ATTEMPTS):
            # What the machine does to us anyway, with as much work elsewhere.
            idle, idle_gap_s = await during(lambda: burn(3.0))
            busy, busy_gap_s = await during(post_all)
            is_free = p99(busy) < max(0.2, 2 * p99(idle)) and busy_gap_s < max(0.5, 2 * idle_gap_s)
            if is_free:
                break
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert is_free, (p99(idle), p99(busy), idle_gap_s, busy_gap_s)


def burn(seconds: float) -> None:
    """Two processes at work, as the poster and the gateway's threads are."""
    code = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: sum(range(1000))"
    burning = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    assert [process.wait(60) for process in burning] == [0, 0]
