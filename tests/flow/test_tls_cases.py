"""TLS to Redis and to the gateway, with certificates that the test made."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from urllib.parse import quote, urlsplit

import httpx
import pytest
import redis

from pipeline.cli.embedded_redis import EmbeddedRedis
from pipeline.errors import StoreUnavailable
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from tests.flow.rig import Rig
from tests.flow.talk import body, client, complete, stream
from tests.flow.tls import Certificates, TlsFront


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls") / "made")


@pytest.fixture(scope="module")
def front(
    certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TlsFront, str]]:
    """TLS before a Redis with a password, and its URL without any parameter."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("behind-tls"))
    server.start()
    parts = urlsplit(server.url)
    assert parts.port is not None
    with TlsFront(certificates, parts.port) as tls:
        yield tls, f"rediss://:{parts.password}@127.0.0.1:{tls.port}/0"
    server.stop()


def verified(url: str, certificates: Certificates) -> str:
    return f"{url}?ssl_cert_reqs=required&ssl_ca_certs={quote(str(certificates.authority))}"


async def test_a_pipeline_runs_over_tls_to_redis(
    front: tuple[TlsFront, str], certificates: Certificates, make_rig: Callable[..., Rig]
) -> None:
    tls, url = front
    before = tls.num_taken
    rig = make_rig(env={"POINTSMAN_REDIS_URL": verified(url, certificates)})
    async with client(rig) as http:
        whole = await complete(http, "over TLS", max_tokens=20)
        streamed = await stream(http, "over TLS", max_tokens=20)
    assert streamed.text == whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 20
    assert tls.num_taken > before
    assert rig.redis.dbsize() == 0, "nothing went past the front"


def test_a_certificate_that_nobody_vouches_for_is_refused(front: tuple[TlsFront, str]) -> None:
    _, url = front
    with connect(f"{url}?ssl_cert_reqs=required") as stranger, pytest.raises(StoreUnavailable):
        LedgerOverview(stranger).beats()
    with pytest.raises(redis.ConnectionError), redis.Redis.from_url(url.replace("ss:", "s:")) as r:
        r.ping()


def test_a_gateway_with_a_certificate_speaks_https(
    certificates: Certificates, make_rig: Callable[..., Rig]
) -> None:
    context = ssl.create_default_context(cafile=str(certificates.authority))
    rig = make_rig(
        env={
            "POINTSMAN_GATEWAY_TLS_CERT_FILE": str(certificates.chain),
            "POINTSMAN_GATEWAY_TLS_KEY_FILE": str(certificates.key),
        },
        workers={"both-0": "both"},
        has_kvd=False,
        tls=context,
    )
    with httpx.Client(base_url=rig.base_url, verify=context) as http:
        answer = http.post("/v1/completions", json=body("x", max_tokens=20), timeout=30)
        asked = body("x", max_tokens=20, stream=True)
        with http.stream("POST", "/v1/completions", json=asked) as events:
            lines = [line for line in events.iter_lines() if line]
    assert answer.json()["usage"]["completion_tokens"] == 20
    assert lines[-1] == "data: [DONE]"
    for stranger in (rig.base_url, rig.base_url.replace("https", "http")):
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{stranger}/livez", timeout=5)
