"""A request's hash as its status."""

from __future__ import annotations

import pytest

from pipeline.ledger.status import read_cache_use
from pipeline.protocol.cache_use import CacheUse, LoadReason


def test_what_was_kept_of_the_cache_is_read_again() -> None:
    use = CacheUse(nvme_tokens=16, load=LoadReason.FASTER)
    assert read_cache_use(use.model_dump_json()) == use


@pytest.mark.parametrize("value", ["", "{", '{"load": "a reason of another build"}'])
def test_what_another_build_kept_of_the_cache_is_passed_over(value: str) -> None:
    assert read_cache_use(value) is None
