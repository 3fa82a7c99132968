"""Whatever is sent to a route, it is answered: never by a crash, always in the one shape of errors.

Two sources: bodies and parameters from the OpenAPI document, right and wrong ones (schemathesis), and
good bodies in which one field holds any JSON at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from gateway.endpoints import ENDPOINTS, Endpoint
from gateway.openapi import openapi_document
from tests.flow.rig import Rig
from tests.flow.talk import body
from tests.flow.wire import CHAT, COMPLETIONS, ERROR_KEYS, chat_body

DOCUMENT = schemathesis.openapi.from_dict(openapi_document())
STREAMS = "text/event-stream"
GOOD: dict[str, dict[str, Any]] = {
    CHAT: chat_body("x", max_tokens=2),
    COMPLETIONS: body("x", max_tokens=2),
    "/v1/jobs": body("x", max_tokens=2),
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 2},
    "/tokenize": {"model": "m", "prompt": "x"},
    "/detokenize": {"model": "m", "tokens": [65]},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": CHAT,
        "completion_window": "24h",
    },
}
LIMITS: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 2, "max_completion_tokens": 2, "min_tokens": 0},
    COMPLETIONS: {"max_tokens": 2, "min_tokens": 0},
    "/v1/jobs": {"max_tokens": 2, "min_tokens": 0},
    "/v1/responses": {"max_output_tokens": 2, "min_tokens": 0},
}
FIELDS = {
    endpoint.path: sorted(
        (set() if endpoint.body.policy is None else endpoint.body.policy.supported)
        | set(endpoint.body.shape.model_fields)
    )
    for endpoint in ENDPOINTS
    if endpoint.body is not None
}
QUICK = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # what fails is small enough, shrinking takes minutes
    suppress_health_check=list(HealthCheck),
)
ANY_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(workers={"both-0": "both"}, has_kvd=False)


@pytest.fixture(scope="module")
def http(rig: Rig) -> Any:
    with httpx.Client(base_url=rig.base_url, timeout=60) as client:
        yield client
    rig.wait_at_rest(60)
    assert "request_crashed" not in rig.log("gateway")
    assert "stream_crashed" not in rig.log("gateway")


def check(answer: httpx.Response) -> None:
    """A good answer, or an error as all are; a server error only where it says when to come back."""
    assert answer.headers["x-request-id"]
    kind = answer.headers["content-type"]
    if answer.status_code < 400:
        return
    assert kind == "application/json"
    assert answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert set(answer.json()) == {"error"}
    assert set(error) == ERROR_KEYS
    assert len(answer.content) < 4096


def send(http: httpx.Client, case: Any) -> None:
    """One case of schemathesis, without its own client and its own ideas of keys."""
    parts = case.as_transport_kwargs(base_url=str(http.base_url).rstrip("/"))
    wanted: dict[str, Any] = {"params": parts.get("params")}
    if "json" in parts:
        wanted["json"] = parts["json"]
    elif isinstance(parts.get("data"), bytes | str):
        wanted["content"] = parts["data"]
    check(http.request(parts["method"], parts["url"], **wanted))


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize(
    "endpoint",
    [endpoint for endpoint in ENDPOINTS if endpoint.body or "{" in endpoint.path or endpoint.query],
    ids=lambda endpoint: f"{endpoint.method} {endpoint.path}",
)
def test_a_route_answers_what_the_document_allows_and_what_it_does_not(
    http: httpx.Client, endpoint: Endpoint, mode: GenerationMode
) -> None:
    strategy = DOCUMENT[endpoint.path][endpoint.method].as_strategy(generation_mode=mode)

    @QUICK
    @given(case=strategy)
    def run(case: Any) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body |= {"model": "m"} | LIMITS.get(endpoint.path, {})
        send(http, case)

    run()


@pytest.mark.parametrize("path", GOOD)
def test_any_json_in_any_field_is_taken_or_refused_by_its_name(
    http: httpx.Client, path: str
) -> None:
    names = st.sampled_from(FIELDS.get(path, sorted(GOOD[path])))

    @settings(QUICK, max_examples=60)
    @given(name=names, value=ANY_JSON)
    def run(name: str, value: object) -> None:
        answer = http.post(path, json=GOOD[path] | {name: value})
        check(answer)

    run()


@pytest.mark.parametrize("path", GOOD)
def test_any_bytes_are_taken_or_refused(http: httpx.Client, path: str) -> None:
    whole = json.dumps(GOOD[path]).encode()

    @settings(QUICK, max_examples=40)
    @given(cut=st.integers(0, len(whole)), junk=st.binary(max_size=8))
    def run(cut: int, junk: bytes) -> None:
        content = whole[:cut] + junk + whole[cut + len(junk) :]
        headers = {"content-type": "application/json"}
        check(http.post(path, content=content, headers=headers))

    run()
