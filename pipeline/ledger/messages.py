"""What a change in the ledger asks to be sent: one small message per released request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class QueueMessage(NamedTuple):
    """A released request: its message belongs in `queue` at `priority`.

    The priority may be above the request's own if it has waited long.
    """

    request_id: str
    queue: str
    priority: int


def decode_messages(flat: Sequence[bytes]) -> list[QueueMessage]:
    """Read (id, queue, priority, ...) as the scripts return them."""
    names = [item.decode() for item in flat]
    return [
        QueueMessage(names[rank], names[rank + 1], int(names[rank + 2]))
        for rank in range(0, len(names), 3)
    ]
