"""Keys and tenants."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway.auth import ApiKey, KeyRing, KeysFileBroken
from gateway.http_errors import KeyRefused
from pipeline.protocol.tenant import tenant_salt


def ring(**keys: str) -> KeyRing:
    return KeyRing(
        ApiKey(tenant, hashlib.sha256(key.encode()).digest()) for tenant, key in keys.items()
    )


def test_a_key_names_its_tenant_and_no_other() -> None:
    keys = ring(t1="sk-one", t2="sk-two")
    assert keys.caller("Bearer sk-one").tenant == "t1"
    assert keys.caller("bearer  sk-two").tenant == "t2"
    with pytest.raises(KeyRefused):
        keys.caller("Bearer sk-three")


def test_tenants_have_different_salts() -> None:
    keys = ring(t1="a", t2="b")
    salts = {keys.caller(f"Bearer {key}").tenant_salt for key in "ab"}
    assert salts == {tenant_salt("t1"), tenant_salt("t2")}
    assert len(salts) == 2


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert KeyRing().caller(None) == KeyRing().caller("Bearer anything")


def test_an_empty_ring_lets_nobody_in() -> None:
    with pytest.raises(KeyRefused):
        KeyRing([]).caller("Bearer ")


@pytest.mark.parametrize(
    "line",
    [
        "t1",
        "t1 abc",
        f"t1 {'0' * 64} requests=5",
        f"t1 {'0' * 64} tokens=1/1s tokens=2/1s",
        "t1 sk-plain-key",
        f"t1 {'0' * 62}",
        "a b c",
    ],
)
def test_a_malformed_line_of_the_keys_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# comment\n{line}\n")
    with pytest.raises(KeysFileBroken, match="line 2") as caught:
        KeyRing.load(path)
    assert "sk-plain-key" not in str(caught.value)


def test_a_key_may_have_limits_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-one").hexdigest()
    path.write_text(f"t1 {digest} tokens=1000/60s requests=5/10s\n")

    limits = KeyRing.load(path).find("Bearer sk-one").limits

    assert limits.requests is not None
    assert limits.tokens is not None
    assert (limits.requests.amount, limits.requests.get_expiry()) == (5, 10)
    assert (limits.tokens.amount, limits.tokens.get_expiry()) == (1000, 60)
