"""Models are found by name, and loaded when they are first needed, once and never for long in the way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from pipeline.errors import StoreUnavailable
from pipeline.intake.build import AnswerKind, Caller, Generation, Intake
from pipeline.intake.chat_template import CHATML, ChatTemplate
from pipeline.intake.errors import InvalidField, ModelFilesUnusable, TokenizerUnusable, UnknownModel
from pipeline.intake.known_models import KnownModel
from pipeline.intake.model_catalog import MAX_LOADED, ModelCatalog
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.scheduling.fleet import EMPTY_FLEET, Fleet, Role, WorkerState

A, B = KnownModel("a", "digest", aliases=("first",)), KnownModel("b", "digest")
LIMIT_S = 10.0


@dataclass
class Watch:
    """Who is seen, and who would be seen by another look; None: Redis is away."""

    known_fleet: Fleet = EMPTY_FLEET
    coming: Fleet | None = EMPTY_FLEET

    async def fleet(self, max_age_s: float) -> Fleet:
        assert max_age_s < 1.0, "a worker that has just come"
        if self.coming is None:
            raise StoreUnavailable("away")
        self.known_fleet = self.coming
        return self.coming


@dataclass
class Shelf:
    """Loads models whose files are all there but those of `broken`; notes what it was asked for."""

    broken: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    fault: Exception | None = None
    is_asked: threading.Event = field(default_factory=threading.Event)
    may_load: threading.Event = field(default_factory=threading.Event)

    def load(self, known: KnownModel) -> Intake:
        self.asked.append(known.name)
        self.is_asked.set()
        assert self.may_load.wait(LIMIT_S)
        if known.name in self.broken:
            raise ModelFilesUnusable(Path(known.name), "gone")
        if self.fault is not None:
            raise self.fault
        return Intake(ByteVocabulary(), ChatTemplate(CHATML), known.name)


@dataclass
class Desk:
    catalog: ModelCatalog
    watch: Watch
    shelf: Shelf
    encoding: ThreadPoolExecutor

    async def build(self, model: object, **fields: object) -> Generation:
        body = {"model": model, "prompt": "x", **fields}
        return await self.catalog.run(
            self.encoding, lambda: self.catalog.build(AnswerKind.COMPLETION, body, Caller())
        )


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    watch, shelf = Watch(), Shelf()
    shelf.may_load.set()
    catalog = ModelCatalog([A, B], watch, shelf.load)
    with ThreadPoolExecutor(1) as encoding:
        yield Desk(catalog, watch, shelf, encoding)
    catalog.close()


def announcing(*names: str) -> Fleet:
    states = {
        name: WorkerState(
            worker=name, node="n", role=Role.BOTH, model=name, namespace="s", queues=(),
            capacity=1, engine="digest", max_context=512,
        )
        for name in names
    }  # fmt: skip
    return Fleet(states, dict.fromkeys(states, 0.0))


async def test_each_model_is_loaded_once_when_it_is_first_needed(desk: Desk) -> None:
    answers = [await desk.build(name) for name in ("a", "first", "b", "a")]

    assert desk.shelf.asked == ["a", "b"]
    assert [generation.model for generation in answers] == ["a", "first", "b", "a"]
    assert [item.model for answer in answers for item in answer.requests] == ["a", "a", "b", "a"]


async def test_a_model_that_loads_keeps_no_request_to_another_waiting(desk: Desk) -> None:
    await desk.build("a")
    desk.shelf.may_load.clear()
    desk.shelf.is_asked.clear()
    waiting = [asyncio.create_task(desk.build("b")) for _ in range(3)]
    assert await asyncio.to_thread(desk.shelf.is_asked.wait, LIMIT_S)

    assert (await asyncio.wait_for(desk.build("a"), LIMIT_S)).model == "a"
    assert not any(task.done() for task in waiting)
    desk.shelf.may_load.set()
    assert [generation.model for generation in await asyncio.gather(*waiting)] == ["b"] * 3
    assert desk.shelf.asked == ["a", "b"], "those who want the same wait for one load"


async def test_a_model_that_cannot_be_loaded_is_refused_and_not_tried_at_once_again(
    desk: Desk,
) -> None:
    desk.shelf.broken = {"b"}
    for _ in range(2):
        with pytest.raises(TokenizerUnusable) as refused:
            await desk.build("b")
    assert (refused.value.status, refused.value.code) == (503, "model_unusable")
    assert desk.shelf.asked == ["b"]
    assert (await desk.build("a")).model == "a"


async def test_files_that_no_library_can_read_are_refused_too(desk: Desk) -> None:
    desk.shelf.fault = Exception("a plain one, as the tokenizers library raises")
    with pytest.raises(TokenizerUnusable):
        await desk.build("b")


async def test_a_model_that_has_just_come_is_found_by_another_look(desk: Desk) -> None:
    with pytest.raises(UnknownModel):
        await desk.build("c")
    desk.watch.coming = announcing("c")
    assert (await desk.build("c")).model == "c"


async def test_a_name_that_nobody_knows_is_unknown_while_redis_is_away(desk: Desk) -> None:
    desk.watch.coming = None
    with pytest.raises(UnknownModel):
        await desk.build("c")


@pytest.mark.parametrize("model", [None, "", 5, ["a"]])
async def test_a_name_that_is_none_is_an_invalid_field(desk: Desk, model: object) -> None:
    with pytest.raises(InvalidField) as refused:
        await desk.build(model)
    assert refused.value.param == "model"


def announcing_c(**fields: object) -> Fleet:
    (state,) = announcing("c").workers.values()
    return Fleet({"c": state.model_copy(update=fields)}, {"c": 0.0})


async def test_a_model_with_other_files_is_loaded_anew(desk: Desk) -> None:
    desk.watch.known_fleet = announcing_c(text_digest="1")
    await desk.build("c")
    desk.watch.known_fleet = announcing_c(text_digest="2")
    await desk.build("c")
    assert desk.shelf.asked == ["c", "c"]


async def test_a_model_that_lies_elsewhere_or_has_another_name_is_not_loaded_anew(
    desk: Desk,
) -> None:
    desk.watch.known_fleet = announcing_c(text_digest="1", model_path="/here")
    await desk.build("c")
    desk.watch.known_fleet = announcing_c(
        text_digest="1", model_path="/there", model_aliases=("third",)
    )
    assert (await desk.build("third")).requests[0].model == "c"
    assert desk.shelf.asked == ["c"]


async def test_files_that_nobody_tells_of_are_others_where_they_lie_elsewhere(desk: Desk) -> None:
    desk.watch.known_fleet = announcing_c()
    await desk.build("c")
    desk.watch.known_fleet = announcing_c(model_path="/moved")
    await desk.build("c")
    assert desk.shelf.asked == ["c", "c"]


async def test_so_many_are_kept_and_the_one_used_longest_ago_goes(desk: Desk) -> None:
    names = [f"m{number}" for number in range(MAX_LOADED)]
    desk.watch.known_fleet = announcing(*names)
    for name in [*names, "m0", "a"]:
        await desk.build(name)
    desk.shelf.asked.clear()
    for name in ("m0", "m2", "m1"):
        await desk.build(name)
    assert desk.shelf.asked == ["m1"]


async def test_the_context_is_told_by_workers_or_by_a_model_that_is_loaded(desk: Desk) -> None:
    assert desk.catalog.max_context(replace(B, max_context=99)) == 99
    assert desk.catalog.max_context(B) is None
    assert desk.shelf.asked == [], "who lists models loads none"
    await desk.build("b")
    assert desk.catalog.max_context(B) == 512


async def test_what_has_answered_once_has_a_vocabulary_or_is_refused(desk: Desk) -> None:
    assert (await desk.catalog.vocabulary("a")).max_context == 512
    with pytest.raises(TokenizerUnusable):
        await desk.catalog.vocabulary("gone")
