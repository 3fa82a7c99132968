"""Answers as bytes on the wire: SSE checked event by event, HTTP spoken by hand, script books."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgpack

from tests.flow.rig import Rig, wait_until

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EVENTS = re.compile(rb"(data: \{.*\}\n\n)+data: \[DONE\]\n\n")
ERROR_KEYS = {"message", "type", "param", "code"}


def script(*pieces: str | bytes, **fields: Any) -> dict[str, Any]:
    """A script of a book; bytes become hex pieces."""
    spelled = [{"hex": piece.hex()} if isinstance(piece, bytes) else piece for piece in pieces]
    return {"pieces": spelled, **fields}


def write_book(folder: Path, scripts: dict[str, Any], context_tokens: int = 512) -> Path:
    """A script book file with a plain default script."""
    book = {"default": script("Hello", ",", " world", "!")} | scripts
    path = folder / "book.json"
    path.write_text(json.dumps({"context_tokens": context_tokens, "scripts": book}))
    return path


def chat_body(content: Any, **fields: Any) -> dict[str, Any]:
    """A greedy chat request of one user message."""
    messages = [{"role": "user", "content": content}]
    return {"model": "m", "messages": messages, "temperature": 0, **fields}


async def chat(http: httpx.AsyncClient, content: Any, **fields: Any) -> dict[str, Any]:
    """A chat answer that must succeed; its JSON."""
    answer = await http.post(CHAT, json=chat_body(content, **fields))
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


@dataclass
class WireStream:
    """A streamed answer: headers, bytes, and when which bytes had come (seconds after the POST)."""

    headers: httpx.Headers
    data: bytes = b""
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """JSON of all events but the last; the bytes must be what C025 asks for."""
        assert EVENTS.fullmatch(self.data), self.data
        lines = self.data.decode("utf-8", "strict").split("\n\n")[:-2]
        return [json.loads(line.removeprefix("data: ")) for line in lines]

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        """The parts of one choice in order."""
        every = [choice for chunk in self.chunks for choice in chunk["choices"]]
        return [choice for choice in every if choice["index"] == index]

    def pieces(self, index: int = 0) -> list[str]:
        """Text of every event of a choice, without the role chunk and an empty finish chunk."""
        texts = []
        for part in self.choices(index):
            text = part["text"] if "text" in part else part["delta"].get("content", "")
            if text or not (part.get("delta", {}).get("role") or part["finish_reason"]):
                texts.append(text)
        return texts

    def text(self, index: int = 0) -> str:
        """All text of a choice."""
        return "".join(self.pieces(index))

    def finish_reason(self, index: int = 0) -> str:
        """How a choice ended; told once, with its last chunk."""
        reasons = [part["finish_reason"] for part in self.choices(index)]
        assert reasons[-1] is not None
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        return str(reasons[-1])

    def usage(self) -> dict[str, Any]:
        """The usage chunk's content."""
        assert self.chunks[-1]["choices"] == []
        usage: dict[str, Any] = self.chunks[-1]["usage"]
        return usage


async def wire_stream(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> WireStream:
    """A streamed answer to its end."""
    started_s = time.monotonic()
    async with http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        wire = WireStream(answer.headers)
        async for part in answer.aiter_raw():
            wire.data += part
            wire.arrivals.append((time.monotonic() - started_s, len(wire.data)))
    return wire


async def chat_stream(http: httpx.AsyncClient, content: Any, **fields: Any) -> WireStream:
    """A streamed chat answer to its end."""
    return await wire_stream(http, CHAT, chat_body(content, **fields))


def assert_error(answer: httpx.Response, status: int, **expected: str | None) -> dict[str, Any]:
    """The error object of an answer in our one shape; `expected` are some of its fields."""
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == ERROR_KEYS
    assert {key: error[key] for key in expected} == expected, error
    assert len(answer.content) < 4096
    assert len(error["message"]) < 1024
    return error


def num_requests(rig: Rig) -> int:
    """Requests that the ledger ever took in (and still remembers)."""
    return sum(1 for _ in rig.redis.scan_iter("request:*", count=1000))


async def refused(rig: Rig, path: str, request: dict[str, Any], param: str) -> dict[str, Any]:
    """The error of a request that must be refused with 400, unseen by the queue."""
    before = num_requests(rig)
    async with httpx.AsyncClient(base_url=rig.base_url, timeout=10) as http:
        error = assert_error(await http.post(path, json=request), 400, param=param)
    assert num_requests(rig) == before
    assert error["type"] == "invalid_request_error"
    return error


def beat_times(rig: Rig) -> dict[bytes, int]:
    """When each worker was last heard of."""
    beats = rig.redis.hgetall("workers")
    return {name: msgpack.unpackb(beat, raw=True)[0] for name, beat in beats.items()}


def fresh_beats(rig: Rig) -> dict[str, dict[str, Any]]:
    """Heartbeats that tell what is so now, not a second ago."""
    for _ in range(2):  # the next beat may be on its way already
        before = beat_times(rig)
        wait_until(lambda: all(beat_times(rig)[name] > ms for name, ms in before.items()), 5)  # noqa: B023
    return rig.beats()


def num_tokens_run(rig: Rig) -> int:
    """Tokens that all workers together have put through their models."""
    beats = fresh_beats(rig).values()
    return sum(beat["num_prefill_tokens"] + beat["num_decode_tokens"] for beat in beats)


def connect(rig: Rig) -> socket.socket:
    """A plain connection to the gateway."""
    return socket.create_connection(("127.0.0.1", rig.port), timeout=10)


def reset(connection: socket.socket) -> None:
    """Close with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def post_bytes(path: str, body: dict[str, Any], *more_headers: str) -> bytes:
    """A whole HTTP/1.1 request."""
    data = json.dumps(body).encode()
    head = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *more_headers,
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + data


def read_answer(connection: socket.socket) -> httpx.Response:
    """Read up to the end of the answer's head and the body that it announces."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = connection.recv(65536)
        assert part, f"closed after {data!r}"
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = httpx.Headers([tuple(line.split(": ", 1)) for line in lines])
    while len(body) < int(headers.get("content-length", "0")):
        part = connection.recv(65536)
        assert part, "the body is cut"
        body += part
    return httpx.Response(int(status_line.split(" ")[1]), headers=headers, content=body)
