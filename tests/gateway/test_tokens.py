"""POST /tokenize and /detokenize: what a prompt comes to, without computing it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

MODEL = "org/m:v1"
MESSAGES = [{"role": "user", "content": "hi"}]


async def tokenized(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/tokenize", json={"model": MODEL, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_a_prompt_becomes_its_ids(http: httpx.AsyncClient) -> None:
    found = await tokenized(http, prompt="h\u00e9", return_token_strs=True)
    assert found == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }


async def test_an_empty_prompt_begins_with_the_token_that_begins_a_text(
    http: httpx.AsyncClient,
) -> None:
    assert (await tokenized(http, prompt=""))["tokens"] == [256]
    assert (await tokenized(http, prompt="", add_special_tokens=False))["tokens"] == []


async def test_messages_become_what_the_template_makes_of_them(http: httpx.AsyncClient) -> None:
    ids = (await tokenized(http, messages=MESSAGES))["tokens"]
    answer = await http.post("/detokenize", json={"model": MODEL, "tokens": ids})
    assert answer.json()["prompt"] == ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


async def test_text_comes_back_from_its_ids(http: httpx.AsyncClient) -> None:
    text = "caf\u00e9 \U0001f600 <|im_end|>"
    ids = (await tokenized(http, prompt=text))["tokens"]
    answer = await http.post("/v1/detokenize", json={"model": MODEL, "tokens": ids})
    assert answer.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
        ("/tokenize", {"model": "", "prompt": "x"}, 400, "model"),
        ("/tokenize", {"model": None, "prompt": "x"}, 400, "model"),
        ("/tokenize", {"model": 5, "prompt": "x"}, 400, "model"),
        ("/tokenize", {"prompt": "x"}, 400, "model"),
        ("/tokenize", {"model": MODEL}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": ["a", "b"]}, 400, "prompt"),
        ("/tokenize", {"model": MODEL, "prompt": "x", "temperature": 1}, 400, "temperature"),
        (
            "/tokenize",
            {"model": MODEL, "prompt": "x", "return_token_strs": 1},
            400,
            "return_token_strs",
        ),
        ("/tokenize", {"model": MODEL, "messages": []}, 400, "messages"),
        ("/detokenize", {"model": "nope", "tokens": [1]}, 404, "model"),
        ("/detokenize", {"model": MODEL, "tokens": [260]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL, "tokens": [True]}, 400, "tokens"),
        ("/detokenize", {"model": MODEL}, 400, "tokens"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_its_name(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], status: int, param: str
) -> None:
    answer = await http.post(path, json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
