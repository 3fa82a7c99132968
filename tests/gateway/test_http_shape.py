"""Cases C048, C050, C051, C059, C155, C156 (parts), C158, C159, C170: answers without a worker."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message

CHAT = "/v1/chat/completions"
MODEL = "org/m:v1"
GOOD = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
MAX_ERROR_BYTES = 4096


def assert_refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The one shape of errors."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"].startswith("req-")
    assert set(answer.json()) == {"error"}
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert len(answer.content) < MAX_ERROR_BYTES
    return error


async def post(http: httpx.AsyncClient, content: bytes, kind: str | None) -> httpx.Response:
    headers = {} if kind is None else {"content-type": kind}
    return await http.post(CHAT, content=content, headers=headers)


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16"],
)
async def test_a_body_that_is_not_said_to_be_json_is_415(
    http: httpx.AsyncClient, kind: str | None
) -> None:
    assert_refused(await post(http, b"{}", kind), 415, "unsupported_media_type")


async def test_a_compressed_body_is_415(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await http.post(CHAT, content=b"{}", headers=headers)
    assert_refused(answer, 415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"model":',
        b"{}x",
        b"\xff{}",
        b"\xef\xbb\xbf{}",
        b'{"temperature":NaN}',
        b'{"temperature":1e999}',
        b'{"tools":' + b"[" * 1500 + b"]" * 1500 + b"}",
        b'{"x":' + b'{"a":' * 600 + b"1" + b"}" * 600,
    ],
)
async def test_a_broken_body_is_400_in_our_shape(http: httpx.AsyncClient, content: bytes) -> None:
    answer = await post(http, content, "application/json; charset=utf-8")
    assert_refused(answer, 400, "invalid_json")


async def test_deep_nesting_that_the_parser_takes_is_refused_as_a_field(
    http: httpx.AsyncClient,
) -> None:
    content = b'{"model":"org/m:v1","unknown":' + b'{"a":' * 500 + b"1" + b"}" * 501
    answer = await post(http, content, "application/json")
    assert_refused(answer, 400, "unsupported_parameter")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (rb'{"messages":[{"role":"user","content":"hi \ud83d"}]}', "messages[0].content"),
        (rb'{"stop":["\ude00"]}', "stop[0]"),
        (rb'{"metadata":{"a":"\ud83dx"}}', "metadata.a"),
    ],
)
async def test_half_a_surrogate_pair_is_400_and_names_the_place(
    http: httpx.AsyncClient, content: bytes, place: str
) -> None:
    error = assert_refused(await post(http, content, "application/json"), 400, "invalid_value")
    assert error["param"] == place


async def posted_raw(app: FastAPI, *headers: tuple[bytes, bytes]) -> tuple[int, int]:
    """Status of a POST whose body never ends, and how many times its body was read."""
    num_read = 0
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": b"x" * 1024, "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    await app(scope, receive, send)
    return sent[0]["status"], num_read


async def test_a_body_that_announces_too_much_is_413_before_it_is_read(app: FastAPI) -> None:
    assert await posted_raw(app, (b"content-length", b"99999999999")) == (413, 0)


async def test_a_chunked_body_is_413_as_soon_as_it_passes_the_limit(app: FastAPI) -> None:
    assert await posted_raw(app) == (413, 5)


async def test_a_large_body_is_413_in_our_shape(http: httpx.AsyncClient) -> None:
    answer = await post(http, b" " * 5000, "application/json")
    assert_refused(answer, 413, "request_too_large")


@pytest.mark.parametrize("more", [{"stream": False}, {"stream": True}])
async def test_a_redis_that_is_away_is_503_with_retry_after(
    http: httpx.AsyncClient, more: dict[str, bool]
) -> None:
    answer = await http.post(CHAT, json=GOOD | more)
    assert_refused(answer, 503, "store_unavailable")
    assert answer.headers["retry-after"] == "2"


@pytest.mark.parametrize(
    ("model", "status", "code"),
    [
        ("nope", 404, "model_not_found"),
        ("", 400, "invalid_value"),
        (None, 400, "invalid_value"),
        (5, 400, "invalid_value"),
        ("x" * 3000, 404, "model_not_found"),
    ],
)
@pytest.mark.parametrize("route", [CHAT, "/v1/completions", "/v1/jobs"])
async def test_a_model_that_is_not_served_is_refused(
    http: httpx.AsyncClient, route: str, model: object, status: int, code: str
) -> None:
    field = {"prompt": "x"} if route == "/v1/completions" else {"messages": GOOD["messages"]}
    error = assert_refused(await http.post(route, json={"model": model, **field}), status, code)
    assert error["param"] == "model"
    assert len(error["message"]) < 1024


@pytest.mark.parametrize("path", ["/v1/models/org/m:v1", "/v1/models/org%2Fm:v1"])
async def test_a_model_name_may_hold_a_slash(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert answer.json()["id"] == MODEL


async def test_models_are_listed_with_what_clients_read(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert set(model) == {"id", "object", "created", "owned_by", "root", "max_model_len"}
    assert (model["object"], model["max_model_len"]) == ("model", 512)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("HEAD", "/v1/completions", "POST"),
        ("DELETE", "/v1/models/x", "GET, HEAD"),
        ("PUT", "/v1/jobs/job-1", "DELETE, GET, HEAD"),
    ],
)
async def test_a_wrong_method_is_405_and_names_the_right_ones(
    http: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    answer = await http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert_refused(answer, 405, "method_not_allowed")


@pytest.mark.parametrize(
    "path",
    ["/v1/models/", "http://gateway//v1/models", "/v1/embeddings", "/v1/uploads", "/", "/docs"],
)
async def test_an_unknown_path_is_a_json_404(http: httpx.AsyncClient, path: str) -> None:
    assert_refused(await http.get(path), 404, "not_found")


@pytest.mark.parametrize("job_id", ["job-0", "request:1", "cmpl-1", "x" * 500])
async def test_an_id_that_names_no_job_never_names_another_thing(
    http: httpx.AsyncClient, job_id: str
) -> None:
    answer = await http.get(f"/v1/jobs/{job_id}")
    assert answer.status_code == (503 if job_id == "job-0" else 404)


@pytest.mark.parametrize("path", ["/livez", "/healthz", "/health"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_a_living_process_says_so(http: httpx.AsyncClient, method: str, path: str) -> None:
    assert (await http.request(method, path)).status_code == 200


async def test_a_gateway_without_redis_is_not_ready_and_says_why(http: httpx.AsyncClient) -> None:
    answer = await http.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == ["Redis does not answer"]


async def test_metric_labels_do_not_grow_with_paths_and_models(http: httpx.AsyncClient) -> None:
    async def num_series() -> int:
        return len((await http.get("/metrics")).text.splitlines())

    await http.get("/v1/xyz")
    await http.get("/v1/models/unknown")
    await num_series()
    before = await num_series()
    for number in range(20):
        await http.get(f"/v1/xyz{number}")
        await http.get(f"/v1/models/m{number}")
    assert await num_series() == before


async def test_a_crash_is_a_500_without_details(app: FastAPI, http: httpx.AsyncClient) -> None:
    async def crash() -> None:
        raise RuntimeError("secret detail")

    app.add_api_route("/crash", crash)
    error = assert_refused(await http.get("/crash"), 500, "internal_error")
    assert "secret" not in error["message"]


async def test_fields_that_are_passed_over_are_counted(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json=GOOD | {"user": "u", "verbosity": "low"})
    text = (await http.get("/metrics")).text
    assert 'pointsman_gateway_ignored_fields_total{field="verbosity"} 1.0' in text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, GOOD),
        ("/v1/completions", {"model": MODEL, "prompt": "x"}),
        ("/v1/jobs", {"model": MODEL, "prompt": "x"}),
        ("/v1/responses", {"model": MODEL, "input": "x"}),
    ],
)
async def test_a_strict_gateway_refuses_what_another_passes_over(
    http: httpx.AsyncClient, strict_http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> None:
    answer = await strict_http.post(path, json=body | {"user": "u"})
    error = assert_refused(answer, 400, "unsupported_parameter")
    assert error["param"] == "user"
    # The others get as far as Redis, which is not there.
    assert_refused(await strict_http.post(path, json=body), 503, "store_unavailable")
    assert_refused(await http.post(path, json=body | {"user": "u"}), 503, "store_unavailable")


async def test_a_draining_gateway_takes_no_new_work_but_lives(
    app: FastAPI, http: httpx.AsyncClient
) -> None:
    app.state.services.drain.begin(now_s=0.0)
    answer = await http.post(CHAT, json=GOOD)
    assert_refused(answer, 503, "draining")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert (await http.get("/readyz")).status_code == 503
    assert (await http.get("/healthz")).status_code == 200


async def test_keys_are_needed_where_there_is_a_keys_file(keyed_http: httpx.AsyncClient) -> None:
    for authorization in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic sk-one"}):
        answer = await keyed_http.post(CHAT, json=GOOD, headers=authorization)
        assert_refused(answer, 401, "invalid_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
    good = {"authorization": "Bearer sk-two"}
    assert (await keyed_http.get("/v1/models", headers=good)).status_code == 200
    assert (await keyed_http.get("/v1/models")).status_code == 401
    assert (await keyed_http.get("/health")).status_code == 200
