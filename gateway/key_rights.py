"""What an API key may do: which models it may ask, and whether it may order batches or look after them all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

_NONE = "none"


class Right(StrEnum):
    """BATCH: upload files, order batches, send requests of the priority `batch`.

    ADMIN: read and cancel jobs and batches of all tenants, by their ids. METRICS: read `/metrics`.
    """

    BATCH = "batch"
    ADMIN = "admin"
    METRICS = "metrics"


@dataclass(frozen=True, slots=True)
class KeyRights:
    """`models` are the names, aliases included, that the key may say; None: all."""

    models: frozenset[str] | None = None
    rights: frozenset[Right] = frozenset({Right.BATCH})

    @classmethod
    def parse(cls, fields: dict[str, str]) -> Self:
        """From `models` (`a,b`) and `rights` (`batch,admin`, or `none`), where they are given.

        Raises:
            ValueError: a name is empty, or no right is called so.
        """
        models, rights = fields.get("models"), fields.get("rights", Right.BATCH)
        names = None if models is None else frozenset(models.split(","))
        if names is not None and "" in names:
            raise ValueError("a model without a name")
        words = [] if rights == _NONE else rights.split(",")
        return cls(names, frozenset(Right(word) for word in words))


USUAL_RIGHTS = KeyRights()
