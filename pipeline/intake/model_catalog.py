"""The models of one process: found by name, their text side loaded when it is first needed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Annotated, Any, Protocol, TypeVar

import structlog
from pydantic import BaseModel, Field

from pipeline.errors import StoreUnavailable
from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.errors import ModelForbidden, TokenizerUnusable, UnknownModel
from pipeline.intake.known_models import KnownModel, KnownModels
from pipeline.intake.schemas import Strict, validate
from pipeline.intake.vocabulary import Vocabulary
from pipeline.scheduling.fleet import Fleet

log = structlog.get_logger(__name__)

MAX_LOADED = 16
MAX_TRIES = 3  # of one request, whose model may have to make room again
RETRY_S = 10.0
LOAD_LIMIT_S = 60.0  # of waiting for a load; it may lie on a disk that does not answer
LOOK_AGAIN_S = 0.1  # names that nobody knows shall cost little
_ANYBODY = Caller()
_Made = TypeVar("_Made")


class FleetWatch(Protocol):
    """Who lives; a `PipelineClient` is one."""

    @property
    def known_fleet(self) -> Fleet:
        """As seen last."""
        ...

    def fleet(self, max_age_s: float) -> Awaitable[Fleet]:
        """As it was so long ago at most. Raises `StoreUnavailable`."""
        ...


class ModelNotLoaded(Exception):
    """The model's text side is to be loaded before it can be used."""

    def __init__(self, known: KnownModel) -> None:
        super().__init__(known)
        self.known = known

    def __str__(self) -> str:
        return f"{self.known.name} is not loaded"


class _Named(BaseModel):
    model_config = Strict

    model: Annotated[str, Field(min_length=1)]


