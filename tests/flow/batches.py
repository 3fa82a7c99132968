"""How the flow tests order batches: lines, uploads, and the wait for an end, by openai-python."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import openai
from openai.types import Batch

from tests.flow.rig import Rig, wait_until

ENDPOINT: Literal["/v1/completions"] = "/v1/completions"
OVER = ("completed", "failed", "expired", "cancelled")


def sdk(rig: Rig, key: str = "unused", port: int | None = None) -> openai.OpenAI:
    """A client that tries once."""
    base_url = f"http://127.0.0.1:{port or rig.port}/v1"
    return openai.OpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=60)


def batch_line(custom_id: Any, prompt: Any = "x", **fields: Any) -> str:
    """One line of an input file."""
    body = {"model": "m", "prompt": prompt, "temperature": 0, **fields}
    entry = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(entry)


def upload(client: openai.OpenAI, data: bytes | Sequence[str], name: str = "in.jsonl") -> str:
    """Upload an input file; its id."""
    content = data if isinstance(data, bytes) else "\n".join(data).encode()
    return client.files.create(file=(name, content), purpose="batch").id


def order(client: openai.OpenAI, data: bytes | Sequence[str], **fields: Any) -> Batch:
    """Upload an input file and order its batch."""
    return client.batches.create(
        input_file_id=upload(client, data),
        endpoint=ENDPOINT,
        completion_window="24h",
        **fields,
    )


def wait_over(client: openai.OpenAI, batch_id: str, limit_s: float = 30.0) -> Batch:
    """Wait until a batch is over; counts must add up then."""

    def found() -> Batch | None:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in OVER else None

    batch: Batch = wait_until(found, limit_s, f"{batch_id} is over")
    counts = batch.request_counts
    assert counts is not None
    assert counts.total == counts.completed + counts.failed
    return batch


def run(client: openai.OpenAI, data: bytes | Sequence[str], **fields: Any) -> Batch:
    """Order a batch and wait until it is over."""
    return wait_over(client, order(client, data, **fields).id)


def result_lines(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """The lines of an output or error file; none if there is no file."""
    if file_id is None:
        return []
    data = client.files.content(file_id).content
    assert data.endswith(b"\n")
    return [json.loads(line.decode("utf-8", "strict")) for line in data[:-1].split(b"\n")]


def ids_of(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Their custom ids."""
    return [line["custom_id"] for line in lines]
