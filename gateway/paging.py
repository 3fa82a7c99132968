"""Query parameters of list routes."""

from __future__ import annotations

from fastapi import Request

from pipeline.batch.records import PageQuery
from pipeline.intake.errors import InvalidField


def page_query(request: Request, default_limit: int, max_limit: int) -> PageQuery:
    """`limit`, `after` and `order`.

    Raises:
        InvalidField: one of them makes no sense.
    """
    given = request.query_params
    text = given.get("limit") or str(default_limit)
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(max_limit))
    if not is_number or not 1 <= int(text) <= max_limit:
        raise InvalidField("limit", f"limit must be an integer from 1 to {max_limit}.")
    order = given.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidField("order", "order must be asc or desc.")
    return PageQuery(int(text), given.get("after") or None, ascending=order == "asc")