class ModelCatalog:
    """Finds models in any thread; loads them in one of its own, so that nothing else waits.

    At most 16 are kept, the ones used last. One that cannot be loaded is refused, and tried again
    after ten seconds. A model whose files or engine change is another one (`KnownModel.identity`).
    """

    def __init__(
        self,
        configured: Iterable[KnownModel],
        watch: FleetWatch,
        load: Callable[[KnownModel], Intake],
    ) -> None:
        self._known = KnownModels(configured)
        self._watch = watch
        self._load_intake = load
        self._fleet: Fleet | None = None
        self._fingerprints: dict[str, str] = {}  # of that fleet
        self._lock = threading.Lock()
        self._loaded: OrderedDict[tuple[str, ...], Intake] = OrderedDict()  # by identity
        self._loading: dict[tuple[str, ...], asyncio.Task[None]] = {}
        self._failed_s: dict[str, float] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="models")

    def close(self) -> None:
        """Load no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def by_name(self) -> Mapping[str, KnownModel]:
        """All models by all names, names before aliases."""
        fleet = self._watch.known_fleet
        with self._lock:
            if fleet is not self._fleet:
                self._fleet = fleet
                self._fingerprints.clear()
                self._known.observe(fleet, time.monotonic())
            return self._known.by_name

    async def look(self) -> None:
        """See who lives now, or just now; where Redis is away, what was seen last stands."""
        with contextlib.suppress(StoreUnavailable):
            await self._watch.fleet(LOOK_AGAIN_S)

    def find(self, name: str, caller: Caller = _ANYBODY) -> KnownModel:
        """The model that clients call so. Raises `UnknownModel`: there is none for this caller."""
        if not caller.may_use(name):
            raise ModelForbidden(name)
        known = self.by_name.get(name)
        if known is None:
            raise UnknownModel(name)
        return known

    def intake(self, name: str, caller: Caller = _ANYBODY) -> Intake:
        """What makes requests to the model that clients call so.

        Raises:
            UnknownModel: there is none for this caller.
            ModelNotLoaded: not yet; `run` sees to it.
        """
        known = self.find(name, caller)
        with self._lock:
            intake = self._loaded.get(known.identity)
            if intake is None:
                raise ModelNotLoaded(known)
            self._loaded.move_to_end(known.identity)
            return intake

    def build(
        self,
        kind: AnswerKind,
        body: Mapping[str, Any],
        caller: Caller,
        answer_id: str | None = None,
    ) -> Generation:
        """See `Intake.build` of the model that the body names. Raises also what `intake` does."""
        fields = {"model": body["model"]} if body.get("model") is not None else {}
        model = validate(_Named, fields).model
        intake = self.intake(model, caller)
        generation = intake.build(kind, body, caller, answer_id)
        return replace(generation, fingerprint=self._fingerprint(intake.model))

    def _fingerprint(self, model: str) -> str:
        """See `Fleet.fingerprint`, which only a new look can change."""
        with self._lock:
            if model not in self._fingerprints and self._fleet is not None:
                self._fingerprints[model] = self._fleet.fingerprint(model)
            return self._fingerprints.get(model, "")

    async def run(self, executor: Executor, make: Callable[[], _Made]) -> _Made:
        """What `make` makes in a thread of the executor; it is called again once what it lacks is there.

        Raises:
            UnknownModel: also the living workers know of none.
            TokenizerUnusable: a model that it needs cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        return await self._retried(lambda: loop.run_in_executor(executor, make))

    async def vocabulary(self, name: str) -> Vocabulary:
        """The vocabulary of a model that has answered once.

        Raises:
            TokenizerUnusable: it cannot be loaded, or nobody knows the model any more.
        """

        async def find() -> Vocabulary:
            return self.intake(name).vocabulary

        try:
            return await self._retried(find)
        except UnknownModel as error:
            raise TokenizerUnusable(name) from error

    def load_now(self, name: str) -> None:
        """Load one in this thread. Raises `UnknownModel` or what `load` does."""
        known = self.find(name)
        self._keep(known, self._load_intake(known))

    def max_context(self, known: KnownModel) -> int | None:
        """Most tokens of prompt and answer together; None: it cannot be told before it is loaded."""
        with self._lock:
            intake = self._loaded.get(known.identity)
        if intake is not None:
            return intake.vocabulary.max_context
        return known.max_context or None

    async def _retried(self, make: Callable[[], Awaitable[_Made]]) -> _Made:
        name = ""
        for _ in range(MAX_TRIES):
            try:
                return await make()
            except ModelNotLoaded as missing:
                name = missing.known.name
                await self._load(missing.known)
            except ModelForbidden:
                raise
            except UnknownModel as unknown:
                name = unknown.model
                if not await self._has_come(name):
                    raise
        raise TokenizerUnusable(name)

    async def _has_come(self, name: str) -> bool:
        """True if a look at the living workers shows a model of this name."""
        await self.look()
        return name in self.by_name

    async def _load(self, known: KnownModel) -> None:
        """Raises `TokenizerUnusable`. Those who want the same wait for one load."""
        if time.monotonic() - self._failed_s.get(known.name, float("-inf")) < RETRY_S:
            raise TokenizerUnusable(known.name)
        task = self._loading.get(known.identity)
        if task is None:
            task = self._loading[known.identity] = asyncio.create_task(self._load_once(known))
            task.add_done_callback(lambda _: self._loading.pop(known.identity, None))
        try:
            async with asyncio.timeout(LOAD_LIMIT_S):
                await asyncio.shield(task)
        except TimeoutError:
            raise TokenizerUnusable(known.name) from None
        if known.name in self._failed_s:
            raise TokenizerUnusable(known.name)

    async def _load_once(self, known: KnownModel) -> None:
        began_s = time.monotonic()
        loop = asyncio.get_running_loop()
        try:
            intake = await loop.run_in_executor(self._thread, self._load_intake, known)
        except Exception:
            # The edge to a model's files: libraries raise what they like, and no other model may suffer.
            self._failed_s[known.name] = time.monotonic()
            log.exception("model_not_loaded", model=known.name, engine=known.engine)
            return
        self._failed_s.pop(known.name, None)
        self._keep(known, intake)
        took_s = round(time.monotonic() - began_s, 3)
        log.info("model_loaded", model=known.name, engine=known.engine, took_s=took_s)

    def _keep(self, known: KnownModel, intake: Intake) -> None:
        with self._lock:
            self._loaded[known.identity] = intake
            while len(self._loaded) > MAX_LOADED:
                self._loaded.popitem(last=False)
