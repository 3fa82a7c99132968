"""Options of sampling, echo and scoring through a whole pipeline. Cases C013, C024, C040, C042."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.flow.rig import Rig
from tests.flow.talk import Transcript, body, client, complete, stream, text_of
from tests.flow.wire import (
    CHAT,
    COMPLETIONS,
    chat,
    chat_body,
    chat_stream,
    refused,
    wire_stream,
)
from workers.models.bench import EngineBench
from workers.models.digest import DigestRunner

PROMPT = "Once upon a time"
RANDOM = {"temperature": 1, "seed": 7, "max_tokens": 40}


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(env={"POINTSMAN_WORKER_STEP_DELAY_MS": "4"})


def reference(prompt: list[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first, from forward passes of their own."""
    bench = EngineBench(DigestRunner(), num_blocks=8 * len(prompt))
    logprobs = []
    for place in range(1, len(prompt)):
        logits = bench.step([bench.lane(prompt[:place])], [place])[0].astype(np.float64)
        logprobs.append(float(logits[prompt[place]] - np.log(np.exp(logits).sum())))
    return [max(value, -9999.0) if math.isfinite(value) else -9999.0 for value in logprobs]


SCORED = {"echo": True, "logprobs": 1}


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
async def test_c024_scoring_tells_every_token_of_the_prompt(rig: Rig, max_tokens: int) -> None:
    prompt = [80, 5, 65, 66]
    async with client(rig) as http:
        answer = await complete(http, prompt, max_tokens=max_tokens, **SCORED)

    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert [len(logprobs[key]) for key in sorted(logprobs)] == [4 + max_tokens] * 4
    assert choice["text"] == "".join(logprobs["tokens"])
    assert choice["text"].startswith("P\x05AB")
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["usage"]["prompt_tokens"] == 4
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:4] == pytest.approx(reference(prompt), abs=1e-4)
    assert logprobs["text_offset"] == list(range(4 + max_tokens))
    continuation = logprobs["token_logprobs"][2 : -1 if max_tokens else None]  # lm-eval's slice
    assert continuation
    assert all(math.isfinite(value) for value in continuation)


async def test_c024_a_cached_prompt_is_scored_alike(rig: Rig) -> None:
    prompt = "A prompt of more than one block, scored once cold and then warm. " * 3
    async with client(rig) as http:
        cold = await complete(http, prompt, max_tokens=3, **SCORED)
        warm = await complete(http, prompt, max_tokens=3, **SCORED)
        plain = await complete(http, prompt, max_tokens=3)

    assert warm["choices"] == cold["choices"]
    values = warm["choices"][0]["logprobs"]["token_logprobs"]
    assert values[1 : len(prompt)] == pytest.approx(reference(list(prompt.encode())), abs=1e-4)
    assert plain["choices"][0]["text"] == cold["choices"][0]["text"][len(prompt) :]


async def test_c024_several_prompts_and_choices_are_scored_each(rig: Rig) -> None:
    async with client(rig) as http:
        answer = await complete(http, ["ab", "xyz"], n=2, max_tokens=0, **SCORED)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["ab", "ab", "xyz", "xyz"]
    lengths = [len(choice["logprobs"]["tokens"]) for choice in answer["choices"]]
    assert lengths == [2, 2, 3, 3]


@pytest.mark.parametrize("fields", [{}, {"logprobs": 2}], ids=["text", "scored"])
@pytest.mark.parametrize("max_tokens", [0, 6])
async def test_c013_a_stream_echoes_what_the_whole_answer_does(
    rig: Rig, fields: dict[str, int], max_tokens: int
) -> None:
    request = body(PROMPT, echo=True, max_tokens=max_tokens, **fields)
    async with client(rig) as http:
        whole = (await http.post(COMPLETIONS, json=request)).json()["choices"][0]
        wire = await wire_stream(http, COMPLETIONS, request)

    assert whole["text"].startswith(PROMPT)
    assert len(whole["text"]) == len(PROMPT) + max_tokens
    assert wire.text() == whole["text"]
    assert wire.finish_reason() == whole["finish_reason"] == "length"
    assert wire.pieces()[0] == PROMPT
    if fields:
        parts = [part["logprobs"] for part in wire.choices() if part["logprobs"]]
        for key, values in whole["logprobs"].items():
            assert [value for part in parts for value in part[key] or ()] == values


async def test_c013_a_stop_string_in_an_echoed_prompt_stops_nothing(rig: Rig) -> None:
    async with client(rig) as http:
        plain = await text_of(http, PROMPT, max_tokens=8)
        stop = plain[3:5]
        prompt = f"{stop} {PROMPT}"
        rest = await text_of(http, prompt, max_tokens=8)
        echoed = await text_of(http, prompt, max_tokens=8, echo=True, stop=[stop])
        cut = await text_of(http, PROMPT, max_tokens=8, echo=True, stop=[stop])
        shown = await text_of(
            http, PROMPT, max_tokens=8, stop=[stop], include_stop_str_in_output=True
        )
    assert echoed == prompt + rest
    assert cut == PROMPT + plain[:3]
    assert shown == plain[:5]


