"""A context of four HBM pools through real processes, and the kill of a worker in its middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.flow.rig import Rig
from tests.flow.talk import Transcript, client, complete, stream, text_of, tokens
from tiering.kvd.client import KvdClient
from workers.models.digest import DigestRunner

POOL_BLOCKS = 8  # of 16 tokens: a fourth of what the digest engine's context holds
PROMPT = tokens(1, 300)
MAX_TOKENS = 200


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(
        env={
            "POINTSMAN_WORKER_NUM_BLOCKS": str(POOL_BLOCKS),
            "POINTSMAN_WORKER_STEP_DELAY_MS": "10",
        }
    )


@pytest.fixture(scope="module")
def expected(make_rig: Callable[..., Rig]) -> str:
    """The answer of one worker whose pool holds all."""
    alone = make_rig(workers={"both-0": "both"}, has_kvd=False)

    async def ask() -> str:
        async with client(alone) as http:
            return await text_of(http, PROMPT, max_tokens=MAX_TOKENS)

    text = asyncio.run(ask())
    alone.close()
    return text


def num_leases(rig: Rig) -> int:
    observer = KvdClient(rig.kvd_socket, DigestRunner().spec.layout.block_bytes, "observer")
    observer.connect()
    found = observer.stats().num_leases
    observer.close()
    return found


@pytest.mark.parametrize("fields", [{}, {"cache": False}], ids=["shared", "private"])
async def test_it_is_served_whole_and_handed_over(
    rig: Rig, expected: str, fields: dict[str, bool]
) -> None:
    async with client(rig) as http:
        answers = await asyncio.gather(
            text_of(http, PROMPT, max_tokens=MAX_TOKENS, **fields),
            complete(http, tokens(2, 40), max_tokens=20),
        )
    assert answers[0] == expected
    rig.wait_at_rest()
    assert num_leases(rig) == 0
    assert all(beat["num_blocks"] == POOL_BLOCKS for beat in rig.beats().values())


@pytest.mark.parametrize("part", ["decode-0", "kvd"])
async def test_a_kill_in_its_middle_costs_a_pause_and_no_token(
    rig: Rig, expected: str, part: str
) -> None:
    transcript = Transcript()
    async with client(rig) as http:
        running = asyncio.create_task(stream(http, PROMPT, transcript, max_tokens=MAX_TOKENS))
        await asyncio.wait_for(transcript.got_text.wait(), 60)
        assert len(transcript.text) < MAX_TOKENS / 2
        rig.kill(part)
        if part == "kvd":
            rig.start_kvd()
        else:
            rig.start_worker(part, "decode")
        await asyncio.wait_for(running, 90)
    assert transcript.error is None
    assert transcript.text == expected
    rig.wait_at_rest()
    assert num_leases(rig) == 0
