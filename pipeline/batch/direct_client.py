"""Runs the lines of `batch run` without a gateway: through Redis, by whatever workers there are."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus

from pipeline.batch.errors import PipelineGone, PipelineRefuses
from pipeline.batch.line_client import MAX_SERVER_FAILURES, Answer, OnWait, backoff_s
from pipeline.batch.line_run import KINDS
from pipeline.batch.reader import BatchRequest
from pipeline.client import PipelineClient
from pipeline.errors import Overloaded, PipelineError
from pipeline.intake.build import Caller
from pipeline.intake.errors import RequestRefused, TokenizerUnusable, UnknownModel
from pipeline.intake.intake_loader import IntakeLoader
from pipeline.intake.model_catalog import ModelCatalog
from pipeline.intake.run import run_whole
from pipeline.protocol.failure import FailureCode
from pipeline.protocol.request import Priority
from pipeline.protocol.tenant import tenant_salt
from pipeline.settings import PipelineSettings

TENANT = "default"  # as in a gateway without keys
_CALLER = Caller(TENANT, tenant_salt(TENANT), Priority.BATCH)
_BUSY = (FailureCode.QUEUE_TIMEOUT, FailureCode.NO_WORKERS)
_NOBODY = "no worker is there"


class DirectClient:
    """See `LineClient`. While it runs it takes part in the upkeep, as a gateway does.

    A pipeline that is full is waited for as long as it takes, Redis and the first worker `patience_s`.
    """

    def __init__(self, settings: PipelineSettings, patience_s: float, on_wait: OnWait) -> None:
        self._client = PipelineClient(settings)
        loader = IntakeLoader(settings, settings.data_dir / "models")
        self._models = ModelCatalog(loader.configured({}), self._client, loader.load)
        self._building = ThreadPoolExecutor(1, thread_name_prefix="build")
        self._patience_s = patience_s
        self._on_wait = on_wait
        self._last_answer_s = time.monotonic()

    async def open(self) -> None:
        """See `LineClient`."""
        await self._client.start()

    async def close(self) -> None:
        """See `LineClient`."""
        await self._client.close()
        self._models.close()
        self._building.shutdown(wait=False, cancel_futures=True)

    async def complete(self, request: BatchRequest) -> Answer:
        """See `LineClient`.

        Raises:
            PipelineRefuses: the model's files cannot be loaded here.
            PipelineGone: Redis, or every worker, was away for `patience_s`.
        """
        num_tries, num_failures = 0, 0
        while True:
            num_tries += 1
            try:
                answer = await self._run(request)
            except TokenizerUnusable as unusable:
                raise PipelineRefuses(unusable.message) from unusable
            except RequestRefused as refused:
                num_failures += 1
                reason = self._reason_to_wait(refused, num_failures)
                if reason is None:
                    return self._final(Answer(refused.status, "", refused.body()))
            except Overloaded:
                reason = "too many requests wait already"
            except PipelineError as error:  # also one that Redis lost: it is submitted again
                reason = f"Redis is away ({type(error).__name__})"
                self._check_patience(reason)
            else:
                return self._final(Answer(HTTPStatus.OK, f"req-{answer['id']}", answer))
            self._on_wait(reason)
            await asyncio.sleep(backoff_s(num_tries))

    async def _run(self, request: BatchRequest) -> dict[str, object]:
        body = {**request.body}
        make = partial(self._models.build, KINDS[request.url], body, _CALLER)
        generation = await self._models.run(self._building, make)
        return await run_whole(self._client, generation, generation.vocabulary)

    def _reason_to_wait(self, refused: RequestRefused, num_failures: int) -> str | None:
        """None: the refusal is the request's answer."""
        if isinstance(refused, UnknownModel) and not self._client.known_fleet.workers:
            self._check_patience(_NOBODY)
            return _NOBODY
        if refused.code in _BUSY:
            return refused.message
        is_ours = refused.status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return refused.message if is_ours and num_failures < MAX_SERVER_FAILURES else None

    def _final(self, answer: Answer) -> Answer:
        self._last_answer_s = time.monotonic()
        self._on_wait("")
        return answer

    def _check_patience(self, cause: str) -> None:
        if time.monotonic() - self._last_answer_s > self._patience_s:
            raise PipelineGone(cause, self._patience_s)
