"""What a change in the ledger asks to be sent, one small message per released request, and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pipeline.protocol.request import Priority

# kombu's name for the list of one priority of a queue; 0 has the bare name.
_PRIORITY_SEPARATOR = "\x06\x16"


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


def broker_lists(queue: str) -> list[str]:
    """The Redis lists that hold a queue's messages, one per priority."""
    return [
        queue if priority == 0 else f"{queue}{_PRIORITY_SEPARATOR}{int(priority)}"
        for priority in Priority
    ]
