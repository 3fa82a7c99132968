"""A batch under faults: each line must come out once, with the text that it had undisturbed."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.flow.batches import ENDPOINT, OVER, batch_line

RETRY_S = 0.2
MAX_TOKENS = 48


def lines(count: int) -> bytes:
    """An input file; every tenth line is long."""
    return "\n".join(
        batch_line(
            f"line-{number}",
            f"line {number:04d} of a night's work " + "and then " * (20 * (number % 10 == 0)),
            max_tokens=MAX_TOKENS,
        )
        for number in range(count)
    ).encode()


async def ask(
    http: httpx.AsyncClient, urls: Sequence[str], method: str, path: str, **fields: Any
) -> httpx.Response:
    """An answer of 200, from whichever gateway gives one; the caller sets the limit."""
    for url in itertools.cycle(urls):
        try:
            answer = await http.request(method, f"{url}{path}", **fields)
        except httpx.HTTPError:
            await asyncio.sleep(RETRY_S)
            continue
        if answer.status_code == httpx.codes.OK:
            return answer
        await asyncio.sleep(RETRY_S)
    raise AssertionError("urls are endless")


@dataclass
class BatchLoad:
    """One batch of an uploaded file."""

    urls: Sequence[str]
    file_id: str
    batch_id: str = ""
    texts: dict[str, str] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)

    async def order(self, http: httpx.AsyncClient) -> None:
        """Until a gateway takes it."""
        fields = {
            "input_file_id": self.file_id,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
        }
        answer = await ask(http, self.urls, "POST", "/v1/batches", json=fields)
        self.batch_id = answer.json()["id"]

    async def read_to_the_end(self, http: httpx.AsyncClient) -> None:
        """Wait until it is over, and fetch what came out."""
        while True:
            path = f"/v1/batches/{self.batch_id}"
            batch = (await ask(http, self.urls, "GET", path)).json()
            if batch["status"] in OVER:
                break
            await asyncio.sleep(RETRY_S)
        if batch["output_file_id"] is None:
            return
        path = f"/v1/files/{batch['output_file_id']}/content"
        for line in (await ask(http, self.urls, "GET", path)).text.splitlines():
            result = json.loads(line)
            self.seen[result["custom_id"]] += 1
            self.texts[result["custom_id"]] = result["response"]["body"]["choices"][0]["text"]

    def num_lost(self, expected: Mapping[str, str]) -> int:
        """Lines without a result."""
        return len(expected.keys() - self.texts.keys())

    def num_doubled(self) -> int:
        """Results beyond the first of a line."""
        return sum(count - 1 for count in self.seen.values())

    def num_changed(self, expected: Mapping[str, str]) -> int:
        """Lines with another text than undisturbed."""
        return sum(text != expected.get(name) for name, text in self.texts.items())


async def upload(http: httpx.AsyncClient, urls: Sequence[str], data: bytes) -> str:
    """The file's id."""
    files = {"file": ("in.jsonl", data)}
    answer = await ask(http, urls, "POST", "/v1/files", files=files, data={"purpose": "batch"})
    file_id: str = answer.json()["id"]
    return file_id
