"""Webhooks reach the open internet and nothing behind the gateway."""

from __future__ import annotations

import httpx
import pytest

from gateway.webhook_target import TargetRefused, WebhookTarget, check_url, is_open, resolve
from pipeline.intake.errors import InvalidField


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "0.0.0.0",  # noqa: S104
        "100.64.0.1", "224.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0",
        "fc00::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "2002:7f00:1::",
        "64:ff9b::a00:1",
    ],
)  # fmt: skip
def test_an_address_that_is_not_of_the_open_internet_is_closed(address: str) -> None:
    assert not is_open(address)


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "2606:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
)
def test_an_address_of_the_open_internet_is_open(address: str) -> None:
    assert is_open(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/x", "ftp://example.com", "https://", "example.com", "",
        "https://user:pass@example.com", "https://127.0.0.1/x", "https://[::1]:8443/",
        "https://example.com/" + "x" * 2048,
    ],
)  # fmt: skip
def test_a_url_that_will_never_do_is_refused_at_once(url: str) -> None:
    with pytest.raises(InvalidField) as refused:
        check_url(url, allows_private=False)
    assert refused.value.param == "webhook.url"


async def test_a_name_that_leads_inside_is_refused_when_it_is_looked_up() -> None:
    url = check_url("https://localhost/x", allows_private=False)
    with pytest.raises(TargetRefused):
        await resolve(url, allows_private=False)
    unknown = check_url("https://no-such-host.invalid/", allows_private=False)
    with pytest.raises(TargetRefused):
        await resolve(unknown, allows_private=False)


async def test_the_request_goes_to_the_address_that_was_checked() -> None:
    target = WebhookTarget(httpx.URL("https://hooks.example.com:8443/a?b=c"), "203.0.113.7")
    async with httpx.AsyncClient() as client:
        request = target.request(client, {"x": "y"}, b"{}")
    assert request.url == "https://203.0.113.7:8443/a?b=c"
    assert request.headers["host"] == "hooks.example.com:8443"
    assert request.extensions["sni_hostname"] == "hooks.example.com"
