"""Sections CLIENT and ROUTE of the cases: openai-python and curl as people use them."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.flow.rig import Rig
from tests.flow.wire import (
    CHAT,
    COMPLETIONS,
    assert_error,
    chat_body,
    connect,
    num_requests,
    read_answer,
    script,
    wire_stream,
    write_book,
)

MODEL, ALIAS = "org/m:v1", "small"
KEY = "sk-client"
AUTH = {"authorization": f"Bearer {KEY}"}
SLOW_STEP_MS = 30
SLOW_PIECES = [f"{number} " for number in range(40)]
BOOK = {
    "café": script("caf", b"\xc3", b"\xa9", "!"),
    "slow": script(*SLOW_PIECES, token_delay_ms=SLOW_STEP_MS),
    "endless": script("on ", ends=False, token_delay_ms=SLOW_STEP_MS),
}
ASK: list[Any] = [{"role": "user", "content": "[[café]]"}]


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Recovery is off, so that a killed worker is an error that clients see."""
    folder = tmp_path_factory.mktemp("client")
    keys = folder / "keys"
    keys.write_text(f"someone {hashlib.sha256(KEY.encode()).hexdigest()}\n")
    env = {
        "POINTSMAN_MODEL_NAME": MODEL,
        "POINTSMAN_MODEL_ALIASES": ALIAS,
        "POINTSMAN_GATEWAY_KEYS_FILE": str(keys),
        "POINTSMAN_MAX_ATTEMPTS": "1",
    }
    return make_rig(engine="script", model=write_book(folder, BOOK), env=env)


@pytest.fixture
def sdk(rig: Rig) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{rig.base_url}/v1", api_key=KEY, timeout=30) as client:
        yield client


def async_sdk(rig: Rig) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{rig.base_url}/v1", api_key=KEY, timeout=30)


def http_client(rig: Rig) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=rig.base_url, headers=AUTH, timeout=30)


def test_c164_chat_is_typed_and_has_a_request_id(sdk: openai.OpenAI) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, temperature=0, logprobs=True, top_logprobs=2, n=2
    )
    answer = ChatCompletion.model_validate_json(raw.text, strict=True)
    parsed = raw.parse()

    assert parsed == answer
    assert [choice.message.content for choice in answer.choices] == ["café!"] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.id.startswith("chatcmpl-")
    assert abs(answer.created - time.time()) < 60
    assert parsed._request_id == raw.headers["x-request-id"]
    assert parsed._request_id


