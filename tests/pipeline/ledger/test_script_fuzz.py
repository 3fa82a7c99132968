"""Any order of calls, right ones, stale ones and nonsense: the ledger's keys always agree.

`pytest --hypothesis-profile=long --timeout=0` runs twenty times as many, others each time.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from pipeline.errors import Overloaded, RequestExists
from pipeline.ledger.claim import ClaimedRequest, ClaimRefusal, TailHint
from pipeline.ledger.client_ledger import ClientLedger
from pipeline.ledger.drain_orders import DrainOrder, DrainOrders
from pipeline.ledger.messages import QueueMessage
from pipeline.ledger.store import connect, connect_async
from pipeline.ledger.worker_ledger import LogWrite, WorkerLedger
from pipeline.protocol.failure import FailureCode
from tests.pipeline.ledger.ledger_acts import (
    LIMITS,
    QUEUES,
    WORKERS,
    acts,
    ids,
    of_model,
    queues,
    request_of,
    terms,
    usually,
    workers,
    written,
)
from tests.pipeline.ledger.ledger_truth import FINAL, LedgerTruth

COMMON = settings(
    deadline=None,
    suppress_health_check=list(HealthCheck),
    stateful_step_count=60,
    phases=[Phase.generate],  # what fails is a list of calls to read; shrinking takes minutes
)
QUICK = settings(COMMON, max_examples=40, derandomize=True)


class LedgerMachine(RuleBasedStateMachine):
    """Gateways, workers and upkeep, in no order; what is right is read from the store before."""

    url = ""
    runner: asyncio.Runner

    def __init__(self) -> None:
        super().__init__()
        self.store: Any = connect(self.url)
        self.store.flushall()
        self.ledger = WorkerLedger(self.store, max_attempts=3, retention_s=60, retry_pause_s=0.002)
        self.connection = connect_async(self.url)
        self.gateway = ClientLedger(self.connection, limits=LIMITS, retention_s=60)
        self.ended: dict[str, tuple[str, str, bytes]] = {}
        self.attempts: dict[str, int] = {}
        self.num_numbers = 0
        self.num_requests = 0
        self.truth = LedgerTruth(self.store)
        for worker in WORKERS:
            self.tell_places(worker)
        for queue in (*QUEUES, *QUEUES):
            self.num_requests += 1
            request = request_of(f"r{self.num_requests}", 60.0, 1, 8)
            self.runner.run(self.gateway.submit(request, queue, "gateway:g"))

    def teardown(self) -> None:
        try:
            self.end_all()
        finally:
            self.runner.run(self.connection.aclose())
            self.store.close()

    def aimed(self, name: int | str, *states: str) -> str:
        """The name of a request, maybe one that does not exist."""
        if isinstance(name, str):
            return name
        found = sorted(
            known for known, fields in self.truth.requests.items() if fields["state"] in states
        )
        return found[name % len(found)] if found else "r1"

    def queue_of(self, name: str, queue: str) -> str:
        """The queue, but of the request's model."""
        return of_model(self.field(name, "model"), queue)

    def tell_places(self, worker: str, **fields: object) -> None:
        role, served, places = WORKERS.get(worker, ("both", [], 1))
        state = {"role": role, "queues": served, "capacity": places}
        self.ledger.beat(worker, 60.0, json.dumps(state | fields))

    def field(self, name: str, field: str) -> str:
        return (self.store.hget(f"request:{name}", field) or b"").decode()

    def attempt_of(self, name: str) -> int:
        return int(self.field(name, "attempt") or 0)

    def sent(self, messages: list[QueueMessage] | None) -> None:
        """Whatever is to be sent is of a request that waits for just that message."""
        for name, queue, lane in messages or []:
            state = [self.field(name, field) for field in ("state", "queue", "lane")]
            assert state == ["queued", queue, str(lane)]

    @rule(name=ids, terms=terms, queue=queues, rate=st.sampled_from([0.0, 0.5, 1_000.0]))
    def submit(self, name: int | str, terms: dict[str, Any], queue: str, rate: float) -> None:
        if isinstance(name, int):
            self.num_requests += 1
            name = f"r{self.num_requests}"
        request = request_of(name, **terms)
        is_known = bool(self.store.exists(f"request:{name}"))
        try:
            queue = of_model(request.model, queue)
            self.sent(self.runner.run(self.gateway.submit(request, queue, "gateway:g", rate)))
            answer = "taken"
        except RequestExists:
            answer = "known"
        except Overloaded:
            answer = "refused"
        assert is_known == (answer == "known")

    @rule(name=ids, worker=workers, served=st.lists(queues, max_size=2), is_right=usually)
    def claim(self, name: int | str, worker: str, served: list[str], *, is_right: bool) -> None:
        name = self.aimed(name, "queued")
        state, owner, queue, log = (
            *(self.field(name, field) for field in ("state", "owner", "queue")),
            self.store.get(f"tokens:{name}") or b"",
        )
        if is_right:
            worker = next((one for one, (_, its, _) in WORKERS.items() if queue in its), worker)
            served = WORKERS.get(worker, ("", served, 0))[1]
        claimed = self.ledger.claim(name, worker, served)
        if isinstance(claimed, ClaimedRequest):
            assert (state == "queued" and queue in served) or (state, owner) == ("running", worker)
            assert claimed.attempt == self.attempt_of(name)
            assert len(claimed.logged) == len(log) // 4
        elif claimed is ClaimRefusal.TAKEN:
            assert state == "running"
        elif claimed in (ClaimRefusal.FINAL, ClaimRefusal.GONE):
            assert state in {*FINAL, ""}

    @rule(writes=st.lists(written, max_size=3, unique_by=lambda item: item[0]), worker=workers)
    def step(self, writes: list[tuple[int | str, int, int, int, str]], worker: str) -> None:
        aimed = {self.aimed(name, "running", "finished"): rest for name, *rest in writes}
        owners = [self.field(name, "owner") for name in aimed]
        worker = next(filter(None, owners), worker)
        calls, expected, stale = [], {}, set()
        for (name, write), owner in zip(aimed.items(), owners, strict=True):
            shift, beside, num_tokens, ending = write
            log = self.store.get(f"tokens:{name}") or b""
            offset = max(0, len(log) + beside)
            data = b"".join(self.number() for _ in range(num_tokens))
            calls.append(LogWrite(name, self.attempt_of(name) + shift, offset, data, ending, 0))
            is_late = self.field(name, "state") in FINAL and not ending
            if owner != worker or shift or not owner or is_late:
                stale.add(name)
            elif data and offset <= len(log) and self.field(name, "state") == "running":
                log = log[:offset] + data
            expected[name] = log
        reply = self.ledger.write_step(worker, calls)
        for name, log in expected.items():
            assert (self.store.get(f"tokens:{name}") or b"") == log
        assert {name for name, _ in reply.stale} == stale
        self.sent(reply.messages)

    def number(self) -> bytes:
        """A token that no other write has."""
        self.num_numbers += 1
        return self.num_numbers.to_bytes(4, "little")

    @rule(name=ids, worker=workers, shift=st.sampled_from([0, 0, 0, 1]), queue=queues)
    def hand_over(self, name: int | str, worker: str, shift: int, queue: str) -> None:
        name = self.aimed(name, "running", "finished")
        state, owner = self.field(name, "state"), self.field(name, "owner")
        worker = owner or worker
        attempt = self.attempt_of(name) + shift
        queue = self.queue_of(name, queue)
        messages = self.ledger.hand_over(name, worker, attempt, queue, TailHint(attempt, 3))
        assert (messages is not None) == (state == "running" and not shift)
        self.sent(messages)

    @rule(name=ids, worker=workers, shift=st.sampled_from([0, 1]))
    def write_scores(self, name: int | str, worker: str, shift: int) -> None:
        name = self.aimed(name, "running")
        is_right = self.field(name, "owner") == worker and not shift
        attempt = self.attempt_of(name) + shift
        assert self.ledger.write_scores(name, worker, attempt, b"score") == is_right

    @rule(name=ids, worker=workers, queue=queues, is_right=st.booleans())
    def give_back(self, name: int | str, worker: str, queue: str, *, is_right: bool) -> None:
        name = self.aimed(name, "running")
        owner = self.field(name, "owner")
        worker = owner if is_right and owner else worker
        messages = self.ledger.give_back(name, worker, self.queue_of(name, queue))
        assert messages is None or worker == owner
        self.sent(messages)

    @rule(
        worker=workers,
        places=st.sampled_from([None, None, 0, 1, 40]),
        ahead=st.sampled_from([0, 20]),
        fault=st.sampled_from(["", "", "", "is_draining", "is_stuck"]),
    )
    def beat(self, worker: str, places: int | None, ahead: int, fault: str) -> None:
        fields: dict[str, object] = {} if places is None else {"capacity": places}
        self.tell_places(
            worker, max_ahead_tokens=ahead, **fields, **({fault: True} if fault else {})
        )
        assert self.store.hexists("slots", worker) == (not fault)

    @rule(worker=workers, limit_s=st.sampled_from([0.0, 5.0]))
    def drain(self, worker: str, limit_s: float) -> None:
        order = DrainOrder(limit_s, comes_back=limit_s > 0)
        DrainOrders(self.store).give([worker], order)
        told = self.ledger.beat(worker, 60.0, json.dumps({"queues": [], "is_draining": True}))
        assert told.drain == order

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        is_owner = self.store.exists(f"running:{worker}")
        assert self.ledger.leave(worker) != is_owner
        assert not self.store.hexists("slots", worker)

    @rule(acts=acts)
    def work(self, acts: list[tuple[int, str]]) -> None:
        self.do(acts)

    def do(self, acts: list[tuple[int, str]]) -> None:
        """What workers do all day: claim, write a token, end or hand over."""
        for pick, act in acts:
            self.truth = LedgerTruth(self.store)
            if not self.truth.open_ids():
                return
            name = self.aimed(pick, "queued", "running")
            queue, owner = self.field(name, "queue"), self.field(name, "owner")
            attempt, log = self.attempt_of(name), self.store.get(f"tokens:{name}") or b""
            if self.field(name, "state") == "queued":
                for worker, (_, served, _) in WORKERS.items():
                    if queue in served:
                        assert not isinstance(
                            self.ledger.claim(name, worker, served), ClaimRefusal
                        ) or self.field(name, "state") in {"running", "cancelled"}
            elif act == "on":
                queue = self.queue_of(name, "decode.m.a")
                self.sent(self.ledger.hand_over(name, owner, attempt, queue, None))
            elif owner:
                write = LogWrite(name, attempt, len(log), self.number(), act, 0)
                reply = self.ledger.write_step(owner, [write])
                assert not reply.stale or self.field(name, "state") in FINAL
                assert not reply.short
                self.sent(reply.messages)

    @rule(acts=acts)
    def work_more(self, acts: list[tuple[int, str]]) -> None:
        """Twice as likely as another call."""
        self.do(acts)

    @rule(rounds=st.lists(st.tuples(acts, st.integers(0, 2), queues), min_size=1, max_size=4))
    def crash(self, rounds: list[tuple[list[tuple[int, str]], int, str]]) -> None:
        """Leases run out, and upkeep takes what those workers had; again and again."""
        for work, pick, queue in rounds:
            self.do(work)
            owners = sorted(LedgerTruth(self.store).members("running"))
            self.lose(owners[pick % len(owners)] if owners else "d", queue)

    def lose(self, worker: str, queue: str) -> None:
        self.store.delete(f"lease:{worker}")
        owned = [name.decode() for name in self.store.smembers(f"running:{worker}")]
        guilty = self.ledger.convict(worker)
        assert guilty is None or guilty in owned
        for name in owned:
            self.sent(self.ledger.requeue_lost(name, worker, self.queue_of(name, queue)))
        assert not self.store.exists(f"running:{worker}")
        assert self.ledger.leave(worker)
        self.tell_places(worker)
        self.sent(self.ledger.release())

    @rule(name=ids, worker=workers, queue=queues)
    def requeue_without_cause(self, name: int | str, worker: str, queue: str) -> None:
        name = self.aimed(name, "running")
        is_alive = self.store.exists(f"lease:{worker}")
        messages = self.ledger.requeue_lost(name, worker, self.queue_of(name, queue))
        assert not (is_alive and messages)
        self.sent(messages)

    @rule(name=ids, from_queue=queues, to_queue=queues)
    def place(self, name: int | str, from_queue: str, to_queue: str) -> None:
        name = self.aimed(name, "queued")
        from_queue, to_queue = (self.queue_of(name, queue) for queue in (from_queue, to_queue))
        self.sent(self.ledger.place(name, from_queue, to_queue))

    @rule(name=ids, is_gateway=st.booleans())
    def cancel(self, name: int | str, *, is_gateway: bool) -> None:
        name = self.aimed(name, "queued", "running")
        state = self.field(name, "state")
        if is_gateway:
            did = self.runner.run(self.gateway.cancel(name))
            assert did == (state in ("queued", "running"))
        else:
            assert (self.ledger.cancel(name) or "") == state

    @rule(name=ids, code=st.sampled_from(list(FailureCode)))
    def expire(self, name: int | str, code: FailureCode) -> None:
        name = self.aimed(name, "queued", "running")
        self.ledger.expire(name, code)

    @rule(name=ids, queue=queues)
    def revive(self, name: int | str, queue: str) -> None:
        name = self.aimed(name, "failed")
        state = self.field(name, "state")
        has_prompt = self.store.hexists(f"request:{name}", "prompt")
        messages = self.ledger.revive(name, self.queue_of(name, queue), 600)
        assert (messages is not None) == (state == "failed" and has_prompt)
        if messages is not None:
            self.ended.pop(name, None)
        self.sent(messages)

    @rule(name=ids, offset=st.sampled_from([0, 4, 1_000]))
    def watch(self, name: int | str, offset: int) -> None:
        name = self.aimed(name, "running", "finished")
        log = self.store.get(f"tokens:{name}") or b""
        replay = self.runner.run(self.gateway.watch(name, "gateway:h", offset))
        assert (replay is not None) == bool(self.store.exists(f"request:{name}"))
        assert replay is None or replay.data == log[offset:]

    @rule()
    def release(self) -> None:
        self.sent(self.ledger.release())
        truth = LedgerTruth(self.store)
        for model, held in truth.members("held").items():
            if held != truth.members("open")[f"model:{model}"]:
                continue
            served = {
                queue
                for worker, (_, served, _) in WORKERS.items()
                if self.store.hexists("slots", worker) and self.places_of(worker)
                for queue in served
            }
            waiting_for = {truth.requests[name]["queue"] for name in held}
            assert not waiting_for & served, "nobody runs, and somebody waits"

    def places_of(self, worker: str) -> int:
        beat = self.store.hget("workers", worker)
        return int(json.loads(msgpack.unpackb(beat)[1])["capacity"]) if beat else 0

    @invariant()
    def all_keys_agree(self) -> None:
        truth = self.truth = LedgerTruth(self.store)
        assert truth.faults() == [], truth.faults()
        for name, (state, ending, log) in self.ended.items():
            fields = truth.requests[name]
            assert (fields["state"], fields["ending"], truth.log(name)) == (state, ending, log)
        for name, fields in truth.requests.items():
            assert int(fields["attempt"]) >= self.attempts.get(name, 1)
            self.attempts[name] = int(fields["attempt"])
            if fields["state"] in FINAL:
                self.ended[name] = (fields["state"], fields["ending"], truth.log(name))

    def end_all(self) -> None:
        """Whatever happened, everything can be ended, and then nothing is left."""
        for name in LedgerTruth(self.store).open_ids():
            self.ledger.cancel(name)
            owner = self.field(name, "owner")
            if self.field(name, "state") == "running":
                write = LogWrite(name, self.attempt_of(name), 0, b"", "cancelled", 0)
                self.ledger.write_step(owner, [write])
        self.ledger.release()
        truth = LedgerTruth(self.store)
        assert truth.open_ids() == set()
        assert truth.faults() == [], truth.faults()
        assert truth.left_over() - {"jobs"} == set()


@pytest.fixture
def machine(redis_url: str) -> Any:
    """A machine on this Redis."""
    with asyncio.Runner() as runner:
        yield type("Machine", (LedgerMachine,), {"url": redis_url, "runner": runner})


def test_any_order_of_calls_leaves_the_ledger_whole(machine: Any) -> None:
    is_long = settings.get_current_profile_name() == "long"
    long = settings(COMMON, max_examples=settings().max_examples)
    run_state_machine_as_test(machine, settings=long if is_long else QUICK)
