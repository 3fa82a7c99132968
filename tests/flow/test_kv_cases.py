"""KV blocks through a whole pipeline: reuse is exact, counted truthfully, and never over tenants."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import (
    ask_as,
    body,
    cached,
    client,
    complete,
    keys_file,
    stream,
    text_of,
    tokens,
)

BLOCK = 16
NO_HBM_CACHE = {"POINTSMAN_WORKER_PREFIX_CACHE": "false"}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    workers = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}
    return make_rig(workers=workers)


@pytest.fixture(scope="module")
def reference(make_rig: Callable[..., Rig]) -> Rig:
    """One worker alone, no cache daemon, nothing kept in HBM: what a request answers by itself."""
    return make_rig(workers={"both-0": "both"}, has_kvd=False, env=NO_HBM_CACHE)


async def test_64_streams_over_three_workers_equal_the_lone_run(rig: Rig, reference: Rig) -> None:
    prompts = [tokens(1000 + n, 20 + 5 * n) for n in range(64)]
    async with client(reference) as alone:
        expected = [await text_of(alone, prompt, max_tokens=40) for prompt in prompts]
    async with client(rig) as http:
        got = await asyncio.gather(*(stream(http, prompt, max_tokens=40) for prompt in prompts))

    assert [transcript.text for transcript in got] == expected
    assert all(transcript.is_done and transcript.error is None for transcript in got)
    rig.wait_at_rest()

    def num_decoders() -> int:
        return sum(beat["num_decode_tokens"] > 0 for beat in rig.beats().values())

    wait_until(lambda: num_decoders() == 2, 5, "both decode workers had a share")
    for key in rig.redis.scan_iter("running:*"):
        assert rig.redis.scard(key) == 0


async def test_c108_same_prefix_different_tail(rig: Rig, reference: Rig) -> None:
    shared = tokens(1, 48)
    p1, p2 = shared + tokens(2, 20), shared + tokens(3, 20)
    async with client(reference) as alone:
        expected = [await text_of(alone, p, max_tokens=8) for p in (p1, p2)]
    async with client(rig) as http:
        first = await complete(http, p1, max_tokens=8)
        second = await complete(http, p2, max_tokens=8)
        assert (cached(first), cached(second)) == (0, 48)
        for _ in range(10):
            answers = await asyncio.gather(
                *(complete(http, p, max_tokens=8) for p in (p1, p2, p1, p2))
            )
            assert [a["choices"][0]["text"] for a in answers] == expected * 2
            assert [cached(a) for a in answers] == [64] * 4


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
async def test_c109_partial_block_at_the_end(rig: Rig, reference: Rig, length: int) -> None:
    prompt = tokens(100 + length, length)
    async with client(reference) as alone:
        expected = await text_of(alone, prompt, max_tokens=20)
    async with client(rig) as http:
        cold = await complete(http, prompt, max_tokens=20)
        warm = await complete(http, prompt, max_tokens=20)

    assert [a["choices"][0]["text"] for a in (cold, warm)] == [expected] * 2
    assert cached(cold) == 0
    assert cached(warm) == (length - 1) // BLOCK * BLOCK
    assert cached(warm) <= length - 1


async def test_a_cache_salt_shares_with_its_equals_only(rig: Rig) -> None:
    prompt = tokens(77, 100)
    async with client(rig) as http:
        counts = []
        for fields in ({}, {"cache_salt": "x"}, {"cache_salt": "x"}, {"cache_salt": "y"}, {}):
            counts.append(cached(await complete(http, prompt, max_tokens=2, **fields)))
            rig.wait_at_rest()
    assert counts == [0, 0, 96, 0, 96]


async def test_c124_cached_tokens_is_what_prefill_did_not_compute(rig: Rig) -> None:
    prompt = tokens(200, 100)

    def computed() -> int:
        return sum(
            beat["num_prefill_tokens"]
            for name, beat in rig.beats().items()
            if name.startswith("prefill")
        )

    async with client(rig) as http:
        rig.wait_at_rest()
        await asyncio.sleep(1.2)
        before = computed()
        cold = await complete(http, prompt, max_tokens=4)
        warm = await complete(http, prompt, max_tokens=4)
        half = await complete(http, prompt[:50] + tokens(201, 50), max_tokens=4)
        streamed = await stream(http, prompt, max_tokens=4, stream_options={"include_usage": True})
        usages = [a["usage"] for a in (cold, warm, half)] + [streamed.chunks[-1]["usage"]]
        assert [u["prompt_tokens"] for u in usages] == [100] * 4
        assert [u["prompt_tokens_details"]["cached_tokens"] for u in usages] == [0, 96, 48, 96]
        assert all(u["total_tokens"] == 104 for u in usages)
        expected = 100 + 4 + 52 + 4
        wait_until(lambda: computed() - before == expected, 5, "the prefill worker's own count")


async def test_c125_an_answer_of_one_token_never_reaches_decode(rig: Rig) -> None:
    async with client(rig) as http:
        await asyncio.sleep(1.2)
        before = {name: beat["num_decode_tokens"] for name, beat in rig.beats().items()}
        for number in range(100):
            if number % 2:
                answer = await complete(http, tokens(300 + number, 30), max_tokens=1)
                choice, usage = answer["choices"][0], answer["usage"]
                assert (choice["finish_reason"], usage["completion_tokens"]) == ("length", 1)
                assert len(choice["text"]) == 1
            else:
                got = await stream(http, tokens(300 + number, 30), max_tokens=1)
                assert (got.finish_reason, len(got.text)) == ("length", 1)
    rig.wait_at_rest()
    await asyncio.sleep(1.2)
    assert {name: beat["num_decode_tokens"] for name, beat in rig.beats().items()} == before


def varied_request(number: int, rng: random.Random) -> dict[str, Any]:
    prompt = tokens(5000 + number, rng.randint(1, 400))
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 24)}
    if number % 2:
        fields |= {"temperature": 1.0, "seed": number, "top_p": 0.9}
    if number % 5 == 0:
        fields["stop"] = [chr(rng.randint(32, 126)), "zz"]
    if number % 3 == 0:
        fields["logprobs"] = 3
    if number % 7 == 0:
        fields["n"] = 2
    return body(prompt, **fields)


async def test_c127_split_run_equals_single_run(rig: Rig, reference: Rig) -> None:
    rng = random.Random(7)  # noqa: S311
    requests = [varied_request(number, rng) for number in range(200)]

    async def run(http: httpx.AsyncClient) -> list[dict[str, Any]]:
        limit = asyncio.Semaphore(16)

        async def one(fields: dict[str, Any]) -> dict[str, Any]:
            async with limit:
                answer = await http.post("/v1/completions", json=fields)
                assert answer.status_code == 200, answer.text
                result: dict[str, Any] = answer.json()
                return result

        return list(await asyncio.gather(*(one(fields) for fields in requests)))

    async with client(reference) as alone, client(rig) as http:
        single, split = await asyncio.gather(run(alone), run(http))

    for one, other in zip(single, split, strict=True):
        assert_equal_answers(one, other)


def assert_equal_answers(one: dict[str, Any], other: dict[str, Any]) -> None:
    for a, b in zip(one["choices"], other["choices"], strict=True):
        assert (a["text"], a["finish_reason"]) == (b["text"], b["finish_reason"])
        if a["logprobs"] is not None:
            assert a["logprobs"]["tokens"] == b["logprobs"]["tokens"]
            assert a["logprobs"]["token_logprobs"] == pytest.approx(
                b["logprobs"]["token_logprobs"], abs=1e-3
            )
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert one["usage"][name] == other["usage"][name]


@pytest.fixture(scope="module")
def tenants(make_rig: Callable[..., Rig], tmp_path_factory: pytest.TempPathFactory) -> Rig:
    keys = keys_file(tmp_path_factory.mktemp("keys"), "t1", "t2")
    return make_rig(
        env={
            **NO_HBM_CACHE,
            "POINTSMAN_GATEWAY_KEYS_FILE": str(keys),
            # Room for 64 blocks of 512 bytes, rounded up to pages: the rest is pushed to NVMe.
            "POINTSMAN_KVD_DRAM_BYTES": str(64 * 4096),
        }
    )


async def test_c113_no_tier_serves_one_tenants_blocks_to_another(tenants: Rig) -> None:
    prompt = tokens(900, 160)
    first = await ask_as(tenants, "t1", prompt)
    assert cached(await ask_as(tenants, "t1", prompt)) == 144, "DRAM serves its owner"
    assert cached(await ask_as(tenants, "t2", prompt)) == 0

    for number in range(12):
        await ask_as(tenants, "t1", tokens(910 + number, 160))
    again = await ask_as(tenants, "t1", prompt)
    assert cached(again) == 144, "NVMe serves its owner"
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    fresh = tokens(950, 160)
    await ask_as(tenants, "t1", fresh)
    for number in range(12):
        await ask_as(tenants, "t1", tokens(960 + number, 160))
    assert cached(await ask_as(tenants, "t2", fresh)) == 0

    for name in ("prefill-0", "decode-0", "kvd"):
        assert tenants.terminate(name) == 0
    tenants.start_kvd()
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        tenants.start_worker(name, role)
        tenants.wait_for_worker(name)
    tenants.wait_ready()
    other = tokens(970, 160)
    assert cached(await ask_as(tenants, "t1", prompt)) == 144, "the tier survives a restart"
    await ask_as(tenants, "t1", other)
    assert cached(await ask_as(tenants, "t2", other)) == 0


async def test_without_a_key_nobody_is_served(tenants: Rig) -> None:
    async with client(tenants) as http:
        answer = await http.post("/v1/completions", json=body("x", max_tokens=1))
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def damage_flip(slab: Path) -> None:
    data = bytearray(slab.read_bytes())
    for position in range(0, len(data), 997):
        data[position] ^= 0x40
    slab.write_bytes(data)


def damage_truncate(slab: Path) -> None:
    with slab.open("r+b") as file:
        file.truncate(slab.stat().st_size // 2)


def damage_empty(slab: Path) -> None:
    with slab.open("r+b") as file:
        file.truncate(0)


def damage_delete(slab: Path) -> None:
    slab.unlink()


@pytest.mark.parametrize(
    "damage", [damage_flip, damage_truncate, damage_empty, damage_delete], ids=lambda d: d.__name__
)
async def test_c116_a_damaged_slab_costs_recomputation_and_no_wrong_token(
    make_rig: Callable[..., Rig], damage: Callable[[Path], None]
) -> None:
    rig = make_rig(env=NO_HBM_CACHE)
    prompts = [tokens(1200 + n, 100) for n in range(6)]
    async with client(rig) as http:
        expected = [await text_of(http, prompt, max_tokens=12) for prompt in prompts]
        assert rig.terminate("kvd") == 0
        damage(rig.folder / "kv.slab")
        rig.start_kvd()
        assert [await text_of(http, prompt, max_tokens=12) for prompt in prompts] == expected
        assert [await text_of(http, prompt, max_tokens=12) for prompt in prompts] == expected
    rig.wait_at_rest()
    rig.close()
