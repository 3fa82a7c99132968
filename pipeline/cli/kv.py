"""What `pointsman kv stats|ls|purge` ask of a cache daemon and show."""

from __future__ import annotations

from itertools import islice

import orjson
from rich.console import Group, RenderableType
from rich.text import Text

from pipeline.cli.tier_table import (
    NOTHING,
    peer_table,
    plain_table,
    shown_bytes,
    tier_table,
)
from pipeline.protocol.tenant import tenant_salt
from pipeline.scheduling.node_report import NodeReport
from tiering.block_hash import owner_tag
from tiering.kvd.operator import KvdOperator
from tiering.tier import Tier

_SHOWN_KEY_CHARS = 32


def owner_of(tenant: str) -> bytes:
    """The tag under which kvd keeps a tenant's blocks."""
    return owner_tag(tenant_salt(tenant).encode())


def stats_json(operator: KvdOperator) -> str:
    """Every counter, for a program."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    return orjson.dumps(operator.stats().to_map(), option=options).decode()


def stats_screen(operator: KvdOperator) -> RenderableType:
    """The daemon in one line and its tiers in a table."""
    stats = operator.stats()
    head = Text(
        f"blocks of {shown_bytes(stats.block_bytes)}  holders {stats.num_holders}  "
        f"leases {stats.num_leases}  reservations {stats.num_reservations}  "
        f"commits refused {stats.num_commits_refused}"
    )
    tiers = tier_table([NodeReport(node="this", kvd=stats)])
    return Group(head, tiers, peer_table(stats))


def list_screen(
    operator: KvdOperator, tier: Tier, tenant: str | None, limit: int
) -> RenderableType:
    """The first blocks of a tier, and whether there are more."""
    found = list(islice(operator.listed(tier, owner_of(tenant) if tenant else b""), limit + 1))
    table = plain_table(f"{tier} blocks", "key", "tokens", "bytes", "leases", "uses", "owner")
    for block in found[:limit]:
        table.add_row(
            block.key.hex()[:_SHOWN_KEY_CHARS],
            str(block.num_tokens),
            str(block.num_bytes),
            str(block.num_leases),
            str(block.num_uses),
            block.owner.hex() or NOTHING,
        )
    more = [Text(f"more than {limit}; see --limit")] if len(found) > limit else []
    return Group(table, *more)


def purge(operator: KvdOperator, tenant: str) -> int:
    """Drop a tenant's blocks; how many."""
    return operator.purge(owner_of(tenant))
