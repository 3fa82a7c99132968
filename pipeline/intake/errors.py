"""What a request can be answered with instead of tokens, in OpenAI's words.

RequestRefused                status, type, code, param, message      → what the client reads
├── BrokenBody        400     invalid_json                            → send one JSON object
├── InvalidField      400     invalid_value                           → correct the named field
├── UnsupportedField  400     unsupported_parameter                   → leave the named field out
├── ContextExceeded   400     context_length_exceeded                 → shorten the prompt or the answer
├── TemplateRefused   400     template_refused                        → obey the model's chat template
├── UnknownModel      404     model_not_found                         → ask GET /v1/models
│   └── ModelForbidden                                                → the same, word for word
├── TokenizerUnusable 503     model_unusable                          → see the gateway's log; put its files there
├── RequestFailed     5xx     worker_lost, no_workers, ...            → as Retry-After says
└── RequestCancelled  500     cancelled                               → ask again if it was not meant

ModelFilesUnusable            the tokenizer or template of the model cannot be loaded → convert it again
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.protocol.failure import Ending, FailureCode, FinishReason

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
UNUSABLE_RETRY_S = 10
MAX_MESSAGE_CHARS = 500  # in JSON at most 12 bytes a character pair: always under 4 KB


def clip(text: str, max_chars: int = 64) -> str:
    """A short, printable form of something a client sent."""
    shown = text if len(text) <= max_chars else text[:max_chars] + "..."
    return shown.encode("utf-8", "replace").decode()


class RequestRefused(Exception):
    """An answer in OpenAI's error shape.

    `retry_after_s` (1..60) becomes `Retry-After`; `should_retry` the `x-should-retry` header that
    openai-python obeys above the status.
    """

    def __init__(self, status: int, kind: str, code: str, param: str | None, message: str) -> None:
        super().__init__(status, kind, code, param, message)
        self.status = status
        self.type = kind
        self.code = code
        self.param = param
        self.message = clip(message, MAX_MESSAGE_CHARS)
        self.retry_after_s: int | None = None
        self.should_retry: bool | None = None

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        """The `{"error": {...}}` object, always with the four keys."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    def in_stream(self) -> dict[str, Any]:
        """The body for a started stream, where a passed deadline is called `timeout`."""
        body = self.body()
        if self.code == FailureCode.DEADLINE_EXCEEDED:
            body["error"]["code"] = "timeout"
        return body


class BrokenBody(RequestRefused):
    """The body is not one JSON object."""

    def __init__(self, message: str) -> None:
        super().__init__(400, INVALID_REQUEST, "invalid_json", None, message)


class InvalidField(RequestRefused):
    """A field has a value that it may not have."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(400, INVALID_REQUEST, "invalid_value", clip(param), message)


class UnsupportedField(RequestRefused):
    """A field would change the answer in a way this server cannot."""

    def __init__(self, param: str, message: str | None = None) -> None:
        name = clip(param)
        text = message or f"{name} is not supported with this value; leave it out."
        super().__init__(400, INVALID_REQUEST, "unsupported_parameter", name, text)


class ContextExceeded(RequestRefused):
    """Prompt and answer do not fit into the model's context."""

    def __init__(
        self, param: str, context_tokens: int, prompt_tokens: int, max_tokens: int
    ) -> None:
        message = (
            f"This model's context is {context_tokens} tokens, but {prompt_tokens} are in the prompt "
            f"and {max_tokens} were asked for: {prompt_tokens + max_tokens} in all."
        )
        super().__init__(400, INVALID_REQUEST, "context_length_exceeded", param, message)


class TemplateRefused(RequestRefused):
    """The model's chat template raised for these messages."""

    def __init__(self, message: str) -> None:
        super().__init__(400, INVALID_REQUEST, "template_refused", "messages", message)


class UnknownModel(RequestRefused):
    """No model of this name is served."""

    def __init__(self, model: str) -> None:
        message = f"The model '{clip(model)}' does not exist."
        super().__init__(404, INVALID_REQUEST, "model_not_found", "model", message)
        self.model = model


class ModelForbidden(UnknownModel):
    """There may be such a model, but not for this caller, who is told what strangers to it are told."""


class TokenizerUnusable(RequestRefused):
    """A model is served, but its tokenizer and template cannot be loaded here."""

    def __init__(self, model: str) -> None:
        message = f"This server has no usable tokenizer of the model '{clip(model)}'."
        super().__init__(503, SERVER_ERROR, "model_unusable", "model", message)
        self.retry_after_s = UNUSABLE_RETRY_S


_FIRST_SERVER_STATUS = 500
_FAILURES: dict[FailureCode, tuple[int, int | None, str]] = {
    FailureCode.WORKER_LOST: (500, None, "The request was given up: its workers were lost."),
    FailureCode.NO_WORKERS: (503, 5, "No worker can serve this request now."),
    FailureCode.QUEUE_TIMEOUT: (504, 5, "The request waited too long for a worker."),
    FailureCode.DEADLINE_EXCEEDED: (504, None, "The request took longer than it may."),
    FailureCode.CONTEXT_EXCEEDED: (
        400,
        None,
        "Prompt and answer are longer than what the KV cache of a worker holds: more than its HBM pool, "
        "and more than the share of its node's DRAM that one request may have.",
    ),
    FailureCode.INTERNAL_ERROR: (500, None, "The server failed on this request."),
}


class RequestFailed(RequestRefused):
    """The pipeline ended a request with a failure.

    Nothing was generated and a later try may succeed: `Retry-After`. Work was done and would be done
    again in vain: `x-should-retry: false`.
    """

    def __init__(self, failure: FailureCode) -> None:
        status, retry_after_s, message = _FAILURES[failure]
        kind = SERVER_ERROR if status >= _FIRST_SERVER_STATUS else INVALID_REQUEST
        super().__init__(status, kind, failure.value, None, message)
        self.retry_after_s = retry_after_s
        if failure in (FailureCode.WORKER_LOST, FailureCode.DEADLINE_EXCEEDED):
            self.should_retry = False


class RequestCancelled(RequestRefused):
    """Somebody else stopped the request (its own client is gone or knows)."""

    def __init__(self) -> None:
        super().__init__(500, SERVER_ERROR, "cancelled", None, "The request was cancelled.")
        self.should_retry = False


def refusal_of(ending: Ending) -> RequestFailed | RequestCancelled | None:
    """The error that an ending means to an OpenAI client; None for a normal one."""
    if ending.failure is not None:
        return RequestFailed(ending.failure)
    return RequestCancelled() if ending.reason is FinishReason.CANCELLED else None


class ModelFilesUnusable(Exception):
    """A model directory lacks a usable tokenizer, or names a decoder we do not know."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"