def test_c164_chat_streams(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "café!"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert stream.response.headers["x-request-id"]


def test_c164_the_stream_helper_builds_the_same_answer(sdk: openai.OpenAI) -> None:
    with sdk.chat.completions.stream(
        model=MODEL, messages=ASK, temperature=0, stream_options={"include_usage": True}
    ) as stream:
        kinds = {event.type for event in stream}
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == "café!"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_c164_completions_whole_and_streamed(sdk: openai.OpenAI) -> None:
    prompts = ["[[café]]", "hello"]
    raw = sdk.completions.with_raw_response.create(
        model=MODEL, prompt=prompts, temperature=0, logprobs=1
    )
    answer = Completion.model_validate_json(raw.text, strict=True)
    streamed = ["", ""]
    for chunk in sdk.completions.create(model=MODEL, prompt=prompts, temperature=0, stream=True):
        choice = chunk.choices[0].to_dict()
        # OpenAI's own type has no null here, OpenAI's own chunks do.
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        Completion.model_validate(chunk.to_dict() | {"choices": [choice]}, strict=True)
        streamed[chunk.choices[0].index] += chunk.choices[0].text

    assert [choice.text for choice in answer.choices] == streamed == ["café!", "Hello, world!"]
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.text_offset == [0, 3, 3, 4]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8


def test_c159_models_are_found_by_names_with_a_slash(rig: Rig, sdk: openai.OpenAI) -> None:
    listed = sdk.models.list()
    assert [model.id for model in listed] == [MODEL, ALIAS]
    raw = sdk.models.with_raw_response.retrieve(MODEL)
    assert Model.model_validate_json(raw.text, strict=True) == listed.data[0]
    for path in ("/v1/models/org/m:v1", "/v1/models/org%2Fm%3Av1", "/v1/models/org%2fm:v1"):
        answer = httpx.get(rig.base_url + path, headers=AUTH)
        assert (answer.status_code, answer.json()["id"]) == (200, MODEL)
    for name in ("org", "m:v1", "org/m", "org/m:v1/"):
        with pytest.raises(openai.NotFoundError) as caught:
            sdk.models.retrieve(name)
        assert caught.value.code == "model_not_found"


async def test_c160_every_answer_names_the_model_that_was_asked_for(rig: Rig) -> None:
    async with http_client(rig) as http:
        whole = (await http.post(CHAT, json=chat_body("x", model=MODEL))).json()
        wire = await wire_stream(http, CHAT, chat_body("x", model=MODEL))
        alias = (await http.post(CHAT, json=chat_body("x", model=ALIAS))).json()
        by_alias = await wire_stream(http, COMPLETIONS, {"model": ALIAS, "prompt": "x"})
        job = (await http.post("/v1/jobs", json={"model": ALIAS, "prompt": "x"})).json()
        other = await http.post(CHAT, json=chat_body("x", model="book"))
        listed, short = (await http.get("/v1/models")).json()["data"]

    assert {whole["model"], *(chunk["model"] for chunk in wire.chunks)} == {MODEL}
    assert {alias["model"], *(chunk["model"] for chunk in by_alias.chunks)} == {ALIAS}
    answers = [whole, alias, *wire.chunks, *by_alias.chunks]
    (fingerprint,) = {answer["system_fingerprint"] for answer in answers}
    assert fingerprint.startswith("fp_")
    assert rig.request_fields(job["id"])["model"] == MODEL, "one model for limits and queues"
    assert (listed["id"], short["id"], short["root"]) == (MODEL, ALIAS, MODEL)
    assert_error(other, 404, code="model_not_found", param="model")
    assert set(listed) == {"id", "object", "created", "owned_by", "root", "max_model_len"}


@pytest.mark.parametrize(
    ("model", "status"), [("nope", 404), ("", 400), (None, 400), ("missing", 400), (5, 400)]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/jobs"])
async def test_c158_no_other_model_answers_for_an_unknown_one(
    rig: Rig, path: str, model: object, status: int
) -> None:
    request = (
        {"model": model, "prompt": "x"} if path == COMPLETIONS else chat_body("x", model=model)
    )
    if model == "missing":
        del request["model"]
    before = num_requests(rig)
    async with http_client(rig) as http:
        error = assert_error(await http.post(path, json=request), status, param="model")
    assert error["code"] == ("model_not_found" if status == 404 else "invalid_value")
    assert MODEL not in error["message"]
    assert num_requests(rig) == before


def test_c164_errors_are_typed_and_not_asked_again(rig: Rig, sdk: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    answered = rig.metric("pointsman_gateway_http_requests_total")
    with pytest.raises(openai.NotFoundError) as caught:
        sdk.chat.completions.create(model="nope", messages=messages)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    assert caught.value.request_id
    with pytest.raises(openai.BadRequestError) as refused:
        sdk.chat.completions.create(model=MODEL, messages=messages, max_tokens=0)
    assert (refused.value.param, refused.value.type) == ("max_tokens", "invalid_request_error")
    with pytest.raises(openai.BadRequestError) as streamed:
        sdk.completions.create(model=MODEL, prompt="x" * 600, stream=True)
    assert streamed.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError) as unknown:
        sdk.with_options(api_key="wrong").models.list()
    assert unknown.value.code == "invalid_api_key"
    for call in (
        lambda: sdk.embeddings.create(model=MODEL, input="x"),
        lambda: sdk.responses.retrieve("resp_1"),
        sdk.fine_tuning.jobs.list,
        lambda: sdk.moderations.create(input="x"),
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            call()
        assert missing.value.code == "not_found"
    # Eight calls and this look at the metrics: none was made twice.
    assert rig.metric("pointsman_gateway_http_requests_total") == answered + 9


async def test_c164_the_async_client_does_it_all(rig: Rig) -> None:
    async with async_sdk(rig) as sdk:

        async def streamed() -> str:
            stream = await sdk.chat.completions.create(
                model=MODEL, messages=ASK, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def whole() -> str | None:
            answer = await sdk.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
            assert answer._request_id
            return answer.choices[0].message.content

        async def completed() -> str:
            answer = await sdk.completions.create(model=MODEL, prompt="[[café]]", temperature=0)
            return answer.choices[0].text

        async def completed_in_a_stream() -> str:
            stream = await sdk.completions.create(
                model=MODEL, prompt="[[café]]", temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        ways = (streamed, whole, completed, completed_in_a_stream)
        texts = await asyncio.gather(*(way() for way in ways * 8))
        assert set(texts) == {"café!"}
        assert [model.id async for model in sdk.models.list()] == [MODEL, ALIAS]
        assert (await sdk.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError):
            await sdk.completions.create(model="nope", prompt="x")


async def test_c164_a_stream_that_is_left_early_ends_at_the_workers(rig: Rig) -> None:
    async with async_sdk(rig) as sdk:
        stream = await sdk.completions.create(
            model=MODEL, prompt="[[endless]]", stream=True, max_tokens=400, temperature=0
        )
        async for _ in stream:
            break
        await stream.close()
    rig.wait_at_rest(3)


def test_c164_a_lost_worker_raises_in_mid_stream(rig: Rig, sdk: openai.OpenAI) -> None:
    stream = sdk.completions.create(
        model=MODEL, prompt="[[endless]]", stream=True, max_tokens=400, temperature=0
    )

    def read_on() -> None:
        for number, _ in enumerate(stream):
            if number == 3:
                rig.kill("decode-0")

    with stream, pytest.raises(openai.APIError) as caught:
        read_on()
    assert caught.value.code == "worker_lost"
    assert caught.value.type == "server_error"
    rig.start_worker("decode-0", "decode")
    rig.wait_for_worker("decode-0")
    rig.wait_ready()


def curl(rig: Rig, *arguments: str, path: str = CHAT) -> tuple[int, httpx.Headers, bytes]:
    """(status, headers, body) of one curl call."""
    command = ["curl", "-sS", "-i", "--max-time", "20", "-H", f"Authorization: Bearer {KEY}"]
    command += [*arguments, rig.base_url + path]
    data = subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
    head, _, content = data.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = httpx.Headers([(line.split(": ", 1)[0], line.split(": ", 1)[1]) for line in lines])
    return int(status.split()[1]), headers, content


def answer_of(result: tuple[int, httpx.Headers, bytes]) -> httpx.Response:
    status, headers, content = result
    return httpx.Response(status, headers=headers, content=content)


def as_json(**fields: Any) -> tuple[str, ...]:
    body = chat_body("[[slow]]", model=MODEL, **fields)
    return "-H", "Content-Type: application/json", "-d", json.dumps(body)


@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_c170_a_stream_is_read_in_real_time(rig: Rig, version: str) -> None:
    command = ["curl", "-sS", "-N", version, "-H", f"Authorization: Bearer {KEY}"]
    command += [*as_json(stream=True), rig.base_url + CHAT]
    started_s = time.monotonic()
    times_s, text = [], ""
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(b"data: {"):
                times_s.append(time.monotonic() - started_s)
                text += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
        assert process.wait(10) == 0
    assert text == "".join(SLOW_PIECES)
    assert times_s[0] < 0.5
    steps_s = [after - before for before, after in itertools.pairwise(times_s)]
    assert sorted(steps_s)[len(steps_s) // 2] > 0.5 * SLOW_STEP_MS / 1000, "one by one"


def test_c170_http_1_0_is_answered_whole_and_closed(rig: Rig) -> None:
    status, headers, content = curl(rig, "--http1.0", *as_json())
    assert status == 200
    assert json.loads(content)["choices"][0]["message"]["content"] == "".join(SLOW_PIECES)
    assert int(headers["content-length"]) == len(content)
    with connect(rig) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert read_answer(connection).status_code == 200
        assert connection.recv(1) == b"", "closed after the answer"


def test_c170_curl_without_a_json_type_is_told_so(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text(json.dumps(chat_body("x", model=MODEL)))
    assert_error(answer_of(curl(rig, "-d", f"@{file}")), 415, code="unsupported_media_type")
    assert curl(rig, "--json", f"@{file}")[0] == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_c170_a_wrong_method_is_405_and_names_the_right_one(
    rig: Rig, method: str, path: str
) -> None:
    answer = answer_of(curl(rig, "-X", method, path=path))
    assert_error(answer, 405, code="method_not_allowed")
    assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path", ["/v1/models/", "//v1/models", "/v1//models", "/v1/chat/completions/", "/v1", "/"]
)
def test_c170_a_path_that_is_not_exact_is_a_json_404(rig: Rig, path: str) -> None:
    assert_error(answer_of(curl(rig, "--path-as-is", path=path)), 404, code="not_found")
    if path != "/v1/models/":  # a model without a name: read only, as all of them
        answer = answer_of(curl(rig, "--path-as-is", *as_json(), path=path))
        assert_error(answer, 404, code="not_found")


def test_c170_head_is_get_without_a_body(rig: Rig) -> None:
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health"):
        status, headers, content = curl(rig, "--head", path=path)
        assert (status, content) == (200, b"")
        assert headers["content-length"] == curl(rig, path=path)[1]["content-length"]
    status, headers, content = curl(rig, "--head")
    assert (status, headers["allow"], content) == (405, "POST", b"")


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_c170_bytes_that_are_no_http_are_answered_in_json(rig: Rig, data: bytes) -> None:
    with connect(rig) as connection:
        connection.sendall(data)
        assert_error(read_answer(connection), 400, code="invalid_http")
        assert connection.recv(1) == b""
