"""Keys and tenants."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from gateway.auth import ApiKey, KeyRing, KeysFileBroken
from gateway.http_errors import KeyRefused
from gateway.key_rights import KeyRights, Right
from pipeline.protocol.tenant import tenant_salt


def ring(**keys: str) -> KeyRing:
    return KeyRing(
        ApiKey(tenant, hashlib.sha256(key.encode()).digest()) for tenant, key in keys.items()
    )


def test_a_key_names_its_tenant_and_no_other() -> None:
    keys = ring(t1="sk-one", t2="sk-two")
    assert keys.find("Bearer sk-one").caller.tenant == "t1"
    assert keys.find("bearer  sk-two").caller.tenant == "t2"
    with pytest.raises(KeyRefused):
        keys.find("Bearer sk-three")


def test_tenants_have_different_salts() -> None:
    keys = ring(t1="a", t2="b")
    salts = {keys.find(f"Bearer {key}").caller.tenant_salt for key in "ab"}
    assert salts == {tenant_salt("t1"), tenant_salt("t2")}
    assert len(salts) == 2


def test_without_keys_everybody_is_the_default_tenant() -> None:
    assert KeyRing().find(None).caller == KeyRing().find("Bearer anything").caller


def test_an_empty_ring_lets_nobody_in() -> None:
    with pytest.raises(KeyRefused):
        KeyRing([]).find("Bearer ")


@pytest.mark.parametrize(
    "line",
    [
        "t1",
        "t1 abc",
        f"t1 {'0' * 64} requests=5",
        f"t1 {'0' * 64} tokens=1/1s tokens=2/1s",
        f"t1 {'0' * 64} right=batch",
        f"t1 {'0' * 64} rights=cancel",
        f"t1 {'0' * 64} rights=",
        f"t1 {'0' * 64} rights=none,batch",
        f"t1 {'0' * 64} rights=batch rights=admin",
        f"t1 {'0' * 64} models=",
        f"t1 {'0' * 64} models=a,",
        f"t1 {'0' * 64} models=a models=b",
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


def test_a_keys_file_that_is_no_text_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"# comment\n\xff\xfe")
    with pytest.raises(KeysFileBroken, match="line 2"):
        KeyRing.load(path)


def test_a_key_may_have_limits_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-one").hexdigest()
    path.write_text(f"t1 {digest} tokens=1000/60s requests=5/10s\n")

    limits = KeyRing.load(path).find("Bearer sk-one").limits

    assert limits.requests is not None
    assert limits.tokens is not None
    assert (limits.requests.amount, limits.requests.get_expiry()) == (5, 10)
    assert (limits.tokens.amount, limits.tokens.get_expiry()) == (1000, 60)


@pytest.mark.parametrize(
    ("fields", "models", "rights"),
    [
        ("", None, {Right.BATCH}),
        ("tokens=1000/60s", None, {Right.BATCH}),
        ("models=a,org/b:v1 requests=5/10s", {"a", "org/b:v1"}, {Right.BATCH}),
        ("rights=none", None, set()),
        ("rights=admin models=a", {"a"}, {Right.ADMIN}),
        ("rights=batch,admin", None, {Right.BATCH, Right.ADMIN}),
        ("rights=metrics", None, {Right.METRICS}),
    ],
)
def test_a_key_may_do_what_its_line_says(
    tmp_path: Path, fields: str, models: set[str] | None, rights: set[Right]
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"t1 {hashlib.sha256(b'sk-one').hexdigest()} {fields}\n")
    keys = KeyRing.load(path)

    found = keys.find("Bearer sk-one").may

    names = None if models is None else frozenset(models)
    assert found == KeyRights(names, frozenset(rights))
    assert keys.find("Bearer sk-one").caller.models == names
