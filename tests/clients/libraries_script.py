"""langchain-openai and litellm as people use them. Argument: base URL. Imports nothing of ours."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import litellm
from langchain_openai import ChatOpenAI

TEXT = "Hello, world!"
MESSAGES: Any = [{"role": "user", "content": "hi"}]
ENDINGS = {"stop", "length"}


def langchain(base_url: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="unused", model="m", stream_usage=True)
    answer = model.invoke("hi")
    assert answer.content == TEXT
    assert answer.usage_metadata["output_tokens"] == 4
    assert answer.response_metadata["finish_reason"] in ENDINGS
    whole = None
    for chunk in model.stream([("system", "x"), ("human", [{"type": "text", "text": "hi"}])]):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == TEXT
    assert whole.usage_metadata["output_tokens"] == 4
    assert [item.content for item in model.batch(["a", "b", "c"])] == [TEXT] * 3
    assert model.bind(max_tokens=2).invoke("hi").response_metadata["finish_reason"] == "length"
    background = ChatOpenAI(
        base_url=base_url, api_key="unused", model="m", use_responses_api=True
    ).invoke("hi")
    assert background.text == TEXT
    assert asyncio.run(model.ainvoke("hi")).content == TEXT


def lite(base_url: str) -> None:
    fields = {"model": "openai/m", "api_base": base_url, "api_key": "unused"}
    answer = litellm.completion(messages=MESSAGES, **fields)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason in ENDINGS
    assert answer.usage.completion_tokens == 4
    chunks = list(
        litellm.completion(
            messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    text = litellm.text_completion(
        model="text-completion-openai/m", prompt="x", api_base=base_url, api_key="unused"
    )
    assert text.choices[0].text == TEXT
    router = litellm.Router(
        model_list=[{"model_name": "mine", "litellm_params": fields}], num_retries=2
    )
    assert router.completion("mine", messages=MESSAGES).choices[0].message.content == TEXT
    alive = litellm.completion(messages=MESSAGES, max_tokens=1, **fields)
    assert alive.choices[0].finish_reason == "length"
    status = 200
    try:
        litellm.completion(messages=MESSAGES, max_tokens=0, **fields)
    except litellm.BadRequestError as error:
        status = error.status_code
    assert status == 400


if __name__ == "__main__":
    litellm.suppress_debug_info = True
    langchain(sys.argv[1])
    lite(sys.argv[1])
