"""/v1/files and /v1/batches as the command line uses them. Synchronous, one gateway."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Self

import httpx
import orjson

from pipeline.batch.errors import BatchFileInvalid, GatewayGone, GatewayRefuses
from pipeline.batch.reader import ENDPOINTS

# As in pipeline.batch.records, which would load the database library into every command.
_OVER = ("completed", "failed", "expired", "cancelled")
_CONNECT_LIMIT_S = 10.0
_ANSWER_LIMIT_S = 300.0
_RETRY_S = 0.5
_PART_BYTES = 1 << 20
_FIRST_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch as the API shows it; `fields` is the whole object."""

    fields: Mapping[str, Any]

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.fields["id"])

    @property
    def status(self) -> str:
        """Where it stands."""
        return str(self.fields["status"])

    @property
    def is_over(self) -> bool:
        """Nothing will change any more."""
        return self.status in _OVER

    @property
    def counts(self) -> tuple[int, int, int]:
        """(All requests, completed, failed); zeros before validation is over."""
        counts = self.fields.get("request_counts") or {}
        return counts.get("total", 0), counts.get("completed", 0), counts.get("failed", 0)

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return int((self.fields.get("usage") or {}).get("output_tokens", 0))

    @property
    def problems(self) -> list[str]:
        """What validation found, a sentence each."""
        errors = (self.fields.get("errors") or {}).get("data") or []
        return [f"line {error.get('line')}: {error.get('message')}" for error in errors]


class BatchApi:
    """Waits up to `patience_s` for a gateway that is away, but only where asking again is harmless."""

    def __init__(self, url: str, api_key: str | None, patience_s: float) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._patience_s = patience_s
        self._http = httpx.Client(
            base_url=f"{self._url}/v1",
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_CONNECT_LIMIT_S, read=_ANSWER_LIMIT_S, write=_ANSWER_LIMIT_S),
            trust_env=False,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> str:
        """Upload an input file; its id."""
        with path.open("rb") as file:
            answer = self._once(
                "POST", "files", data={"purpose": "batch"}, files={"file": (path.name, file)}
            )
        return str(answer["id"])

    def create(self, file_id: str, endpoint: str, metadata: Mapping[str, str]) -> BatchView:
        """Order a batch."""
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": "24h",
            "metadata": dict(metadata) or None,
        }
        return BatchView(self._once("POST", "batches", json=body))

    def retrieve(self, batch_id: str) -> BatchView:
        """One batch as it stands now."""
        return BatchView(self._patiently("GET", f"batches/{batch_id}"))

    def latest(self, limit: int) -> list[BatchView]:
        """The newest batches, newest first."""
        page = self._patiently("GET", "batches", params={"limit": limit})
        return [BatchView(fields) for fields in page["data"]]

    def cancel(self, batch_id: str) -> BatchView:
        """Begin to cancel; may be asked again."""
        return BatchView(self._patiently("POST", f"batches/{batch_id}/cancel"))

    def download(self, file_id: str, into: BinaryIO) -> int:
        """Write a file's bytes; how many.

        Raises:
            GatewayRefuses, GatewayGone: also when the connection broke in the middle.
        """
        num_bytes = 0
        try:
            with self._http.stream("GET", f"files/{file_id}/content") as answer:
                if answer.status_code != HTTPStatus.OK:
                    answer.read()
                    raise GatewayRefuses(answer.status_code, _message(answer))
                for part in answer.iter_bytes(_PART_BYTES):
                    num_bytes += into.write(part)
        except httpx.TransportError as error:
            raise GatewayGone(self._url, 0.0, type(error).__name__) from error
        return num_bytes

    def _once(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise GatewayGone(self._url, 0.0, type(error).__name__) from error
        if answer.status_code != HTTPStatus.OK:
            raise GatewayRefuses(answer.status_code, _message(answer))
        body: dict[str, Any] = answer.json()
        return body

    def _patiently(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        deadline_s = time.monotonic() + self._patience_s
        while True:
            try:
                return self._once(method, path, **options)
            except GatewayGone as gone:
                if time.monotonic() > deadline_s:
                    raise GatewayGone(self._url, self._patience_s, gone.cause) from gone
            except GatewayRefuses as refused:
                is_busy = refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR
                if not is_busy or time.monotonic() > deadline_s:
                    raise
            time.sleep(_RETRY_S)


def endpoint_of(path: Path) -> str:
    """The endpoint that the first request of a file names; a batch has one for all of them.

    Raises:
        BatchFileInvalid: there is no such line.
    """
    with path.open("rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_FIRST_LINE_BYTES), b""), start=1):
            text = line.removeprefix(b"\xef\xbb\xbf").strip()
            if not text:
                continue
            try:
                url = orjson.loads(text).get("url")
            except (orjson.JSONDecodeError, AttributeError) as error:
                raise BatchFileInvalid(path, number, "not a JSON object") from error
            if url not in ENDPOINTS:
                raise BatchFileInvalid(path, number, f"url must be one of {', '.join(ENDPOINTS)}")
            return str(url)
    raise BatchFileInvalid(path, 1, "the file holds no request")


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:200]
