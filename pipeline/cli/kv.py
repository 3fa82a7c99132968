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
    stats_table,
)
from pipeline.protocol.tenant import DEFAULT_TENANT, tenant_salt
from tiering.block_hash import owner_tag
from tiering.kvd.operator import KvdOperator
from tiering.tier import Tier

_SHOWN_KEY_CHARS = 16


def owner_of(tenant: str) -> bytes:
    """The tag under which kvd keeps a tenant's blocks."""
    return owner_tag(tenant_salt(tenant).encode())


def stats_json(operator: KvdOperator) -> str:
    """Every counter, for a program."""
    options = orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS
    return orjson.dumps(operator.stats().to_map(), option=options).decode()


def stats_screen(operator: KvdOperator) -> RenderableType:
    """The daemon in two lines, its tiers in a table, and what it has to do with other nodes."""
    stats = operator.stats()
    held = f"{stats.num_leases} leases, {stats.num_reservations} blocks being written"
    late = f"{stats.num_commits_refused} written too late"
    head = f"{stats.num_holders} connections of workers, {held}, {late}\n"
    blocks = f"blocks of {shown_bytes(stats.block_bytes)}" if stats.block_bytes else "no blocks yet"
    lending = stats.lending
    lent = f"{lending.num_blocks} blocks, {shown_bytes(lending.num_bytes)} so far"
    lends = f"lends at {lending.address}: {lent}" if lending.address else "lends to no other node"
    parts: list[RenderableType] = [Text(f"{head}{blocks}, {lends}\n"), stats_table(stats)]
    if stats.peers:
        parts += [Text(), peer_table(stats)]
    return Group(*parts)


def list_screen(
    operator: KvdOperator, tier: Tier, tenant: str | None, limit: int
) -> RenderableType:
    """The first blocks of a tier, and whether there are more."""
    found = list(islice(operator.listed(tier, owner_of(tenant) if tenant else b""), limit + 1))
    whose = f" of {tenant}" if tenant else ""
    if not found:
        return Text(f"no blocks{whose} in {tier}")
    named = {owner_of(name): name for name in (DEFAULT_TENANT, tenant) if name}
    columns = ("key begins", "tokens", "bytes", "leases", "uses", "owner")
    table = plain_table(f"{tier} blocks{whose}, oldest first", *columns)
    for block in found[:limit]:
        table.add_row(
            block.key.hex()[:_SHOWN_KEY_CHARS],
            str(block.num_tokens),
            str(block.num_bytes),
            str(block.num_leases),
            str(block.num_uses),
            named.get(block.owner) or block.owner.hex() or NOTHING,
        )
    parts: list[RenderableType] = [table]
    if any(block.owner and block.owner not in named for block in found[:limit]):
        parts.append(Text("an owner is a hash of a tenant's name; --tenant NAME shows its blocks"))
    if len(found) > limit:
        parts.append(Text(f"more than {limit}; see --limit"))
    return Group(*parts)


def purge(operator: KvdOperator, tenant: str) -> int:
    """Drop a tenant's blocks; how many."""
    return operator.purge(owner_of(tenant))
