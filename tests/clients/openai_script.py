"""All that a user of openai-python does, in one go. Arguments: base URL, `sync` or `async`.

Runs under every version of the client that is in use, so it imports nothing of ours. One set of calls
serves both kinds of client: what the asynchronous one answers is awaited.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import openai

MODEL = "m"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
TEXT = "Hello, world!"


class Caller:
    """Calls of one client, whichever kind it is."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def call(self, function: Callable[..., Any], **fields: Any) -> Any:
        result = function(**fields)
        return await result if inspect.isawaitable(result) else result

    async def items(self, iterable: Any) -> list[Any]:
        """All of a stream or of an auto-paging list."""
        if inspect.isawaitable(iterable) and not hasattr(iterable, "__aiter__"):
            iterable = await iterable
        if hasattr(iterable, "__aiter__"):
            return [item async for item in iterable]
        return list(iterable)

    async def raises(
        self, kind: type[Exception], function: Callable[..., Any], **fields: Any
    ) -> Any:
        try:
            await self.call(function, **fields)
        except kind as error:
            return error
        raise AssertionError(f"{kind.__name__} was not raised")


async def models(c: Caller) -> None:
    assert [model.id for model in await c.items(c.client.models.list())] == [MODEL]
    model = await c.call(c.client.models.retrieve, model=MODEL)
    assert (model.id, model.object) == (MODEL, "model")
    assert model._request_id


