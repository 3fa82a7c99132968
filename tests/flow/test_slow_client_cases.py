"""C071, C072, C077, C079: clients that stop reading, read slowly, ask again and again, or come back late."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import psutil
import pytest

from gateway.settings import GatewaySettings
from tests.flow.rig import Rig, wait_until
from tests.flow.talk import Transcript, body, client, stream
from tests.flow.wire import CHAT, chat_body, num_tokens_run, post_bytes, script, write_book

TOKEN_MS = 5
WRITE_TIMEOUT_S = 3
MIB = 2**20
COUNTED = [f"{number} " for number in range(400)]
BOOK = {
    "endless": script("on ", ends=False, token_delay_ms=TOKEN_MS),
    "counted": script(*COUNTED, token_delay_ms=TOKEN_MS),
    "ten-seconds": script("on ", ends=False, token_delay_ms=20),
}
FAT = {"logprobs": True, "top_logprobs": 20}  # 2 KB a token
RUNNING = "pointsman_gateway_requests_running"


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    book = write_book(tmp_path_factory.mktemp("slow"), BOOK, context_tokens=8192)
    env = {"POINTSMAN_GATEWAY_WRITE_TIMEOUT_S": str(WRITE_TIMEOUT_S)}
    return make_rig(engine="script", model=book, env=env)


def narrow_connection(rig: Rig) -> socket.socket:
    """A connection into which the gateway can push little before its client reads.

    That is what a frozen proxy, or a client that is gone without a word, looks like from the other end.
    """
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", rig.port))
    return connection


def ask_fat(rig: Rig, prompt: str, max_tokens: int) -> socket.socket:
    """A stream of fat events, of which nothing is read yet."""
    connection = narrow_connection(rig)
    fields = chat_body(prompt, max_tokens=max_tokens, stream=True, **FAT)
    connection.sendall(post_bytes(CHAT, fields))
    return connection


def gateway_bytes(rig: Rig) -> int:
    """Memory of the gateway process."""
    rss: int = psutil.Process(rig.processes["gateway"].pid).memory_info().rss
    return rss


def test_c071_a_client_that_vanished_is_given_up_in_the_documented_time(rig: Rig) -> None:
    num_clients, max_tokens = 5, 6000  # half a minute of tokens each
    before_bytes, before_tokens = gateway_bytes(rig), num_tokens_run(rig)
    clients = [ask_fat(rig, "[[endless]]", max_tokens) for _ in range(num_clients)]
    try:
        wait_until(lambda: rig.metric(RUNNING) == num_clients, 10, "all run")
        highest_bytes = before_bytes

        def is_over() -> bool:
            nonlocal highest_bytes
            highest_bytes = max(highest_bytes, gateway_bytes(rig))
            return rig.metric(RUNNING) == 0

        wait_until(is_over, 10 * WRITE_TIMEOUT_S, "all are given up")
    finally:
        for connection in clients:
            connection.close()

    rig.wait_at_rest()
    assert num_tokens_run(rig) - before_tokens < num_clients * max_tokens / 2
    assert highest_bytes - before_bytes < 24 * MIB


class SlowReader:
    """Reads 1 KB a second, for a while; then what is left, as fast as it comes."""

    def __init__(self, rig: Rig) -> None:
        self.data = b""
        self.is_whole = False
        self.hurries = threading.Event()
        self._connection = ask_fat(rig, "[[counted]]", len(COUNTED) + 1)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with self._connection:
            self._connection.settimeout(60)
            while True:
                self.hurries.wait(1.0)
                try:
                    part = self._connection.recv(MIB if self.hurries.is_set() else 1024)
                except OSError:
                    return
                if not part:
                    return
                self.data += part

    def finish(self) -> list[str]:
        """The tokens, and whether the stream came to its end."""
        self.hurries.set()
        self._thread.join(60)
        self.is_whole = self.data.endswith(b"\r\n0\r\n\r\n")
        events = dechunked(self.data).split(b"\n\n")[:-1]
        texts = []
        for event in events:
            if event == b"data: [DONE]":
                continue
            choice = json.loads(event.removeprefix(b"data: "))["choices"][0]
            texts += [
                entry["token"] for entry in (choice["logprobs"] or {"content": []})["content"]
            ]
        return texts


def dechunked(data: bytes) -> bytes:
    """The body of a chunked answer, as far as it came, in whole events."""
    _, _, rest = data.partition(b"\r\n\r\n")
    whole = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        length = int(size or b"0", 16)
        if length == 0 or len(rest) < length:
            whole += rest[:length]
            return whole[: whole.rfind(b"\n\n") + 2]
        whole, rest = whole + rest[:length], rest[length + 2 :]


async def fast_pace_s(rig: Rig) -> float:
    """How long five clients that read at once take for 400 tokens each."""
    async with client(rig) as http:
        started_s = time.monotonic()
        await asyncio.gather(
            *(stream(http, "[[endless]]", Transcript(), max_tokens=400) for _ in range(5))
        )
        return time.monotonic() - started_s


async def test_c072_slow_readers_hold_nobody_up_and_see_no_hole(rig: Rig) -> None:
    alone_s = await fast_pace_s(rig)
    before_bytes = gateway_bytes(rig)
    slow = await asyncio.to_thread(lambda: [SlowReader(rig) for _ in range(20)])
    try:
        await asyncio.to_thread(wait_until, lambda: all(b"data: " in r.data for r in slow), 30)
        among_s = await fast_pace_s(rig)
        grown_bytes = gateway_bytes(rig) - before_bytes
    finally:
        heard = await asyncio.gather(*(asyncio.to_thread(reader.finish) for reader in slow))

    await asyncio.to_thread(rig.wait_at_rest, 30)
    # They make 200 x 20 tokens of 2 KB a second, 16 MB in all, which must not pile up. Measured: 3 MB.
    assert grown_bytes < 10 * MIB
    assert among_s < 3 * alone_s + 1
    for tokens, reader in zip(heard, slow, strict=True):
        assert tokens == COUNTED[: len(tokens)], "in order, without a hole"
        assert len(tokens) == len(COUNTED) or not reader.is_whole, "cut, and not as if it were all"


async def test_c077_a_storm_of_retries_never_runs_more_than_its_callers(rig: Rig) -> None:
    num_callers = 30
    sdk = openai.OpenAI(base_url=f"{rig.base_url}/v1", api_key="x", timeout=1.0, max_retries=2)
    highest, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not is_over.wait(0.05):
            highest = max(highest, rig.redis.zcard("deadlines"))

    def call() -> None:
        with pytest.raises(openai.APITimeoutError):
            sdk.completions.create(model="m", prompt="[[ten-seconds]]", max_tokens=500)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        await asyncio.gather(*(asyncio.to_thread(call) for _ in range(num_callers)))
        ended_s = time.monotonic()
        await asyncio.to_thread(wait_until, lambda: not rig.redis.zcard("deadlines"), 10)
        emptied_s = time.monotonic() - ended_s
    finally:
        is_over.set()
        watching.join()
        sdk.close()

    assert 0 < highest <= num_callers
    assert emptied_s < 3
    await asyncio.to_thread(rig.wait_at_rest)


def test_c079_connections_are_kept_longer_than_clients_keep_them() -> None:
    assert GatewaySettings.model_fields["keep_alive_s"].default >= 75


def idle_and_ask_again(rig: Rig, num_rounds: int) -> list[int]:
    """Statuses of requests over four connections, 5.0 s apart."""
    limits = httpx.Limits(max_connections=4, max_keepalive_connections=4, keepalive_expiry=60)
    statuses: list[int] = []
    fields: dict[str, Any] = body("x", max_tokens=1)
    with httpx.Client(base_url=rig.base_url, limits=limits, timeout=10) as http:

        def ask() -> None:
            statuses.append(http.post("/v1/completions", json=fields).status_code)

        for number in range(num_rounds):
            if number:
                time.sleep(5.0)  # the idle time is what the case is about
            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return statuses


def test_c079_a_connection_that_was_idle_for_five_seconds_serves_again(rig: Rig) -> None:
    assert idle_and_ask_again(rig, 2) == [200] * 8


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_c079_two_minutes_of_a_request_every_five_seconds_break_nothing(rig: Rig) -> None:
    assert idle_and_ask_again(rig, 24) == [200] * 96
