"""POST /v1/batches: what is taken, and which field is named when not."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.batch.batch_body import parse_order
from pipeline.intake.errors import RequestRefused

GOOD = {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}


def test_the_whole_order_is_read_and_null_is_absent() -> None:
    lifetime = {"anchor": "created_at", "seconds": 3600}
    order = parse_order({**GOOD, "metadata": {"a": "b"}, "output_expires_after": lifetime})
    assert (order.input_file_id, order.endpoint) == ("file-1", "/v1/completions")
    assert (order.metadata, order.output_lifetime_s) == ({"a": "b"}, 3600)
    plain = parse_order({**GOOD, "metadata": None, "output_expires_after": None})
    assert (plain.metadata, plain.output_lifetime_s) == (None, None)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 1}, "input_file_id"),
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "48h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at"}}, "output_expires_after.seconds"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 3599}},
            "output_expires_after.seconds",
        ),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_what_makes_no_sense_is_400_and_named(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_order({**GOOD, **change})
    assert (refused.value.status, refused.value.param) == (400, param)
