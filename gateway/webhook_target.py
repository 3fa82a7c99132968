"""Where a webhook may go: a server on the open internet, over TLS, at the address that was checked."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

import httpx

from pipeline.intake.errors import InvalidField

MAX_URL_CHARS = 2048
_PARAM = "webhook.url"


class TargetRefused(Exception):
    """The name leads nowhere, or to an address that webhooks may not reach."""


@dataclass(frozen=True, slots=True)
class WebhookTarget:
    """One URL. `address` is the host's, already looked up, so that no later answer can change it."""

    url: httpx.URL
    address: str

    def request(
        self, client: httpx.AsyncClient, headers: dict[str, str], body: bytes
    ) -> httpx.Request:
        """The POST, to the checked address, under the host's own name."""
        return client.build_request(
            "POST",
            self.url.copy_with(host=self.address),
            headers={**headers, "Host": self.url.netloc.decode("ascii")},
            content=body,
            extensions={"sni_hostname": _ascii_host(self.url)},
        )


def check_url(text: str, *, allows_private: bool) -> httpx.URL:
    """A URL as a client names it, before anybody looks its host up.

    Raises:
        InvalidField: no absolute URL, credentials in it, not https, or plainly a private address.
    """
    try:
        url = httpx.URL(text) if len(text) <= MAX_URL_CHARS else httpx.URL()
    except httpx.InvalidURL:
        url = httpx.URL()
    schemes = ("https", "http") if allows_private else ("https",)
    if url.scheme not in schemes or not url.host or url.userinfo:
        message = f"{_PARAM} must be an {schemes[0]} URL without a user name."
        raise InvalidField(_PARAM, message)
    if not allows_private and _is_literal(url.host) and not is_open(url.host):
        raise InvalidField(_PARAM, f"{_PARAM} must not be a private address.")
    return url


async def resolve(url: httpx.URL, *, allows_private: bool) -> WebhookTarget:
    """Look the host up; a name that has one forbidden address among others is refused.

    Raises:
        TargetRefused: unknown, or forbidden.
    """
    loop = asyncio.get_running_loop()
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        found = await loop.getaddrinfo(_ascii_host(url), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TargetRefused("unknown host") from error
    addresses = [str(entry[4][0]) for entry in found]
    if not addresses or not (allows_private or all(map(is_open, addresses))):
        raise TargetRefused("private address")
    return WebhookTarget(url, addresses[0])


def is_open(address: str) -> bool:
    """True for an address of the open internet; an IPv4 address in IPv6 clothes is looked at itself."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour
        if inner is not None:
            return is_open(str(inner))
        if parsed in _NAT64:
            return is_open(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
    return parsed.is_global and not parsed.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def _ascii_host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii")


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
