"""Fixtures of batch and command line: a small real HTTP server that stands where the gateway would."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

# Status, headers, and body; the callable gets (body, how often this custom prompt was asked before).
Reply = tuple[int, dict[str, str], Any]
Rule = Callable[[dict[str, Any], int], Reply]


def completion(body: dict[str, Any], _num_before: int) -> Reply:
    """A chat completion of three tokens that repeats the question."""
    content = body["messages"][0]["content"]
    answer = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": content}}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
    }
    return 200, {"x-request-id": f"req-{content}"}, answer


class SmallGateway:
    """Answers by `rule`; remembers what it was asked, and how many at once."""

    def __init__(self, port: int = 0) -> None:
        self.rule: Rule = completion
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.max_in_flight = 0
        self.delay_s = 0.0
        self._num_in_flight = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["Content-Length"]))
                status, headers, answer = outer.answer(json.loads(raw), dict(self.headers))
                data = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                with contextlib.suppress(BrokenPipeError):  # a client that was stopped
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        with self._lock:
            num_before = sum(body["messages"] == earlier["messages"] for earlier in self.bodies)
            self.bodies.append(body)
            self.headers.append(headers)
            self._num_in_flight += 1
            self.max_in_flight = max(self.max_in_flight, self._num_in_flight)
        time.sleep(self.delay_s)
        with self._lock:
            self._num_in_flight -= 1
        return self.rule(body, num_before)

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def small_gateway() -> Iterator[SmallGateway]:
    gateway = SmallGateway()
    yield gateway
    gateway.close()


def batch_line(custom_id: str, content: str | None = None, **body: Any) -> str:
    """One line of an input file."""
    messages = [{"role": "user", "content": content or custom_id}]
    return json.dumps(
        {
            "custom_id": custom_id,
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": "m", "messages": messages, **body},
        }
    )


@pytest.fixture
def make_line() -> Callable[..., str]:
    return batch_line
