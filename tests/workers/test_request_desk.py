"""The desk, the sink and the engine on a real ledger: each request runs once, at its newest attempt."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pipeline.intake.grammar import GrammarBook, json_schema_grammar
from pipeline.intake.vocabulary import ByteVocabulary
from pipeline.ledger.admission import AdmissionLimits
from pipeline.ledger.claim import ClaimedRequest, TailHint
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.protocol.request import Request
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord, unpack_records
from pipeline.tasks.results import TaskResult
from tests.flow.rig import wait_until
from workers.kv_mover import NoCache
from workers.models.digest import DigestRunner
from workers.request_desk import RequestDesk
from workers.sequence import Sequence
from workers.settings import EngineSettings
from workers.step_loop import Engine
from workers.token_grammar import TokenGrammar
from workers.token_sink import TokenSink

QUEUE = "decode.m.a"
STEP_MS = 5.0
BOOK = GrammarBook(ByteVocabulary())


@dataclass
class Slip:
    """A ticket that remembers."""

    admitted: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    results: list[TaskResult] = field(default_factory=list)

    def on_admitted(self) -> None:
        self.admitted.set()

    def on_done(self, result: TaskResult) -> None:
        self.results.append(result)
        self.done.set()

    def outcome(self) -> str:
        assert self.done.wait(10)
        assert len(self.results) == 1
        return self.results[0]["outcome"]


@dataclass
class Office:
    """A worker without Celery."""

    client: Any
    ledger: WorkerLedger
    desk: RequestDesk
    sink: TokenSink
    engine: Engine

    def open(self, request_id: str = "r1") -> Slip:
        slip = Slip()
        self.desk.open(request_id, slip)
        return slip

    def records(self, request_id: str = "r1") -> list[TokenRecord]:
        return list(unpack_records(self.client.get(f"tokens:{request_id}"), None))

    def num_logged(self, request_id: str = "r1") -> int:
        return int(self.client.strlen(f"tokens:{request_id}")) // 4


def never_hand_over(sequence: Sequence, tail: TailHint | None) -> bool:
    raise AssertionError(f"{sequence.request_id} is not to be handed over")


def start_grammar(claim: ClaimedRequest) -> TokenGrammar:
    return BOOK.start(claim.sampling.grammar, [record.token_id for record in claim.logged])


@pytest.fixture
def office(redis_url: str) -> Iterator[Office]:
    client = connect(redis_url)
    ledger = WorkerLedger(client, max_attempts=3, retention_s=60)
    desk = RequestDesk(
        "w1",
        (QUEUE,),
        False,
        ledger,
        lambda salt, own: f"{salt}{own}".encode().ljust(32, b"."),
        start_grammar,
    )
    sink = TokenSink("w1", ledger, desk, never_hand_over, lambda _: None)
    runner = DigestRunner(step_delay_ms=STEP_MS)
    engine = Engine(runner, EngineSettings(num_blocks=256), NoCache(), sink, lambda _: None)
    desk.engine, desk.sink = engine, sink
    engine.start()
    assert engine.ready.wait(10)
    sink.start()
    yield Office(client, ledger, desk, sink, engine)
    engine.stop(0)
    sink.close()
    client.close()


@pytest.fixture
async def gateway(redis_url: str) -> AsyncIterator[ClientLedger]:
    connection = connect_async(redis_url)
    yield ClientLedger(connection, limits=AdmissionLimits(9), retention_s=60)
    await connection.aclose()


async def submit(gateway: ClientLedger, max_tokens: int = 400, grammar: str = "") -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, grammar=grammar)
    request = Request("r1", "m", [65, 66], sampling)
    await gateway.submit(request, QUEUE, "gateway:g")


async def test_a_request_runs_to_its_end(office: Office, gateway: ClientLedger) -> None:
    await submit(gateway, max_tokens=5)
    slip = office.open()

    assert slip.outcome() == "finished"
    assert slip.admitted.is_set()
    assert slip.results[0]["output_tokens"] == office.num_logged() == 5
    assert office.desk.num_open == 0


async def test_a_request_comes_with_its_grammar(office: Office, gateway: ClientLedger) -> None:
    await submit(gateway, grammar=json_schema_grammar({"enum": ["yes"]}))

    assert office.open().outcome() == "finished"
    assert [record.token_id for record in office.records()] == list(b'"yes"')


async def test_a_grammar_that_cannot_be_had_fails_its_request(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway, grammar="no grammar")
    slip = office.open()

    assert slip.outcome() == "failed"
    assert slip.results[0]["ending"] == "error:internal_error"
    assert office.num_logged() == 0


async def test_a_message_that_comes_twice_runs_nothing_twice(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway, max_tokens=40)
    first = office.open()
    assert first.admitted.wait(10)
    second = office.open()

    assert second.outcome() == "ignored"
    assert first.outcome() == "finished"
    assert office.num_logged() == 40


async def test_an_unknown_request_is_done_at_once(office: Office) -> None:
    assert office.open("nobody").outcome() == "ignored"


async def test_a_worker_taken_for_dead_gets_its_request_back_at_the_newer_attempt(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway, max_tokens=100)
    old = office.open()
    wait_until(lambda: office.num_logged() >= 5)
    assert office.ledger.requeue_lost("r1", "w1", QUEUE) is not None
    new = office.open()

    assert old.outcome() == "superseded"
    assert new.outcome() == "finished"
    assert office.num_logged() == 100
    assert (office.client.hget("request:r1", "attempt") or b"").decode() == "2"


class Overtaken:
    """The desk's lock, before which a claim of another thread comes."""

    def __init__(self, desk: RequestDesk, attempt: int) -> None:
        self._lock, self._desk, self._attempt = desk._lock, desk, attempt

    def __enter__(self) -> None:
        self._lock.acquire()
        self._desk._attempts["r1"] = self._attempt

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def test_word_of_an_old_attempt_does_not_let_go_of_the_one_that_came_meanwhile(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway)
    slip = office.open()
    wait_until(lambda: office.num_logged() >= 1)
    office.desk._lock = Overtaken(office.desk, 2)  # type: ignore[assignment]
    office.desk.on_superseded("r1", 1)

    assert not slip.done.is_set()
    assert office.desk.num_open == 1


