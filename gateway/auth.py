"""API keys name tenants."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from gateway.http_errors import KeyRefused
from pipeline.intake.build import Caller

DEFAULT_TENANT = "default"
_FIELDS_PER_LINE = 2
_SALT_TAG = b"pointsman.tenant\0"


class KeysFileBroken(Exception):
    """A line of the keys file is not `tenant sha256hex(key)`."""

    def __init__(self, path: Path, line_number: int) -> None:
        super().__init__(path, line_number)
        self.path = path
        self.line_number = line_number

    def __str__(self) -> str:
        return f"{self.path}, line {self.line_number}: expected `tenant sha256hex(key)`"


class KeyRing:
    """Who may call. Without keys everybody is the tenant `default`, whatever key they send.

    Keys are kept as SHA-256 digests only. Every look-up compares with every digest in constant time.
    """

    def __init__(self, digests: Sequence[tuple[str, bytes]] | None = None) -> None:
        """`digests`: (tenant, sha256 of a key) pairs; a tenant may have several keys."""
        self._digests = digests

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """From a keys file; empty lines and lines that begin with # do not count.

        Raises:
            KeysFileBroken: a line is malformed.
            OSError: the file cannot be read.
        """
        if path is None:
            return cls()
        digests: list[tuple[str, bytes]] = []
        for line_number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            digest = _digest(fields[1]) if len(fields) == _FIELDS_PER_LINE else b""
            if len(digest) != hashlib.sha256().digest_size:
                raise KeysFileBroken(path, line_number)
            digests.append((fields[0], digest))
        return cls(digests)

    def caller(self, authorization: str | None) -> Caller:
        """Whose request this is, by its Authorization header.

        Raises:
            KeyRefused: keys are needed, and this one is missing or unknown.
        """
        if self._digests is None:
            return Caller(DEFAULT_TENANT, tenant_salt(DEFAULT_TENANT))
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: str | None = None
        for tenant, known in self._digests:
            if hmac.compare_digest(digest, known):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            raise KeyRefused
        return Caller(found, tenant_salt(found))


def tenant_salt(tenant: str) -> str:
    """What keeps a tenant's KV blocks apart from all others'."""
    return hashlib.sha256(_SALT_TAG + tenant.encode()).hexdigest()


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
