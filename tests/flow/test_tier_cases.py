"""KV tiers under pressure, over restarts and over new weights: what is cached is right or not used."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers

from gateway.auth import tenant_salt
from pipeline.protocol.cache_use import CacheUse
from tests.flow.rig import Rig, wait_until
from tests.flow.talk import (
    JobReading,
    Transcript,
    cached,
    client,
    complete,
    events,
    stream,
    submit_job,
    text_of,
    tokens,
)
from tests.flow.talk import body as request_body
from tiering.block_hash import BlockHasher, namespace_root
from tiering.kvd.client import KvdClient
from tiering.kvd.stats import KvdStats
from workers.models.digest import DigestRunner

pytestmark = pytest.mark.timeout(300)  # several pipelines, one after the other

DIGEST_BLOCK_BYTES = 512
SLOT_BYTES = 4096  # a block of 512 bytes, rounded up to a page
NO_HBM_CACHE = {"POINTSMAN_WORKER_PREFIX_CACHE": "false"}


def stats_of(rig: Rig) -> KvdStats:
    observer = KvdClient(rig.kvd_socket, DIGEST_BLOCK_BYTES, "observer")
    observer.connect()
    stats = observer.stats()
    observer.close()
    return stats


async def test_c114_eviction_while_in_use(make_rig: Callable[..., Rig]) -> None:
    """A pool of 64 blocks under 8 streams that want 66, half of them cancelled anywhere."""
    rig = make_rig(
        workers={"both-0": "both"},
        env={
            "POINTSMAN_WORKER_NUM_BLOCKS": "64",
            "POINTSMAN_KVD_DRAM_BYTES": str(48 * SLOT_BYTES),
            "POINTSMAN_KVD_NVME_BYTES": str(2**20),
        },
    )
    alone = make_rig(workers={"both-0": "both"}, has_kvd=False, env=NO_HBM_CACHE)
    rng = random.Random(114)  # noqa: S311
    shared = tokens(1, 160)
    prompts = [shared + tokens(2 + number, 40) for number in range(12)]
    async with client(alone) as http:
        expected = [await text_of(http, prompt, max_tokens=60) for prompt in prompts]
    alone.close()

    async def leave_early(http: httpx.AsyncClient, index: int, num_events: int) -> None:
        transcript = Transcript()
        fields = request_body(prompts[index], stream=True, max_tokens=60)
        async with http.stream("POST", "/v1/completions", json=fields) as answer:
            async for _, data in events(answer):
                transcript.take(data)
                if len(transcript.chunks) >= num_events:
                    break
        assert expected[index].startswith(transcript.text)

    async def stay(http: httpx.AsyncClient, index: int) -> None:
        assert (await stream(http, prompts[index], max_tokens=60)).text == expected[index]

    for _ in range(8):
        chosen = rng.sample(range(len(prompts)), 8)
        async with client(rig) as http:
            await asyncio.gather(
                *(leave_early(http, index, rng.randint(1, 50)) for index in chosen[:4]),
                *(stay(http, index) for index in chosen[4:]),
            )
        rig.wait_at_rest()  # every block is free or cached again
    (beat,) = rig.beats().values()
    assert beat["num_cached_blocks"] <= beat["num_blocks"] == 64
    assert stats_of(rig).num_leases == stats_of(rig).num_reservations == 0
    for tier in stats_of(rig).tiers.values():
        assert tier.num_checksum_failures == 0
        assert sum(tier.slots_by_state.values()) == tier.num_slots


async def test_jobs_and_answers_tell_where_their_kv_came_from_and_metrics_sum_it_up(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(env=NO_HBM_CACHE)
    uses: list[Any] = []
    async with client(rig) as http:
        for _ in range(2):
            job_id = await submit_job(http, tokens(1, 100), max_tokens=4)
            await JobReading(job_id).read_through(http)
            uses.append((await http.get(f"/v1/jobs/{job_id}")).json()["cache"])
            rig.wait_at_rest()

    nothing = CacheUse().model_dump()
    taken_ms = uses[1]["taken_ms"]
    assert taken_ms > 0
    assert uses == [
        {**nothing, "load": "absent"},
        {**nothing, "dram_tokens": 96, "load": "always", "taken_ms": taken_ms},
    ]
    prefix = "pointsman_worker_kv_load"
    dram = '{model="m",role="prefill",tier="dram",worker="prefill-0@node-a"}'
    wait_until(
        lambda: rig.metric(f"{prefix}_bytes{dram}") == 6 * DIGEST_BLOCK_BYTES,
        5,
        "the heartbeat with the loads",
    )
    assert rig.metric(f"{prefix}_seconds{dram}") > 0
    assert rig.metric(f'{prefix}s{{model="m",reason="absent"') > 0

    async with client(rig) as http:
        fields = request_body(tokens(1, 100), max_tokens=4)
        whole = await http.post("/v1/completions", json=fields)
        streamed = await http.post("/v1/completions", json=fields | {"stream": True})
    told = dict(pair.split("=") for pair in whole.headers["x-pointsman-kv"].split(", "))
    assert float(told.pop("taken_ms")) > 0
    expected = {"hbm": "0", "dram": "96", "nvme": "0", "peer": "0", "computed": "4"}
    assert told == expected | {"load": "always"}
    assert "x-pointsman-kv" not in streamed.headers, "it is sent before this is known"


def start_again(rig: Rig) -> None:
    """The daemon, over its old slab, and the one worker."""
    rig.start_kvd()
    rig.start_worker("both-0", "both")
    rig.wait_for_worker("both-0")
    rig.wait_ready()


def slab_bytes(rig: Rig) -> int:
    return (rig.folder / "kv.slab").stat().st_size


async def test_c122_restart_with_a_warm_disk(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(workers={"both-0": "both"}, env=NO_HBM_CACHE)
    prompt, other = tokens(1, 160), tokens(2, 160)
    async with client(rig) as http:
        expected = [await text_of(http, each, max_tokens=8) for each in (prompt, other)]
    for name in ("both-0", "kvd"):
        assert rig.terminate(name) == 0
    size = slab_bytes(rig)
    start_again(rig)
    async with client(rig) as http:
        warm = await complete(http, prompt, max_tokens=8)
        assert (cached(warm), warm["choices"][0]["text"]) == (144, expected[0])
        assert stats_of(rig).tiers["nvme"].num_hits >= 9

        # The first block of a chain is gone: what follows it cannot be used.
        observer = KvdClient(rig.kvd_socket, DIGEST_BLOCK_BYTES, "vandal")
        observer.connect()
        spec = DigestRunner().spec
        salt = tenant_salt("default")
        root = namespace_root(
            {"fingerprint": spec.fingerprint, "layout": spec.layout.describe(), "salt": salt}
        )
        keys = BlockHasher(root).keys(other, 16)
        assert observer.find(keys) == 10
        observer.discard(keys[:1])
        observer.close()
        headless = await complete(http, other, max_tokens=8)
        assert (cached(headless), headless["choices"][0]["text"]) == (0, expected[1])
        again = await complete(http, other, max_tokens=8)
        assert (cached(again), again["choices"][0]["text"]) == (144, expected[1])
    assert slab_bytes(rig) == size, "what nobody can use takes no room"


@pytest.fixture
def two_models(tmp_path: Path) -> list[Path]:
    """Two tiny models with one tokenizer, alike in all but their weights."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {piece: 3 + number for number, piece in enumerate(alphabet)}
    spelling = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    spelling.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelling.decoder = tokenizers.decoders.ByteLevel()
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    directories = []
    for number in range(2):
        torch.manual_seed(number)
        directories.append(tmp_path / f"model-{number}")
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directories[-1])
        spelling.save(str(directories[-1] / "tokenizer.json"))
        (directories[-1] / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    return directories


async def test_c120_new_model_weights_under_the_same_name(
    make_rig: Callable[..., Rig], two_models: list[Path], tmp_path: Path
) -> None:
    live = tmp_path / "live"
    prompt = random.Random(120).choices(range(3, 259), k=100)  # noqa: S311

    def install(model: Path) -> None:
        shutil.rmtree(live, ignore_errors=True)
        shutil.copytree(model, live)

    def swap(rig: Rig, model: Path) -> None:
        install(model)
        for name in ("both-0", "kvd"):
            assert rig.terminate(name) == 0
        start_again(rig)

    install(two_models[1])
    env = {"POINTSMAN_WORKER_DTYPE": "float32"}
    cold = make_rig(engine="torch", model=live, workers={"both-0": "both"}, has_kvd=False, env=env)
    async with client(cold) as http:
        expected = await text_of(http, prompt, max_tokens=16, ignore_eos=True)
    cold.close()

    install(two_models[0])
    rig = make_rig(engine="torch", model=live, workers={"both-0": "both"}, env=env)
    async with client(rig) as http:
        first = [await complete(http, prompt, max_tokens=16, ignore_eos=True) for _ in range(2)]
        assert [cached(answer) for answer in first] == [0, 96]
        swap(rig, two_models[1])
        new = await complete(http, prompt, max_tokens=16, ignore_eos=True)
        assert (cached(new), new["choices"][0]["text"]) == (0, expected)
        assert new["choices"][0]["text"] != first[0]["choices"][0]["text"]
        swap(rig, two_models[0])
        back = await complete(http, prompt, max_tokens=16, ignore_eos=True)
        assert back["choices"][0]["text"] == first[0]["choices"][0]["text"]
        assert cached(back) == 96, "the disk still has the old model's blocks, for the old model"
