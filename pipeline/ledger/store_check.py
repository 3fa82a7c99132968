"""What a Redis must be like before anything is entrusted to it."""

from __future__ import annotations

from typing import Any

import structlog

from pipeline.errors import StoreLossy, StoreUnavailable
from pipeline.ledger.store import connect, store_errors

log = structlog.get_logger(__name__)

NEEDED_POLICY = "noeviction"


def refuse_lossy_store(url: str) -> None:
    """Look at a Redis that is there; one that is away is left to whoever needs it first.

    Reads INFO, which an ACL user may be given, not CONFIG, which it should not.

    Raises:
        StoreLossy: when its memory is full it would drop requests instead of refusing them.
    """
    client: Any = connect(url)
    try:
        with store_errors():
            memory, persistence = client.info("memory"), client.info("persistence")
    except StoreUnavailable as error:
        log.warning("store_not_checked", error=str(error))
        return
    finally:
        client.close()
    policy = str(memory.get("maxmemory_policy", NEEDED_POLICY))
    if policy != NEEDED_POLICY:
        raise StoreLossy(policy)
    if not persistence.get("aof_enabled"):
        log.warning(
            "store_not_persistent",
            remedy="appendonly yes; without it a restart of Redis loses what waits and runs",
        )
