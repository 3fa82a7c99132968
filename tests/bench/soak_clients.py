"""The clients of the KV soak: sessions that grow, on shared prefixes, and know what they must hear."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.bench.digest_reference import DigestReference
from tests.flow.talk import JobReading, Transcript, complete, stream, submit_job

TENANTS = ("alpha", "beta", "gamma")
CONTEXT_TOKENS = 512
PREFIX_TOKENS = 160
SESSIONS_PER_CLIENT = 8
LIMIT_S = 120.0
# What a client may do with its turn, of a hundred.
KINDS = {"stream": 36, "whole": 30, "job": 16, "leave": 10, "cancel": 8}
_PRIVATE_SHARE = 0.06


@dataclass
class Tally:
    """What became of all requests; a fault's words are kept for the first few."""

    num_wanted: int
    until_s: float
    num_begun: int = 0
    num_done: int = 0
    num_equal: int = 0
    num_cached_tokens: int = 0
    num_prompt_tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    num_faults: int = 0

    def may_begin(self) -> bool:
        """One more, unless there are enough or the time is over."""
        if self.num_begun >= self.num_wanted or time.monotonic() >= self.until_s:
            return False
        self.num_begun += 1
        return True

    def note_fault(self, words: str) -> None:
        """Something was not as it should be."""
        self.num_faults += 1
        if len(self.faults) < 20:
            self.faults.append(words)


@dataclass
class Session:
    """A conversation of one tenant: what was said so far, and the reference that has heard it."""

    tenant: str
    tokens: list[int] = field(default_factory=list)
    reference: DigestReference = field(default_factory=DigestReference)

    def say(self, tokens: list[int]) -> None:
        """Add to it."""
        self.tokens += tokens
        for token in tokens:
            self.reference.add(token)


def new_session(rng: random.Random) -> Session:
    """Behind one of the four prefixes that its tenant's sessions share, or behind none."""
    session = Session(rng.choice(TENANTS))
    number = rng.randrange(5)
    if number:
        shared = random.Random(f"{session.tenant} {number}")  # noqa: S311
        session.say(printable(shared, PREFIX_TOKENS))
    return session


def printable(rng: random.Random, count: int) -> list[int]:
    """Random printable ids."""
    return rng.choices(range(32, 127), k=count)


@dataclass
class SoakClient:
    """One of those that work at once; it plays its sessions turn by turn, in no order."""

    http: httpx.AsyncClient
    tally: Tally
    rng: random.Random
    sessions: list[Session] = field(default_factory=list)

    async def work(self) -> None:
        """Until the tally has enough."""
        self.sessions = [new_session(self.rng) for _ in range(SESSIONS_PER_CLIENT)]
        while self.tally.may_begin():
            place = self.rng.randrange(SESSIONS_PER_CLIENT)
            await self._turn(place)

    async def _turn(self, place: int) -> None:
        rng = self.rng
        asked, max_tokens = printable(rng, rng.randint(3, 60)), rng.randint(2, 32)
        if len(self.sessions[place].tokens) + len(asked) + max_tokens > CONTEXT_TOKENS:
            self.sessions[place] = new_session(rng)
        session = self.sessions[place]
        session.say(asked)
        prompt = list(session.tokens)
        answer = copy(session.reference).answer(max_tokens)
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        fields = {
            "max_tokens": max_tokens,
            "priority": rng.choice(["high", "normal", "normal", "low"]),
            "cache": rng.random() >= _PRIVATE_SHARE,
        }
        self.http.headers["Authorization"] = f"Bearer sk-{session.tenant}"
        try:
            async with asyncio.timeout(LIMIT_S):
                is_right = await self._ask(kind, prompt, bytes(answer).decode(), fields)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a fault of the pipeline
            is_right = False
            self.tally.note_fault(f"{kind}: {type(error).__name__}: {error}"[:400])
        else:
            if not is_right:
                self.tally.note_fault(f"{kind}: a wrong answer to {len(prompt)} tokens, {fields}")
        self.tally.num_done += 1
        self.tally.num_equal += is_right
        self.tally.kinds[kind] += 1
        if kind not in ("leave", "cancel"):
            session.say(answer)

    async def _ask(
        self, kind: str, prompt: list[int], expected: str, fields: dict[str, Any]
    ) -> bool:
        """Whether what came is what the reference says, or its beginning where we left early."""
        if kind == "whole":
            answer = await complete(self.http, prompt, **fields)
            usage = answer["usage"]
            self.tally.num_prompt_tokens += usage["prompt_tokens"]
            self.tally.num_cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            return bool(answer["choices"][0]["text"] == expected)
        if kind == "stream":
            heard = await stream(self.http, prompt, **fields)
            return heard.is_done and heard.error is None and heard.text == expected
        if kind == "leave":
            return await self._leave(prompt, expected, fields)
        job = JobReading(await submit_job(self.http, prompt, **fields))
        if kind == "job":
            await job.read_through(self.http, LIMIT_S)
            return job.error is None and job.text == expected
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        cancelled = await self.http.delete(f"/v1/jobs/{job.job_id}")
        return cancelled.status_code == 200 and expected.startswith(cancelled.json()["text"] or "")

    async def _leave(self, prompt: list[int], expected: str, fields: dict[str, Any]) -> bool:
        """Read some events, or none, and hang up."""
        heard = Transcript()
        reading = asyncio.create_task(stream(self.http, prompt, heard, **fields))
        waiting = asyncio.create_task(heard.has_chunks(self.rng.randint(0, fields["max_tokens"])))
        await asyncio.wait({reading, waiting}, return_when=asyncio.FIRST_COMPLETED)
        reading.cancel()
        waiting.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)
        return heard.error is None and expected.startswith(heard.text)