async def test_c040_c042_a_seed_is_a_text_and_no_temperature_is_one(rig: Rig) -> None:
    async with client(rig) as http:
        assert await text_of(http, PROMPT, **RANDOM) == await text_of(http, PROMPT, **RANDOM)
        seeds = [await text_of(http, PROMPT, **RANDOM | {"seed": seed}) for seed in (-1, 0, 8)]
        greedy = [
            await text_of(http, PROMPT, **RANDOM | fields)
            for fields in ({"temperature": 0}, {"temperature": 1e-9}, {"top_p": 0}, {"min_p": 1})
        ]
    assert len(set(seeds)) == 3
    assert len(set(greedy)) == 1


async def test_penalties_change_the_text_and_presence_keeps_tokens_apart(rig: Rig) -> None:
    async with client(rig) as http:
        plain = await text_of(http, PROMPT, max_tokens=60)
        for name in ("presence_penalty", "frequency_penalty"):
            punished = await text_of(http, PROMPT, max_tokens=60, **{name: 2})
            assert punished != plain
            assert len(set(punished)) > len(set(plain))
            assert punished == await text_of(http, PROMPT, max_tokens=60, **{name: 2})
        repeated = await text_of(http, "aaaa", max_tokens=60, repetition_penalty=10)
    assert "a" not in repeated
    assert len(set(repeated)) == 60


async def test_a_bias_bans_or_forces_a_token(rig: Rig) -> None:
    async with client(rig) as http:
        forced = await text_of(http, PROMPT, max_tokens=5, logit_bias={"65": 100})
        plain = await text_of(http, PROMPT, max_tokens=20)
        banned = {str(ord(char)): -100 for char in set(plain)}
        other = await text_of(http, PROMPT, max_tokens=20, logit_bias=banned)
        silent = await chat(http, "x", max_tokens=5, stop_token_ids=[66], logit_bias={"66": 100})
    assert forced == "AAAAA"
    assert not set(other) & set(plain)
    assert silent["choices"][0]["message"]["content"] == ""
    assert silent["choices"][0]["finish_reason"] == "stop"


async def test_no_end_comes_before_min_tokens(rig: Rig) -> None:
    ends = {"stop_token_ids": [66], "logit_bias": {"66": 100}}
    async with client(rig) as http:
        for count in (1, 2, 7):
            answer = await complete(http, PROMPT, max_tokens=20, min_tokens=count, **ends)
            assert answer["usage"]["completion_tokens"] == count
            assert answer["choices"][0]["finish_reason"] == "stop"
        plain = await text_of(http, "B" * 9, max_tokens=20, logit_bias={"66": 100})
        stopped = await complete(
            http, "B" * 9, max_tokens=20, logit_bias={"66": 100}, stop=["BB"], min_tokens=5
        )
        filled = await complete(http, PROMPT, max_tokens=9, min_tokens=9, ignore_eos=True)
    assert plain == "B" * 20
    assert stopped["choices"][0]["text"] == "B" * 4
    assert stopped["usage"]["completion_tokens"] == 6
    assert filled["usage"]["completion_tokens"] == 9


async def test_bad_words_never_appear(rig: Rig) -> None:
    async with client(rig) as http:
        plain = await text_of(http, PROMPT, max_tokens=30)
        words = [plain[3:6], plain[10], plain[20:22]]
        other = await text_of(http, PROMPT, max_tokens=30, bad_words=words)
    assert plain[:3] == other[:3]
    assert not any(word in other for word in words)


async def test_every_chunk_tells_the_usage_so_far(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client(rig) as http:
        wire = await chat_stream(http, "x", max_tokens=4, stream_options=options)
        without = await chat_stream(
            http, "x", max_tokens=4, stream_options={"continuous_usage_stats": True}
        )
    usages = [chunk["usage"] for chunk in wire.chunks]
    assert [usage["completion_tokens"] for usage in usages] == [0, 1, 2, 3, 4, 4, 4]
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for usage in usages
    )
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert all("usage" not in chunk for chunk in without.chunks)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"min_p": 2}, "min_p"),
        (CHAT, {"presence_penalty": 3}, "presence_penalty"),
        (CHAT, {"logit_bias": {"999999": 1}}, "logit_bias"),
        (CHAT, {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
        ("/v1/jobs", {"echo": True}, "echo"),
    ],
)
async def test_an_option_out_of_bounds_is_refused(
    rig: Rig, path: str, fields: dict[str, Any], param: str
) -> None:
    request = chat_body("x") if path == CHAT else body("x")
    await refused(rig, path, request | fields, param)


async def test_a_killed_decode_worker_changes_neither_scores_nor_sampled_tokens(rig: Rig) -> None:
    """Last of this file: it takes the recovery's seconds and leaves another worker behind."""
    fields = {
        **SCORED,
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 3,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "min_p": 0.02,
        "bad_words": ["a", "xy"],
    }
    async with client(rig) as http:
        undisturbed = (await complete(http, PROMPT, **fields))["choices"][0]
        transcript = Transcript()
        reading = asyncio.create_task(stream(http, PROMPT, transcript, **fields))
        await transcript.has_chunks(20)
        rig.kill("decode-0")
        assert transcript.finish_reason is None, "it was still running"
        rig.start_worker("decode-1", "decode")
        await reading

    assert transcript.text == undisturbed["text"]
    parts = [choice["logprobs"] for chunk in transcript.chunks for choice in chunk["choices"]]
    told = [value for part in parts if part for value in part["token_logprobs"]]
    assert told == undisturbed["logprobs"]["token_logprobs"]
