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
