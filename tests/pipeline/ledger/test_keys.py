"""Names that queues and keys of models get."""

from __future__ import annotations

import re

import pytest

from pipeline.ledger.keys import decode_queue, model_slug, prefill_queue, slug_of, unplaced_queue

NAMES = [
    "smollm2-135m-instruct",
    "org/m:v1",
    "org-m-v1",
    "qwen2.5 *?[~]\x06\x16",
    "m" * 200,
    "m" * 201,
    "é",
    "decode.a",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_slug_is_safe_in_names_of_queues_keys_and_patterns(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,50}", model_slug(name))


def test_a_plain_name_is_its_own_slug_and_no_two_names_share_one() -> None:
    assert model_slug("smollm2-135m-instruct") == "smollm2-135m-instruct"
    assert len({model_slug(name) for name in NAMES}) == len(NAMES)
    assert model_slug(model_slug("org/m:v1")) != model_slug("org/m:v1")


@pytest.mark.parametrize("name", NAMES)
def test_a_queue_tells_its_model(name: str) -> None:
    slug = model_slug(name)
    queues = (prefill_queue(slug), decode_queue(slug, "gpu-1.example.org"), unplaced_queue(slug))
    assert {slug_of(queue) for queue in queues} == {slug}


@pytest.mark.parametrize("queue", ["prefill", "decode.node-a", "unplaced", "celery"])
def test_a_queue_of_the_time_of_one_model_tells_none(queue: str) -> None:
    assert slug_of(queue) == ""