async def chat(c: Caller) -> None:
    answer = await c.call(
        c.client.chat.completions.create,
        model=MODEL, messages=MESSAGES, temperature=0, logprobs=True, top_logprobs=2, n=2,
        user="u", stop=None, tools=None, seed=7,
    )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert len(answer.choices[0].logprobs.content) == 4
    assert (answer.usage.completion_tokens, bool(answer._request_id)) == (8, True)
    stream = await c.call(
        c.client.chat.completions.create,
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = await c.items(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == TEXT
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (chunks[-1].choices, chunks[-1].usage.completion_tokens) == ([], 4)


async def completions(c: Caller) -> None:
    create = c.client.completions.create
    answer = await c.call(create, model=MODEL, prompt=["a", "b"], logprobs=1, temperature=0)
    assert [choice.text for choice in answer.choices] == [TEXT] * 2
    stream = await c.call(create, model=MODEL, prompt=[1, 2], stream=True)
    assert "".join(chunk.choices[0].text for chunk in await c.items(stream)) == TEXT


async def files_and_batches(c: Caller) -> None:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": MESSAGES} | ({"n": 0} if number == 3 else {}),
        }
        for number in range(5)
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = await c.call(c.client.files.create, file=("in é.jsonl", data), purpose="batch")
    assert (file.status, file.filename, file.bytes) == ("processed", "in é.jsonl", len(data))
    assert file.id in [item.id for item in await c.items(c.client.files.list(purpose="batch"))]
    content = await c.call(c.client.files.content, file_id=file.id)
    assert content.content == data
    batch = await c.call(
        c.client.batches.create,
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h",
        metadata={"a": "b"},
    )  # fmt: skip
    deadline_s = time.monotonic() + 30
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline_s, batch.status
        await asyncio.sleep(0.1)
        batch = await c.call(c.client.batches.retrieve, batch_id=batch.id)
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (5, 4, 1)
    output = (await c.call(c.client.files.content, file_id=batch.output_file_id)).text
    ids = {json.loads(line)["custom_id"] for line in output.splitlines()}
    assert ids == {f"line-{number}" for number in (0, 1, 2, 4)}
    assert batch.id in [item.id for item in await c.items(c.client.batches.list(limit=2))]
    await c.raises(openai.BadRequestError, c.client.batches.cancel, batch_id=batch.id)
    assert (await c.call(c.client.files.delete, file_id=file.id)).deleted
    await c.raises(openai.NotFoundError, c.client.files.retrieve, file_id=file.id)


async def responses(c: Caller) -> None:
    create, retrieve = c.client.responses.create, c.client.responses.retrieve
    answer = await c.call(create, model=MODEL, input="hi", instructions="Be brief.")
    assert (answer.status, answer.output_text) == ("completed", TEXT)
    events = await c.items(await c.call(create, model=MODEL, input="hi", stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert ("".join(deltas), events[-1].type) == (TEXT, "response.completed")
    later = await c.call(create, model=MODEL, input="[[slow]]", background=True)
    await c.call(c.client.responses.cancel, response_id=later.id)
    deadline_s = time.monotonic() + 20
    while (await c.call(retrieve, response_id=later.id)).status in ("queued", "in_progress"):
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)
    await c.call(c.client.responses.delete, response_id=answer.id)
    await c.raises(openai.NotFoundError, retrieve, response_id=answer.id)


async def tools(c: Caller) -> None:
    function = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
    asking: Any = [{"role": "user", "content": "[[calls]]"}]
    chat_fields: dict[str, Any] = {
        "model": MODEL, "messages": asking, "tools": [{"type": "function", "function": function}],
    }  # fmt: skip
    create = c.client.chat.completions.create
    answer = await c.call(create, **chat_fields)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {})
    assert answer.choices[0].finish_reason == "tool_calls"
    chunks = await c.items(await c.call(create, stream=True, **chat_fields))
    streamed = [made for chunk in chunks for made in chunk.choices[0].delta.tool_calls or ()]
    assert [made.function.arguments for made in streamed] == [call.function.arguments]

    respond = c.client.responses.create
    fields: dict[str, Any] = {"model": MODEL, "tools": [{"type": "function", **function}]}
    response = await c.call(respond, input="[[calls]]", **fields)
    (item,) = response.output
    assert (item.type, item.name, item.arguments) == ("function_call", "weather", "{}")
    events = await c.items(await c.call(respond, input="[[calls]]", stream=True, **fields))
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == ["{}"]
    output = {"type": "function_call_output", "call_id": item.call_id, "output": "[[warm]]"}
    later = await c.call(respond, input=[output], previous_response_id=response.id, **fields)
    assert later.output_text == "It is warm."


async def errors(c: Caller) -> None:
    create = c.client.chat.completions.create
    unknown = await c.raises(openai.NotFoundError, create, model="nope", messages=MESSAGES)
    assert (unknown.code, unknown.param) == ("model_not_found", "model")
    assert unknown.request_id
    for fields, param in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 1000}, "n"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ):
        bad = await c.raises(
            openai.BadRequestError, create, model=MODEL, messages=MESSAGES, **fields
        )
        assert (bad.param, bad.type) == (param, "invalid_request_error"), fields
    long = await c.raises(
        openai.BadRequestError, create, model=MODEL, messages=MESSAGES, max_tokens=99999
    )
    assert long.code == "context_length_exceeded"
    for call, fields in (
        (c.client.embeddings.create, {"model": MODEL, "input": "x"}),
        (c.client.moderations.create, {"input": "x"}),
        (c.client.fine_tuning.jobs.retrieve, {"fine_tuning_job_id": "x"}),
    ):
        missing = await c.raises(openai.NotFoundError, call, **fields)
        assert missing.code == "not_found"
    twice = {"extra_headers": {"Idempotency-Key": f"{time.time()}"}}
    post = c.client.post
    body = {"model": MODEL, "prompt": "x"}
    first = await c.call(lambda: post("/jobs", body=body, options=twice_of(twice), cast_to=object))
    again = await c.call(lambda: post("/jobs", body=body, options=twice_of(twice), cast_to=object))
    assert first["id"] == again["id"]
    await c.raises(
        openai.UnprocessableEntityError,
        lambda: post("/jobs", body=body | {"seed": 1}, options=twice_of(twice), cast_to=object),
    )


def twice_of(options: dict[str, Any]) -> Any:
    return {"headers": options["extra_headers"]}


ALL = (models, chat, completions, files_and_batches, responses, tools, errors)


async def main(base_url: str, kind: str) -> None:
    made = {"sync": openai.OpenAI, "async": openai.AsyncOpenAI}[kind]
    client = made(base_url=base_url, api_key="unused", timeout=30, max_retries=0)
    caller = Caller(client)
    for part in ALL:
        await part(caller)
    await caller.call(client.close)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
    sys.stdout.write(f"openai {openai.__version__} {sys.argv[2]}: {len(ALL)} parts\n")
