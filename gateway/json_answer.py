"""An answer of one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi.responses import Response


def json_answer(value: Mapping[str, Any], status: int = 200) -> Response:
    """The object as it goes out."""
    return Response(orjson.dumps(value), status, media_type="application/json")
