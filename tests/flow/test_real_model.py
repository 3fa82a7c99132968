"""The real model through the whole pipeline: the tokens are Hugging Face's, wherever the KV came from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from tests.flow.rig import Rig
from tests.flow.talk import body, client, complete, events, text_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT_TOKENS = (5, 13, 40, 64, 100, 211, 333, 500)
NUM_TOKENS = 64
TEXT = (
    "The night train left the harbour at nine. Anna counted the lamps along the quay, wrote their "
    "number in her notebook, and asked the conductor why the third one was dark. He said that a "
    "ship had struck it in spring, that nobody had found the time to mend it, and that sailors had "
    "begun to steer by the gap. In the dining car two engineers argued about bridges. "
)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    ids = [tokenizer.encode(TEXT[start:] + TEXT * 8) for start in range(0, 160, 20)]
    return [one[:count] for one, count in zip(ids, PROMPT_TOKENS, strict=True)]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[str]:
    """Greedy continuations by Hugging Face's own modules in float32."""
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    texts = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens: list[int] = []
            output = model(torch.tensor([prompt]), use_cache=True)
            while len(tokens) < NUM_TOKENS:
                token = int(output.logits[0, -1].argmax())
                if token == eos or (isinstance(eos, list) and token in eos):
                    break
                tokens.append(token)
                output = model(torch.tensor([[token]]), cache=output.cache, use_cache=True)
            texts.append(tokenizer.decode(tokens))
    return texts


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig], smollm2: Path) -> Rig:
    return make_rig(
        engine="torch",
        model=smollm2,
        env={
            # Nothing stays in HBM: what is reused comes from the tiers. Prompts are cut in chunks.
            "POINTSMAN_WORKER_PREFIX_CACHE": "false",
            "POINTSMAN_WORKER_DTYPE": "float32",
            "POINTSMAN_WORKER_MAX_BATCH_TOKENS": "192",
            "POINTSMAN_KVD_DRAM_BYTES": str(256 * 2**20),
            "POINTSMAN_KVD_NVME_BYTES": str(512 * 2**20),
        },
    )


async def ask_all(rig: Rig, prompts: list[list[int]]) -> list[str]:
    async with client(rig) as http:
        return list(
            await asyncio.gather(*(text_of(http, p, max_tokens=NUM_TOKENS) for p in prompts))
        )


async def test_greedy_text_is_hugging_faces_from_compute_from_dram_and_from_nvme(
    rig: Rig, prompts: list[list[int]], expected: list[str]
) -> None:
    assert await ask_all(rig, prompts) == expected, "computed, the long ones in chunks"
    assert await ask_all(rig, prompts) == expected, "loaded from DRAM"
    async with client(rig) as http:
        answer = await complete(http, prompts[-1], max_tokens=1)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 496

    assert rig.terminate("kvd") == 0
    rig.start_kvd()
    assert await ask_all(rig, prompts) == expected, "loaded from NVMe"


async def time_to_first_token(http: httpx.AsyncClient, prompt: list[int]) -> float:
    request = body(prompt, max_tokens=2, stream=True)
    started_s = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=request) as answer:
        async for _ in events(answer):
            return time.perf_counter() - started_s
    raise AssertionError("the stream was empty")


async def test_a_second_long_prompt_comes_five_times_sooner_from_dram_and_from_nvme(
    rig: Rig, smollm2: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    prompt = tokenizer.encode("A prompt of its own. " + TEXT * 14)[:1000]
    assert len(prompt) == 1000
    async with client(rig) as http:
        first_s = await time_to_first_token(http, prompt)
        rig.wait_at_rest()
        dram_s = await time_to_first_token(http, prompt)
        rig.wait_at_rest()
        assert rig.terminate("kvd") == 0
        rig.start_kvd()
        await text_of(http, "wakes the connection to kvd up again", max_tokens=2)
        nvme_s = await time_to_first_token(http, prompt)

    print(f"TTFT computed {first_s:.3f} s, DRAM {dram_s:.3f} s, NVMe {nvme_s:.3f} s")  # noqa: T201
    assert dram_s < first_s / 5
    assert nvme_s < first_s / 5
