"""What keeps a tenant's KV blocks apart from all others'."""

from __future__ import annotations

import hashlib

DEFAULT_TENANT = "default"  # of callers without a key
_SALT_TAG = b"pointsman.tenant\0"


def tenant_salt(tenant: str) -> str:
    """The salt in every block key of a tenant; it comes from the API key, never from a body."""
    return hashlib.sha256(_SALT_TAG + tenant.encode()).hexdigest()
