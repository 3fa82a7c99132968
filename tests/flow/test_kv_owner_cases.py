"""Whose KV blocks they are: no reuse over tenants, no tenant's flood at another's cost, no trace."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import ask_as, cached, client, complete, keys_file, text_of, tokens
from tiering.kvd.client import KvdClient

DIGEST_BLOCK_BYTES = 512
SLOT_BYTES = 4096  # a block of 512 bytes, rounded up to a page


def num_slots(rig: Rig) -> int:
    """Slots of the node's tiers that hold anything."""
    observer = KvdClient(rig.kvd_socket, DIGEST_BLOCK_BYTES, "observer")
    observer.connect()
    tiers = observer.stats().tiers.values()
    observer.close()
    return sum(num for t in tiers for state, num in t.slots_by_state.items() if state != "free")


@pytest.fixture(scope="module")
def shared(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    """Two tenants, HBM prefix cache on; a tenant's share is half of 64 slots, and no disk."""
    return make_rig(
        env={
            "POINTSMAN_GATEWAY_KEYS_FILE": str(
                keys_file(tmp_path_factory.mktemp("keys"), "t1", "t2")
            ),
            "POINTSMAN_WORKER_NUM_BLOCKS": "32",
            "POINTSMAN_KVD_DRAM_BYTES": str(64 * SLOT_BYTES),
            "POINTSMAN_KVD_NVME_BYTES": "0",
            "POINTSMAN_KVD_TENANT_SHARE": "0.5",
        }
    )


async def test_c111_no_reuse_over_tenants(shared: Rig) -> None:
    prompt = tokens(1, 160)
    first = await ask_as(shared, "t1", prompt)
    second = await ask_as(shared, "t1", prompt)
    other = await ask_as(shared, "t2", prompt)
    again = await ask_as(shared, "t2", prompt)

    assert [cached(answer) for answer in (first, second, other, again)] == [0, 144, 0, 144]
    texts = {answer["choices"][0]["text"] for answer in (first, second, other, again)}
    assert len(texts) == 1


async def test_a_tenants_flood_evicts_its_own_blocks_first(shared: Rig) -> None:
    kept = [tokens(20 + number, 160) for number in range(2)]
    for prompt in kept:
        await ask_as(shared, "t2", prompt)
    for number in range(20):
        await ask_as(shared, "t1", tokens(30 + number, 160))

    assert [cached(await ask_as(shared, "t2", prompt)) for prompt in kept] == [144, 144]


async def test_a_request_with_cache_false_reads_nothing_and_leaves_nothing(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig()
    known, fresh = tokens(2, 100), tokens(3, 100)
    async with client(rig) as http:
        expected = await text_of(http, known, max_tokens=12)
        assert cached(await complete(http, known, max_tokens=12)) == 96
        rig.wait_at_rest()
        before = num_slots(rig)
        assert before > 0

        private = [await complete(http, known, max_tokens=12, cache=False) for _ in range(2)]
        private += [await complete(http, fresh, max_tokens=12, cache=False) for _ in range(2)]
        rig.wait_at_rest()

        assert [cached(answer) for answer in private] == [0] * 4
        assert [answer["choices"][0]["text"] for answer in private[:2]] == [expected] * 2
        # The transient blocks of the hand-over are dropped when the decode worker has them.
        wait_until(lambda: num_slots(rig) == before, 5, "nothing was added to the tiers")
        public = await complete(http, fresh, max_tokens=12)
        assert cached(public) == 0, "no tier had it, HBM neither"
        assert public["choices"][0]["text"] == private[2]["choices"][0]["text"]
        refused = await http.post(
            "/v1/completions", json={"model": "m", "prompt": "x", "cache": "no"}
        )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache")
