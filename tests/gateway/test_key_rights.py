"""What a key may do, on the real app: models that it cannot see, work that it may not order."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

MODEL = "org/m:v1"
ORDER = {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"}
PROMPT = {"prompt": "x"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", PROMPT),
        ("/v1/responses", {"input": "x"}),
        ("/v1/jobs", PROMPT),
        ("/v1/tokenize", PROMPT),
        ("/v1/detokenize", {"tokens": [65]}),
    ],
)
async def test_a_model_that_a_key_may_not_use_is_refused_as_an_unknown_one(
    keyed_http: httpx.AsyncClient, route: str, fields: dict[str, Any]
) -> None:
    headers = bearer("sk-narrow")
    refused = await keyed_http.post(route, json={"model": MODEL, **fields}, headers=headers)
    unknown = await keyed_http.post(route, json={"model": "nope", **fields}, headers=headers)

    error = error_of(refused, 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    error["message"] = error["message"].replace(MODEL, "nope")
    assert error == error_of(unknown, 404)


async def test_only_models_that_a_key_may_use_are_shown(keyed_http: httpx.AsyncClient) -> None:
    for key, shown in (("sk-one", [MODEL]), ("sk-plain", [MODEL]), ("sk-narrow", [])):
        models = (await keyed_http.get("/v1/models", headers=bearer(key))).json()["data"]
        assert [model["id"] for model in models] == shown
        one = await keyed_http.get(f"/v1/models/{MODEL}", headers=bearer(key))
        assert one.status_code == (200 if shown else 404)


async def test_without_the_right_no_batch_is_ordered(keyed_http: httpx.AsyncClient) -> None:
    headers = bearer("sk-plain")
    body = {"model": MODEL, "priority": "batch", **PROMPT}
    answers = [
        await keyed_http.post("/v1/files", files={"file": ("a", b"x")}, headers=headers),
        await keyed_http.post("/v1/batches", json=ORDER, headers=headers),
        await keyed_http.post("/v1/completions", json=body, headers=headers),
        await keyed_http.post("/v1/jobs", json=body, headers=headers),
    ]
    for answer in answers:
        error = error_of(answer, 403)
        assert (error["type"], error["code"]) == ("permission_error", "permission_denied")
    usual = await keyed_http.post("/v1/completions", json=body, headers=bearer("sk-one"))
    assert error_of(usual, 503)["code"] == "store_unavailable"


async def test_metrics_name_models_so_where_keys_are_needed_they_take_the_right(
    keyed_http: httpx.AsyncClient, shown_http: httpx.AsyncClient, http: httpx.AsyncClient
) -> None:
    nobody = error_of(await keyed_http.get("/metrics"), 401)
    usual = error_of(await keyed_http.get("/metrics", headers=bearer("sk-one")), 403)
    assert (nobody["code"], usual["code"]) == ("invalid_api_key", "permission_denied")
    assert (await keyed_http.get("/metrics", headers=bearer("sk-scrape"))).status_code == 200
    for client in (shown_http, http):
        assert (await client.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [("/v1/completions", PROMPT), ("/v1/jobs", PROMPT), ("/v1/responses", {"input": "x"})],
)
async def test_a_key_is_looked_for_once_a_request(
    keyed_http: httpx.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    fields: dict[str, Any],
) -> None:
    compared: list[bytes] = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(other)
        return one == other

    monkeypatch.setattr("gateway.auth.hmac.compare_digest", compare)
    body = {"model": MODEL, "priority": "batch", **fields}
    answer = await keyed_http.post(path, json=body, headers=bearer("sk-one"))

    assert error_of(answer, 503)["code"] == "store_unavailable", "it came all the way"
    assert len(compared) == len(set(compared)) > 1
