"""Files and batches on the real app without Redis: everything that needs no worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gateway.file_answer import RangeUnsatisfiable, byte_range
from gateway.settings import GatewaySettings

MIB = 1 << 20
AUTH = {"authorization": "Bearer sk-one"}


@pytest.fixture
async def live(keyed_app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client with a key; the app is started, so that its database is there."""
    transport = httpx.ASGITransport(keyed_app)
    async with (
        keyed_app.router.lifespan_context(keyed_app),
        httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=AUTH) as client,
    ):
        yield client


async def upload(http: httpx.AsyncClient, data: bytes = b"x", /, **fields: str) -> httpx.Response:
    return await http.post(
        "/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch", **fields}
    )


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-x"),
        ("DELETE", "/v1/files/file-x"),
        ("GET", "/v1/files/file-x/content"),
        ("GET", "/v1/batches"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/batches/batch_x"),
        ("POST", "/v1/batches/batch_x/cancel"),
    ],
)
async def test_without_a_key_nothing_is_told(
    keyed_http: httpx.AsyncClient, method: str, path: str
) -> None:
    assert error_of(await keyed_http.request(method, path), 401)["code"] == "invalid_api_key"


async def test_a_file_is_uploaded_shown_listed_read_and_deleted(live: httpx.AsyncClient) -> None:
    shown = (await upload(live, b"some bytes")).json()
    assert shown["id"].startswith("file-")
    assert (shown["bytes"], shown["filename"]) == (10, "in.jsonl")
    assert (shown["object"], shown["status"], shown["purpose"]) == ("file", "processed", "batch")
    assert shown["expires_at"] - shown["created_at"] == 30 * 86_400
    url = f"/v1/files/{shown['id']}"
    assert (await live.get(url)).json() == shown
    page = (await live.get("/v1/files")).json()
    assert (page["data"], page["has_more"], page["first_id"]) == ([shown], False, shown["id"])
    content = await live.get(f"{url}/content")
    assert content.content == b"some bytes"
    assert content.headers["content-length"] == "10"
    deleted = {"id": shown["id"], "object": "file", "deleted": True}
    assert (await live.delete(url)).json() == deleted
    for path in (url, f"{url}/content"):
        assert error_of(await live.get(path), 404)["code"] == "not_found"
    assert (await live.get("/v1/files")).json()["last_id"] is None


async def test_a_file_may_expire_earlier(live: httpx.AsyncClient) -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    shown = (await upload(live, **fields)).json()
    assert shown["expires_at"] - shown["created_at"] == 3600
    for seconds in ("3599", "2592001", "x", "-1", "9" * 40):
        refused = await upload(live, **{**fields, "expires_after[seconds]": seconds})
        assert error_of(refused, 400)["param"] == "expires_after.seconds"


async def test_other_tenants_see_nothing(live: httpx.AsyncClient) -> None:
    file_id = (await upload(live)).json()["id"]
    other = {"authorization": "Bearer sk-two"}
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = await live.request(method, f"/v1/files/{file_id}{path}", headers=other)
        assert error_of(answer, 404)["code"] == "not_found"
    assert (await live.get("/v1/files", headers=other)).json()["data"] == []
    order = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    refused = await live.post("/v1/batches", json=order, headers=other)
    assert error_of(refused, 404)["param"] == "input_file_id"


async def test_a_file_over_the_limit_is_413_announced_or_not(
    keyed_app: FastAPI, live: httpx.AsyncClient
) -> None:
    settings: GatewaySettings = keyed_app.state.services.settings
    object.__setattr__(settings, "max_file_bytes", 100_000)
    assert (await upload(live, b"x" * 100_000)).status_code == 200
    assert error_of(await upload(live, b"x" * 100_001), 413)["code"] == "request_too_large"
    assert error_of(await upload(live, b"x" * MIB), 413)["code"] == "request_too_large"

    async def endless() -> AsyncIterator[bytes]:
        yield b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        while True:
            yield b"x" * 65_536

    headers = {"content-type": "multipart/form-data; boundary=B"}
    answer = await live.post("/v1/files", content=endless(), headers=headers)
    assert error_of(answer, 413)["code"] == "request_too_large"
    assert len((await live.get("/v1/files")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("content", "media_type", "status"),
    [
        (b"{}", "application/json", 415),
        (b"", "multipart/form-data", 400),
        (b"nonsense", "multipart/form-data; boundary=B", 400),
        (b"--B\r\nContent-Disposition: form-data\r\n\r\nx\r\n--B--", "multipart/form-data; boundary=B", 400),
        (b'--B\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\ncut', "multipart/form-data; boundary=B", 400),
    ],
)  # fmt: skip
async def test_a_broken_form_is_refused_in_our_shape(
    live: httpx.AsyncClient, content: bytes, media_type: str, status: int
) -> None:
    answer = await live.post("/v1/files", content=content, headers={"content-type": media_type})
    error_of(answer, status)


async def test_a_batch_waits_when_redis_is_away_and_can_be_cancelled(
    live: httpx.AsyncClient,
) -> None:
    file_id = (await upload(live, b"{}")).json()["id"]
    order = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {"a": "b"},
    }
    batch = (await live.post("/v1/batches", json=order)).json()
    assert (batch["status"], batch["metadata"]) == ("validating", {"a": "b"})
    assert (await live.get(f"/v1/batches/{batch['id']}")).json() == batch
    cancelled = await live.post(f"/v1/batches/{batch['id']}/cancel")
    assert cancelled.json()["status"] == "cancelling"
    refused = await live.post("/v1/batches", content=json.dumps({**order, "endpoint": "/v1/x"}))
    error_of(refused, 415)
    wrong = await live.post("/v1/batches", json={**order, "completion_window": "1h"})
    assert error_of(wrong, 400)["param"] == "completion_window"


async def test_wrong_methods_and_paths_are_answered_in_our_shape(live: httpx.AsyncClient) -> None:
    answer = await live.put("/v1/batches")
    assert error_of(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "GET, HEAD, POST"
    error_of(await live.get("/v1/files/a/b"), 404)
    error_of(await live.post("/v1/uploads"), 404)


@pytest.mark.parametrize(
    ("header", "wanted"),
    [
        ("", None),
        ("bytes=0-", (0, 10)),
        ("bytes=3-5", (3, 6)),
        ("bytes=3-99", (3, 10)),
        ("bytes=-4", (6, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=5-3", None),
        ("bytes=0-1,3-4", None),
        ("lines=1-2", None),
        ("bytes=-", None),
        ("bytes=a-b", None),
    ],
)
def test_ranges_are_read_as_http_says(header: str, wanted: tuple[int, int] | None) -> None:
    assert byte_range(header, 10) == wanted


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=11-12", "bytes=-0"])
def test_a_range_behind_the_end_cannot_be_satisfied(header: str) -> None:
    with pytest.raises(RangeUnsatisfiable):
        byte_range(header, 10)
