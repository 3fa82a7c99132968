"""All routes, as the OpenAPI document and `docs/api.md` tell of them. A test holds it to the app."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from pipeline.intake.field_policy import CHAT_FIELDS, COMPLETION_FIELDS, FieldPolicy
from pipeline.intake.responses_body import RESPONSE_FIELDS, ResponseShape
from pipeline.intake.schemas import ChatBody, CompletionBody
from pipeline.intake.tokenization import DetokenizeShape, TokenizeShape


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON body: the types of its fields, those that it must have, and what becomes of each.

    `more` has the types of supported fields that are another body's.
    """

    shape: type[BaseModel]
    required: tuple[str, ...]
    policy: FieldPolicy | None = None
    more: type[BaseModel] | None = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. `query` are names of query parameters; `kind`: of the answer."""

    method: str
    path: str
    summary: str
    body: Body | None = None
    query: tuple[str, ...] = ()
    status: int = 200
    kind: str = "application/json"
    is_open: bool = False


CHAT = Body(ChatBody, ("messages",), CHAT_FIELDS)
COMPLETION = Body(CompletionBody, ("prompt",), COMPLETION_FIELDS)
RESPONSE = Body(ResponseShape, ("input",), RESPONSE_FIELDS, more=ChatBody)
JOB_FIELDS = FieldPolicy(
    CHAT_FIELDS.supported | COMPLETION_FIELDS.supported | {"webhook"},
    CHAT_FIELDS.ignored | COMPLETION_FIELDS.ignored,
    {},
)


class JobShape(CompletionBody):
    """Either form of a body, with what is a job's own."""

    webhook: dict[str, str] | None = None


_JOB = Body(JobShape, (), JOB_FIELDS, more=ChatBody)
_PAGE = ("limit", "after", "order")

ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", "A chat, whole or streamed", CHAT),
    Endpoint("POST", "/v1/completions", "A completion, whole or streamed", COMPLETION),
    Endpoint(
        "POST",
        "/v1/responses",
        "A response: text and calls of functions, background, streamed",
        RESPONSE,
    ),
    Endpoint(
        "GET",
        "/v1/responses/{response_id}",
        "A stored response; `stream=true` reads its events from `starting_after` on",
        query=("stream", "starting_after"),
    ),
    Endpoint("POST", "/v1/responses/{response_id}/cancel", "Stop a background response"),
    Endpoint("DELETE", "/v1/responses/{response_id}", "Forget a response"),
    Endpoint(
        "POST",
        "/v1/jobs",
        "Submit a chat or a completion and come back for it; takes an `Idempotency-Key`",
        _JOB,
        status=202,
    ),
    Endpoint("GET", "/v1/jobs", "The tenant's jobs", query=(*_PAGE, "status", "model")),
    Endpoint("GET", "/v1/jobs/{job_id}", "A job: state, text, tool calls, usage, timing"),
    Endpoint("DELETE", "/v1/jobs/{job_id}", "Cancel a job"),
    Endpoint(
        "GET",
        "/v1/jobs/{job_id}/stream",
        "A job's tokens; resumed with `Last-Event-ID` or `starting_after`",
        query=("starting_after",),
        kind="text/event-stream",
    ),
    Endpoint("GET", "/v1/models", "The models and their aliases"),
    Endpoint("GET", "/v1/models/{name}", "One of them"),
    Endpoint(
        "POST",
        "/tokenize",
        "The ids of a prompt or a conversation",
        Body(TokenizeShape, ()),
    ),
    Endpoint("POST", "/detokenize", "The text of ids", Body(DetokenizeShape, ("tokens",))),
    Endpoint("POST", "/v1/files", "Upload a batch file (multipart: `file`, `purpose`)"),
    Endpoint("GET", "/v1/files", "The tenant's files", query=(*_PAGE, "purpose")),
    Endpoint("GET", "/v1/files/{file_id}", "A file"),
    Endpoint("DELETE", "/v1/files/{file_id}", "Delete a file"),
    Endpoint("GET", "/v1/files/{file_id}/content", "Its bytes", kind="application/octet-stream"),
    Endpoint("POST", "/v1/batches", "Order a batch of an uploaded file"),
    Endpoint("GET", "/v1/batches", "The tenant's batches", query=("limit", "after")),
    Endpoint("GET", "/v1/batches/{batch_id}", "A batch"),
    Endpoint("POST", "/v1/batches/{batch_id}/cancel", "Cancel a batch"),
    Endpoint("GET", "/livez", "This process answers (also `/healthz`, `/health`)", is_open=True),
    Endpoint("GET", "/readyz", "A request would be served; 503 says why not", is_open=True),
    Endpoint("GET", "/metrics", "Numbers for Prometheus", kind="text/plain"),
    Endpoint("GET", "/openapi.json", "This list for machines", is_open=True),
)
