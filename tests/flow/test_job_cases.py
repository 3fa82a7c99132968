"""Jobs as their owners see them: the list, where the time went, and who is told of the end."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import body, submit_job
from tests.flow.wire import assert_error, script, write_book

SECRET = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQ="  # noqa: S105
KEYS = {"t1": "sk-one", "t2": "sk-two"}
BOOK = {
    "counted": script(*[f"{number} " for number in range(20)], token_delay_ms=10),
    "endless": script("on ", ends=False, token_delay_ms=20),
}
RETENTION_S = 30


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    folder = tmp_path_factory.mktemp("jobs")
    keys = folder / "keys"
    lines = [f"{name} {hashlib.sha256(key.encode()).hexdigest()}" for name, key in KEYS.items()]
    keys.write_text("\n".join(lines))
    env = {
        "POINTSMAN_GATEWAY_KEYS_FILE": str(keys),
        "POINTSMAN_GATEWAY_WEBHOOK_PRIVATE": "true",
        "POINTSMAN_RETENTION_S": str(RETENTION_S),
        "POINTSMAN_LOG_LEVEL": "debug",
    }
    return make_rig(engine="script", model=write_book(folder, BOOK), env=env)


def caller(rig: Rig, tenant: str = "t1") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    return httpx.AsyncClient(base_url=rig.base_url, headers=headers, timeout=30)


async def ended(http: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            job: dict[str, Any] = (await http.get(f"/v1/jobs/{job_id}")).json()
            if job["status"] in ("finished", "failed", "cancelled"):
                return job
            await asyncio.sleep(0.02)


async def listed(http: httpx.AsyncClient, **query: Any) -> tuple[list[str], bool]:
    answer = await http.get("/v1/jobs", params=query)
    assert answer.status_code == 200, answer.text
    page = answer.json()
    ids = [job["id"] for job in page["data"]]
    assert (page["first_id"], page["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
    return ids, page["has_more"]


async def test_a_tenant_pages_through_its_own_jobs_newest_first(rig: Rig) -> None:
    async with caller(rig) as http, caller(rig, "t2") as other:
        ids = [await submit_job(http, "[[counted]]", max_tokens=1) for _ in range(7)]
        foreign = await submit_job(other, "[[counted]]", max_tokens=1)
        for job_id in ids:
            await ended(http, job_id)

        pages: list[str] = []
        after: dict[str, str] = {}
        has_more = True
        while has_more:
            page, has_more = await listed(http, limit=3, **after)
            pages += page
            after = {"after": page[-1]}
        backwards, _ = await listed(http, order="asc", limit=100)
        theirs, _ = await listed(other)
        unknown = await http.get("/v1/jobs", params={"after": foreign})

    assert set(pages) == set(ids)
    assert len(pages) == len(ids)
    assert backwards == pages[::-1]
    assert theirs == [foreign]
    assert_error(unknown, 404, code="not_found")


async def test_a_list_is_filtered_and_forgets_what_is_gone(rig: Rig) -> None:
    async with caller(rig, "t2") as http:
        running = await submit_job(http, "[[endless]]", max_tokens=400)
        done = await submit_job(http, "[[counted]]", max_tokens=1)
        await ended(http, done)
        await asyncio.to_thread(
            wait_until, lambda: rig.request_fields(running)["state"] == "running", 60
        )
        only_running, _ = await listed(http, status="running")
        none, _ = await listed(http, model="another")
        await http.delete(f"/v1/jobs/{running}")
        await ended(http, running)
        cancelled, _ = await listed(http, status="cancelled", model="m")
        rig.redis.delete(f"request:{done}")
        rest, _ = await listed(http)
        refused = [
            await http.get("/v1/jobs", params=query)
            for query in ({"status": "odd"}, {"limit": 0}, {"limit": 101}, {"order": "up"})
        ]

    assert (only_running, none, cancelled) == ([running], [], [running])
    assert done not in rest
    assert rig.redis.zscore("jobs:t2", done) is None, "struck off when it was looked for"
    for answer, param in zip(refused, ("status", "limit", "limit", "order"), strict=True):
        assert_error(answer, 400, param=param)


async def test_a_job_says_where_its_time_went(rig: Rig) -> None:
    async with caller(rig) as http:
        job_id = await submit_job(http, "[[counted]]")
        job = await ended(http, job_id)
    timing = job["timing"]
    parts_s = timing["queue_s"] + timing["prefill_s"]
    assert timing["first_token_s"] == pytest.approx(parts_s, abs=0.002)
    assert timing["hand_over_s"] is not None
    assert timing["first_token_s"] <= timing["total_s"]
    assert 0 < timing["tokens_per_s"] <= 110, "twenty tokens, ten milliseconds apart"
    assert [name.partition("@")[0] for name in timing["workers"]] == ["prefill-0", "decode-0"]
    assert (timing["attempts"], timing["cached_tokens"]) == (1, 0)


class Hook:
    """A server that is told of ends; answers with the statuses it was given, then with 200."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.calls: list[tuple[dict[str, str], bytes]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                status = outer.statuses.pop(0) if outer.statuses else 200
                outer.calls.append((dict(self.headers), data))
                self.send_response(status)
                self.send_header("Location", f"{outer.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    server = Hook()
    yield server
    server.close()


async def submit_hooked(http: httpx.AsyncClient, hook: Hook, prompt: str) -> str:
    webhook = {"url": f"{hook.url}/done?x=1", "secret": SECRET}
    return await submit_job(http, prompt, max_tokens=20, webhook=webhook)


async def test_the_end_of_a_job_is_told_once_and_signed(rig: Rig, hook: Hook) -> None:
    async with caller(rig) as http:
        job_id = await submit_hooked(http, hook, "[[counted]]")
        await asyncio.to_thread(wait_until, lambda: hook.calls, 60)
        await asyncio.to_thread(wait_until, lambda: not rig.redis.zcard("webhooks"), 30)
    ((headers, data),) = hook.calls
    event: Any = openai.OpenAI(api_key="x").webhooks.unwrap(data, headers, secret=SECRET)
    assert (event.type, event.data.id) == ("job.finished", job_id)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        openai.OpenAI(api_key="x").webhooks.unwrap(data + b" ", headers, secret=SECRET)
    assert "webhook" not in rig.request_fields(job_id), "the secret goes when it is done with"
    for secret in (SECRET, hook.url, *KEYS.values()):
        assert not any(secret in rig.log(part) for part in ("gateway", *rig.workers)), secret


async def test_a_hook_that_fails_is_tried_again_and_never_led_elsewhere(
    rig: Rig, hook: Hook
) -> None:
    hook.statuses = [302]
    async with caller(rig) as http:
        job_id = await submit_hooked(http, hook, "[[counted]]")
        await asyncio.to_thread(wait_until, lambda: len(hook.calls) == 2, 60)
    ids = {headers["webhook-id"] for headers, _ in hook.calls}
    assert ids == {f"evt_{job_id}"}, "the same event"
    assert rig.metric('pointsman_gateway_webhooks_total{result="failed"}') >= 1


async def test_an_end_that_no_gateway_saw_is_told_by_the_next(rig: Rig, hook: Hook) -> None:
    async with caller(rig) as http:
        job_id = await submit_hooked(http, hook, "[[endless]]")
    await asyncio.to_thread(rig.kill, "gateway")
    ended = lambda: rig.request_fields(job_id)["state"] == "finished"  # noqa: E731
    await asyncio.to_thread(wait_until, ended, 40)
    await asyncio.to_thread(rig.start_gateway)
    await asyncio.to_thread(wait_until, lambda: hook.calls, 40)
    assert b'"job.finished"' in hook.calls[0][1]


async def test_a_webhook_that_nobody_can_read_keeps_no_other_from_being_told(
    rig: Rig, hook: Hook
) -> None:
    rig.redis.hset("request:job-strange", mapping={"webhook": '{"url": 1}', "state": "finished"})
    rig.redis.zadd("webhooks", {"job-strange": 0})
    async with caller(rig) as http:
        job_id = await submit_hooked(http, hook, "[[counted]]")
        await asyncio.to_thread(wait_until, lambda: hook.calls, 60)
    assert f"evt_{job_id}" in hook.calls[0][1].decode()
    # Its lease is running, so it was taken up, before the other one.
    assert rig.redis.zscore("webhooks", "job-strange") > 0
    rig.redis.delete("request:job-strange")
    rig.redis.zrem("webhooks", "job-strange")


@pytest.mark.parametrize(
    ("webhook", "param"),
    [
        ("https://example.com", "webhook"),
        ({"url": "https://example.com"}, "webhook.secret"),
        ({"url": "https://example.com", "secret": "short"}, "webhook.secret"),
        ({"url": "nowhere", "secret": SECRET}, "webhook.url"),
        ({"url": 5, "secret": SECRET}, "webhook.url"),
        ({"url": "https://example.com", "secret": SECRET, "more": 1}, "webhook.more"),
    ],
)
async def test_a_webhook_that_cannot_work_is_refused_at_once(
    rig: Rig, webhook: object, param: str
) -> None:
    async with caller(rig) as http:
        answer = await http.post("/v1/jobs", json=body("x", webhook=webhook))
    assert_error(answer, 400, param=param)
