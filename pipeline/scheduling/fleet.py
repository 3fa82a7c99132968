"""The workers that are alive, as their heartbeats tell it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import msgpack
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.ledger.keys import decode_queue, model_slug, prefill_queue

SUSPECT_S = 3.0
DEAD_S = 5.0


class Role(StrEnum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


class TierLoads(BaseModel):
    """Bytes that a worker's loads got from a tier since it started, and the seconds they took."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    num_bytes: int = 0
    seconds: float = 0.0


class WorkerState(BaseModel):
    """One heartbeat. Counts are sequences unless the name says blocks or tokens."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    worker: str
    node: str
    role: Role
    model: str
    namespace: str
    queues: tuple[str, ...]
    capacity: int
    is_draining: bool = False
    is_stuck: bool = False  # its step loop does not come back
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_spills: int = 0
    num_prefetched_blocks: int = 0
    load_reasons: dict[str, int] = {}
    tier_loads: dict[str, TierLoads] = {}
    max_ahead_tokens: int = 0  # prompt tokens that may be released to it and not be computed yet
    prefill_tokens_per_s: float = 0.0  # what full steps would come to at most; 0: not known yet
    measured_prefill_tokens_per_s: float = 0.0  # of late steps as they were; 0: there was none
    peer_address: str = ""  # where other nodes pull KV blocks from; empty: nowhere
    build: str = ""  # a digest of weights, layout and program; equal ones answer alike
    engine: str = ""
    model_path: str = (
        ""  # its directory, or the script's file, on the worker's machine; empty: none
    )
    text_digest: str = ""  # of its tokenizer and template; equal ones read alike
    model_aliases: tuple[str, ...] = ()  # further names that clients may use
    max_context: int = 0  # tokens of prompt and answer together

    @property
    def slug(self) -> str:
        """Its model in names of queues."""
        return model_slug(self.model)

    @property
    def can_prefill(self) -> bool:
        """Serves its model's prefill queue."""
        return self.role is not Role.DECODE

    @property
    def can_decode(self) -> bool:
        """Serves its node's decode queue."""
        return self.role is not Role.PREFILL


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers by name, with the age of their last heartbeat in seconds."""

    workers: Mapping[str, WorkerState]
    ages_s: Mapping[str, float]

    @classmethod
    def decode(cls, beats: Mapping[bytes, bytes], now_ms: int) -> Self:
        """Read the `workers` hash of the store at its own time."""
        workers: dict[str, WorkerState] = {}
        ages_s: dict[str, float] = {}
        for name, beat in beats.items():
            beat_ms, state_json = _unpack(beat)
            workers[name.decode()] = _read_state(name.decode(), state_json)
            ages_s[name.decode()] = (now_ms - beat_ms) / 1000
        return cls(workers, ages_s)

    def without(self, worker: str) -> Fleet:
        """The fleet that is left when a worker is gone."""
        workers = {name: state for name, state in self.workers.items() if name != worker}
        return Fleet(workers, self.ages_s)

    def without_node(self, node: str) -> Fleet:
        """The fleet that is left when a node is gone."""
        workers = {name: state for name, state in self.workers.items() if state.node != node}
        return Fleet(workers, self.ages_s)

    def of_model(self, slug: str) -> Fleet:
        """The workers of one model."""
        workers = {name: state for name, state in self.workers.items() if state.slug == slug}
        return Fleet(workers, self.ages_s)

    def fingerprint(self, model: str) -> str:
        """What answers for a model now: another one where weights or program are others; "" nobody."""
        workers = self.workers.values()
        builds = {state.build for state in workers if state.model == model and state.build}
        if not builds:
            return ""
        return "fp_" + hashlib.sha256(" ".join(sorted(builds)).encode()).hexdigest()[:10]

    @property
    def models(self) -> dict[str, str]:
        """Names of models that have a worker, alive or not, by slug."""
        return {state.slug: state.model for state in self.workers.values() if state.model}

    def usable(self, slug: str | None = None) -> list[WorkerState]:
        """Workers that may get new work: heard of lately, able to, and not on their way out.

        With a slug, those of that model.
        """
        return [
            state
            for name, state in self.workers.items()
            if self.ages_s[name] < SUSPECT_S
            and not (state.is_draining or state.is_stuck)
            and (slug is None or state.slug == slug)
        ]

    @property
    def nodes(self) -> set[str]:
        """Nodes that have a worker, alive or not."""
        return {state.node for state in self.workers.values() if state.node}

    @property
    def num_prefill(self) -> int:
        """Usable workers that serve the prefill queue."""
        return sum(state.can_prefill for state in self.usable())

    @property
    def num_decode(self) -> int:
        """Usable workers that serve a decode queue."""
        return sum(state.can_decode for state in self.usable())

    @property
    def stuck(self) -> list[str]:
        """Workers whose engine does not come back."""
        return sorted(name for name, state in self.workers.items() if state.is_stuck)

    def unpaired(self) -> list[str]:
        """See `find_unpaired`, of all usable workers."""
        return find_unpaired(self.usable())

    @property
    def ready(self) -> bool:
        """A request that comes now can be served to its end."""
        return self.num_decode > 0

    def served_queues(self) -> set[str]:
        """Queues that a living worker consumes, a draining one included, a stuck one not."""
        return {
            queue
            for name, state in self.workers.items()
            if self.ages_s[name] < DEAD_S and not state.is_stuck
            for queue in state.queues
        }

    def prefill_tokens_per_s(self, queue: str) -> float:
        """Speed of all workers of a queue together; 0: not known."""
        return sum(state.prefill_tokens_per_s for state in self.usable() if queue in state.queues)


EMPTY_FLEET = Fleet({}, {})


def by_decode_queue(workers: Iterable[WorkerState]) -> dict[str, list[WorkerState]]:
    """The decode workers among these by their queue, which is one model's on one node."""
    queues: dict[str, list[WorkerState]] = {}
    for state in workers:
        if state.can_decode:
            queues.setdefault(decode_queue(state.slug, state.node), []).append(state)
    return queues


