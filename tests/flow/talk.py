"""How the flow tests talk to a gateway: plain HTTP, and SSE read line by line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.flow.rig import Rig

TIMEOUT_S = 60.0


def client(rig: Rig, base_url: str | None = None) -> httpx.AsyncClient:
    """A client without a connection limit, so that streams do not wait for each other."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    return httpx.AsyncClient(base_url=base_url or rig.base_url, timeout=TIMEOUT_S, limits=limits)


def body(prompt: Any, **fields: Any) -> dict[str, Any]:
    """A greedy completion request."""
    return {"model": "m", "prompt": prompt, "temperature": 0, **fields}


async def complete(http: httpx.AsyncClient, prompt: Any, **fields: Any) -> dict[str, Any]:
    """A completion that must succeed; its JSON."""
    answer = await http.post("/v1/completions", json=body(prompt, **fields))
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def text_of(http: httpx.AsyncClient, prompt: Any, **fields: Any) -> str:
    """The text of a non-streamed completion."""
    text: str = (await complete(http, prompt, **fields))["choices"][0]["text"]
    return text


def tokens(seed: int, count: int) -> list[int]:
    """Printable token ids, the same for the same seed."""
    return random.Random(seed).choices(range(32, 127), k=count)  # noqa: S311


def cached(answer: dict[str, Any]) -> int:
    """Prompt tokens that an answer says it found cached."""
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def keys_file(folder: Path, *tenants: str) -> Path:
    """API keys for a gateway: tenant `t` has the key `sk-t`."""
    path = folder / "keys"
    lines = (f"{t} {hashlib.sha256(f'sk-{t}'.encode()).hexdigest()}\n" for t in tenants)
    path.write_text("".join(lines))
    return path


async def ask_as(rig: Rig, tenant: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """A tenant's completion of four tokens that must succeed."""
    async with client(rig) as http:
        http.headers["Authorization"] = f"Bearer sk-{tenant}"
        return await complete(http, prompt, **{"max_tokens": 4, **fields})


async def events(answer: httpx.Response) -> AsyncIterator[tuple[int | None, Any]]:
    """(id, data) of each event of an open stream; data is JSON, or the string `[DONE]`."""
    event_id: int | None = None
    async for line in answer.aiter_lines():
        if line.startswith("id: "):
            event_id = int(line[4:])
        elif line.startswith("data: "):
            data = line[6:]
            yield event_id, data if data == "[DONE]" else json.loads(data)


@dataclass
class Transcript:
    """What one streamed completion showed its client."""

    text: str = ""
    chunks: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False
    got_text: asyncio.Event = field(default_factory=asyncio.Event)

    async def has_chunks(self, count: int) -> None:
        """Wait until so many chunks have come."""
        while len(self.chunks) < count:
            self.got_text.clear()
            await asyncio.wait_for(self.got_text.wait(), TIMEOUT_S)

    def take(self, data: Any) -> None:
        assert not self.is_done, "nothing follows [DONE]"
        if data == "[DONE]":
            self.is_done = True
            return
        self.chunks.append(data)
        self.error = data.get("error", self.error)
        for choice in data.get("choices", []):
            piece = choice.get("text")
            if piece is None:
                piece = choice.get("delta", {}).get("content")
            self.text += piece or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            self.got_text.set()


async def stream(
    http: httpx.AsyncClient,
    prompt: Any,
    transcript: Transcript | None = None,
    **fields: Any,
) -> Transcript:
    """A streamed completion to its end."""
    transcript = transcript or Transcript()
    request = body(prompt, stream=True, **fields)
    async with http.stream("POST", "/v1/completions", json=request) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for _, data in events(answer):
            transcript.take(data)
    return transcript


async def submit_job(http: httpx.AsyncClient, prompt: Any, **fields: Any) -> str:
    """Submit a job; its id."""
    answer = await http.post("/v1/jobs", json=body(prompt, **fields))
    assert answer.status_code == 202, answer.text
    job_id: str = answer.json()["id"]
    return job_id


@dataclass
class JobReading:
    """What a client holds of a job's stream, over as many connections as it takes."""

    job_id: str
    pieces: dict[int, str] = field(default_factory=dict)
    last_id: int | None = None
    end: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    async def has_events(self, count: int) -> None:
        """Wait until so many events have come."""
        while len(self.pieces) < count:
            self.moved.clear()
            await asyncio.wait_for(self.moved.wait(), TIMEOUT_S)

    @property
    def text(self) -> str:
        """All pieces in order."""
        return "".join(self.pieces[index] for index in sorted(self.pieces))

    async def read(self, http: httpx.AsyncClient, stop_after: int | None = None) -> None:
        """Read on from the last event; stop when the event with id `stop_after` has come."""
        headers = {} if self.last_id is None else {"Last-Event-ID": str(self.last_id)}
        url = f"/v1/jobs/{self.job_id}/stream"
        async with http.stream("GET", url, headers=headers) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for event_id, data in events(answer):
                if data == "[DONE]":
                    return
                if "error" in data:
                    self.error = data["error"]
                    continue
                assert event_id is not None
                assert event_id not in self.pieces, "an event came twice"
                assert event_id == (-1 if self.last_id is None else self.last_id) + 1, "a hole"
                self.last_id = event_id
                self.pieces[event_id] = data["text"]
                self.moved.set()
                if data.get("finish_reason"):
                    self.end = data
                if event_id == stop_after:
                    return

    async def read_through(self, http: httpx.AsyncClient, limit_s: float = 30.0) -> None:
        """Read to the end, coming back whenever the connection breaks."""
        async with asyncio.timeout(limit_s):
            while self.end is None and self.error is None:
                try:
                    await self.read(http)
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)
