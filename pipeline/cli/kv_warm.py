"""`pointsman kv warm`: typical prompts through the ordinary way in, one token each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from pipeline.cli.errors import CommandRefused

_MAX_LINE_BYTES = 4 << 20
_MAX_PROMPTS = 100_000
_CONNECT_LIMIT_S = 10.0
_ANSWER_LIMIT_S = 900.0
_BUSY_LIMIT_S = 600.0
_LONGEST_PAUSE_S = 10.0
_MAX_FAILED_SHOWN = 8
# Of a line: what says how to answer, and not what is asked. All else goes along as it is.
_NOT_ASKED = frozenset(
    [
        "best_of",
        "cache",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "n",
        "prompt_logprobs",
        "stream",
        "stream_options",
        "top_logprobs",
    ]
)
_BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class WarmJob:
    """Which prompts go to which gateway, how many at once; `model` None: the first that it serves."""

    path: Path
    url: str
    api_key: str | None
    window: int
    model: str | None = None


@dataclass(slots=True)
class _Tally:
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_cached: int = 0
    first_error: str = ""
    failed_lines: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.num_done} prompts, {self.num_tokens} tokens, {self.num_cached} were cached"
        if self.num_failed:
            lines = ", ".join(map(str, self.failed_lines))
            text += f"; {self.num_failed} failed (lines {lines}): {self.first_error}"
        return text


def warm(job: WarmJob, console: Console) -> int:
    """Send every prompt; exit code 1 when some failed.

    Raises:
        CommandRefused: the file holds no prompt or a broken line, or nobody answers.
    """
    prompts = list(read_prompts(job.path))
    if not prompts:
        raise CommandRefused(f"{job.path} holds no prompt")
    columns = (TextColumn("warming"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(prompts))
        tally = asyncio.run(_send_all(job, prompts, lambda: progress.advance(task)))
    console.print(Text(f"warm: {tally}"), soft_wrap=True)
    return int(tally.num_failed > 0)


def read_prompts(path: Path) -> Iterator[tuple[int, str, Mapping[str, Any]]]:
    """Line number, route and fields of each prompt; empty lines do not count.

    Raises:
        CommandRefused: a line is too long, is broken JSON, or names no prompt.
    """
    num_prompts = 0
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), start=1):
            if len(line) == _MAX_LINE_BYTES:
                raise CommandRefused(f"{path}, line {number}: longer than {_MAX_LINE_BYTES} bytes")
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            num_prompts += 1
            if num_prompts > _MAX_PROMPTS:
                raise CommandRefused(f"{path} holds more than {_MAX_PROMPTS} prompts")
            route, fields = _prompt_of(text, f"{path}, line {number}")
            yield number, route, fields


def _prompt_of(text: bytes, where: str) -> tuple[str, Mapping[str, Any]]:
    if not text.startswith(b"{"):
        try:
            return "completions", {"prompt": text.decode()}
        except UnicodeDecodeError as error:
            raise CommandRefused(f"{where}: not UTF-8") from error
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise CommandRefused(f"{where}: broken JSON") from error
    asked = {name: value for name, value in fields.items() if name not in _NOT_ASKED}
    if "messages" in asked:
        return "chat/completions", asked
    if "prompt" in asked:
        return "completions", asked
    raise CommandRefused(f"{where}: neither `prompt` nor `messages`")


_Prompts = list[tuple[int, str, Mapping[str, Any]]]


async def _send_all(job: WarmJob, prompts: _Prompts, on_end: Callable[[], object]) -> _Tally:
    headers = {"Authorization": f"Bearer {job.api_key}"} if job.api_key else {}
    base_url = f"{job.url.rstrip('/').removesuffix('/v1')}/v1"
    timeout = httpx.Timeout(_CONNECT_LIMIT_S, read=_ANSWER_LIMIT_S, pool=None)
    tally = _Tally()
    waiting = iter(prompts)
    async with httpx.AsyncClient(
        base_url=base_url, headers=headers, timeout=timeout, trust_env=False
    ) as http:
        served = await _served_model(http)

        async def send_some() -> None:
            for number, route, fields in waiting:
                body = {"model": job.model or served, **fields, "max_tokens": 1}
                _count(tally, number, await _answer(http, route, body))
                on_end()

        await asyncio.gather(*(send_some() for _ in range(job.window)))
    return tally


async def _served_model(http: httpx.AsyncClient) -> str:
    try:
        answer = await http.get("models")
    except httpx.TransportError as error:
        raise CommandRefused(f"no gateway at {http.base_url}: {type(error).__name__}") from error
    if answer.status_code != HTTPStatus.OK:
        raise CommandRefused(f"{http.base_url} refuses: {_message(answer)}")
    return str(answer.json()["data"][0]["id"])


async def _answer(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> Any:
    """The usage of an answer, or a sentence; a gateway that is full is asked again."""
    deadline_s = time.monotonic() + _BUSY_LIMIT_S
    while True:
        try:
            answer = await http.post(route, json=body)
        except httpx.TransportError as error:
            return type(error).__name__
        if answer.status_code == HTTPStatus.OK:
            return answer.json()["usage"]
        if answer.status_code not in _BUSY or time.monotonic() > deadline_s:
            return _message(answer)
        wanted_s = answer.headers.get("retry-after", "1")
        pause_s = float(wanted_s) if wanted_s.isdigit() else 1.0
        await asyncio.sleep(min(max(pause_s, 0.1), _LONGEST_PAUSE_S))


def _count(tally: _Tally, number: int, result: Any) -> None:
    if isinstance(result, str):
        tally.num_failed += 1
        tally.first_error = tally.first_error or result
        if len(tally.failed_lines) < _MAX_FAILED_SHOWN:
            tally.failed_lines.append(number)
        return
    tally.num_done += 1
    tally.num_tokens += result["prompt_tokens"]
    tally.num_cached += (result.get("prompt_tokens_details") or {}).get("cached_tokens", 0)


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"