def find_unpaired(workers: Collection[WorkerState]) -> list[str]:
    """Prefill workers whose KV blocks no decode node can read: other weights or layout."""
    readable = {
        (states[0].slug, frozenset(state.namespace for state in states))
        for states in by_decode_queue(workers).values()
    }
    return sorted(
        state.worker
        for state in workers
        if state.role is Role.PREFILL and (state.slug, frozenset({state.namespace})) not in readable
    )


def _unpack(beat: bytes) -> tuple[int, bytes]:
    """When it was heard, in ms of the store's clock, and what it said; nothing where it has another form."""
    try:
        beat_ms, state_json = msgpack.unpackb(beat, raw=True)
        return int(beat_ms), bytes(state_json)
    except (ValueError, TypeError, msgpack.UnpackException):
        return 0, b""


def _read_state(name: str, state_json: bytes) -> WorkerState:
    """A heartbeat; one of another build that we cannot read gets no new work from us.

    It stays on the list, so that its requests are taken over when its lease runs out.
    """
    try:
        return WorkerState.model_validate_json(state_json)
    except ValidationError:
        return WorkerState(
            worker=name,
            node="",
            role=Role.BOTH,
            model="",
            namespace="unreadable",
            queues=(),
            capacity=0,
            is_draining=True,
        )


def node_of(worker: str) -> str:
    """The node in a worker's full name, `name@node#start`; empty if there is none."""
    return worker.partition("@")[2].partition("#")[0]


def queues_of(role: Role, slug: str, node: str) -> tuple[str, ...]:
    """The Celery queues of a worker."""
    shared, own = prefill_queue(slug), decode_queue(slug, node)
    return {
        Role.PREFILL: (shared,),
        Role.DECODE: (own,),
        Role.BOTH: (shared, own),
    }[role]
