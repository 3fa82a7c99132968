"""API keys name tenants, and have limits and rights of their own."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gateway.http_errors import KeyRefused
from gateway.key_rights import USUAL_RIGHTS, KeyRights
from gateway.rate_limits import NO_LIMITS, KeyLimits
from pipeline.intake.build import Caller
from pipeline.protocol.tenant import DEFAULT_TENANT, tenant_salt

_MIN_FIELDS = 2
_RIGHTS_FIELDS = ("models", "rights")


class KeysFileBroken(Exception):
    """A line of the keys file is not `tenant sha256hex(key)` and fields that we know."""

    def __init__(self, path: Path, line_number: int) -> None:
        super().__init__(path, line_number)
        self.path = path
        self.line_number = line_number

    def __str__(self) -> str:
        return (
            f"{self.path}, line {self.line_number}: expected `tenant sha256hex(key)`, "
            "then `requests=5/10s` or `tokens=1000/60s` if there are limits, "
            "`models=a,b` if not all, `rights=batch,admin` (or `none`) if not `batch`"
        )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key of the file. `digest` is the SHA-256 of the key."""

    tenant: str
    digest: bytes
    limits: KeyLimits = NO_LIMITS
    may: KeyRights = USUAL_RIGHTS

    @property
    def key_id(self) -> str:
        """Names the key in Redis; says nothing about it."""
        return self.digest.hex()[:32]

    @property
    def caller(self) -> Caller:
        """Whose requests it sends."""
        return Caller(self.tenant, tenant_salt(self.tenant), models=self.may.models)


NOBODYS_KEY = ApiKey(DEFAULT_TENANT, b"")


class KeyRing:
    """Who may call. Without keys everybody is the tenant `default`, whatever key they send.

    Keys are kept as SHA-256 digests only. Every look-up compares with every digest in constant time.
    """

    def __init__(self, keys: Iterable[ApiKey] | None = None) -> None:
        """A tenant may have several keys; each has its own limits and rights."""
        self._keys = None if keys is None else tuple(keys)

    @classmethod
    def load(cls, path: Path | None) -> Self:
        """From a keys file; empty lines and lines that begin with # do not count.

        Raises:
            KeysFileBroken: a line is malformed.
            OSError: the file cannot be read.
        """
        if path is None:
            return cls()
        keys: list[ApiKey] = []
        for line_number, line in enumerate(_lines_of(path), start=1):
            fields = line.split()
            if not fields or fields[0].startswith("#"):
                continue
            digest = _digest(fields[1]) if len(fields) >= _MIN_FIELDS else b""
            try:
                limits, rights = _terms(fields[_MIN_FIELDS:])
            except ValueError as error:
                raise KeysFileBroken(path, line_number) from error
            if len(digest) != hashlib.sha256().digest_size:
                raise KeysFileBroken(path, line_number)
            keys.append(ApiKey(fields[0], digest, limits, rights))
        return cls(keys)

    @property
    def num_keys(self) -> int:
        """0 also without a file."""
        return len(self._keys or ())

    @property
    def is_open(self) -> bool:
        """Nobody needs a key."""
        return self._keys is None

    def find(self, authorization: str | None) -> ApiKey:
        """The key of an Authorization header.

        Raises:
            KeyRefused: keys are needed, and this one is missing or unknown.
        """
        if self._keys is None:
            return NOBODYS_KEY
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found: ApiKey | None = None
        for known in self._keys:
            if hmac.compare_digest(digest, known.digest):
                found = known
        if found is None or scheme.lower() != "bearer":
            raise KeyRefused
        return found


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise KeysFileBroken(path, error.object[: error.start].count(b"\n") + 1) from error


def _terms(fields: list[str]) -> tuple[KeyLimits, KeyRights]:
    """What stands behind a key. Raises `ValueError`: a field is unknown, malformed, or comes twice."""
    rules: list[str] = []
    rights: dict[str, str] = {}
    for field in fields:
        name, _, value = field.partition("=")
        if name not in _RIGHTS_FIELDS:
            rules.append(field)
        elif name in rights:
            raise ValueError(f"{name} twice")
        else:
            rights[name] = value
    return KeyLimits.parse(rules), KeyRights.parse(rights)


def _digest(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""