async def test_a_request_that_was_taken_away_stops_here(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway)
    slip = office.open()
    wait_until(lambda: office.num_logged() >= 3)
    assert office.ledger.requeue_lost("r1", "w1", QUEUE) is not None

    assert slip.outcome() == "superseded"
    wait_until(lambda: office.engine.stats().running == 0)


async def test_a_log_that_the_store_lost_is_written_again_whole(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway, max_tokens=60)
    slip = office.open()
    wait_until(lambda: office.num_logged() >= 10)
    office.client.delete("tokens:r1")

    assert slip.outcome() == "finished"
    assert office.num_logged() == 60


async def test_a_cancelled_request_ends_within_a_few_steps(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway)
    slip = office.open()
    wait_until(lambda: office.num_logged() >= 3)
    await gateway.cancel("r1")

    assert slip.outcome() == "ignored"
    assert slip.results[0]["ending"] == "cancelled"
    assert office.num_logged() < 40


async def test_what_is_given_back_can_be_claimed_by_another(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway)
    slip = office.open()
    wait_until(lambda: office.num_logged() >= 3)
    left = office.engine.stop(0)
    office.desk.give_back(left, QUEUE)

    assert slip.outcome() == "superseded"
    assert (office.client.hget("request:r1", "state") or b"").decode() == "queued"
    assert (office.client.hget("request:r1", "losses") or b"").decode() == "0"


def beat(office: Office) -> None:
    """A sign of life, as the worker's heartbeat thread gives it."""
    told = office.ledger.beat("w1", 4.0, "{}")
    office.desk.compare(told.num_owned)


async def test_a_request_whose_end_the_store_has_forgotten_is_given_back(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway, max_tokens=20)
    slip = office.open()
    wait_until(lambda: office.num_logged() >= 3)
    names = ("request:r1", "tokens:r1", "running:w1", "deadlines")
    before = {name: office.client.dump(name) for name in names}
    assert slip.outcome() == "finished"
    whole = office.records()
    # A replica that took over did not have the last writes yet.
    for name, data in before.items():
        office.client.restore(name, 0, data, replace=True)
    assert (office.client.hget("request:r1", "state") or b"").decode() == "running"

    for _ in range(3):
        beat(office)

    assert (office.client.hget("request:r1", "state") or b"").decode() == "queued"
    assert (office.client.hget("request:r1", "losses") or b"").decode() == "0"
    assert office.open().outcome() == "finished"
    assert office.records() == whole


async def test_what_runs_here_is_never_taken_for_a_stray(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway, max_tokens=60)
    slip = office.open()
    while not slip.done.is_set():
        beat(office)
        office.desk.compare(9)  # a count that cannot be ours: they are looked at one by one

    assert slip.outcome() == "finished"
    assert (office.client.hget("request:r1", "attempt") or b"").decode() == "1"


async def test_a_request_of_a_newer_build_is_failed_at_once(
    office: Office, gateway: ClientLedger
) -> None:
    await submit(gateway)
    office.client.hset("request:r1", "sampling", '{"max_tokens": 8, "of_2031": 1}')

    assert office.open().outcome() == "ignored"
    ending = (office.client.hget("request:r1", "ending") or b"").decode()
    assert ending == "error:internal_error"
    assert office.desk.num_open == 0
