"""One screen of what the pipeline does now, from its ledger and its heartbeats."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline.cli.tier_table import NOTHING, plain_table, tier_table
from pipeline.ledger.backlog import read_backlog_now
from pipeline.ledger.dead_letters import FaultLog
from pipeline.ledger.keys import LEADER, lease_key, running_key
from pipeline.ledger.node_board import NodeBoard
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect, store_errors
from pipeline.scheduling.fleet import DEAD_S, SUSPECT_S, Fleet, WorkerState
from pipeline.scheduling.node_report import NodeReport

NUM_FAULTS = 8


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker: its heartbeat, what it owns, and how long its lease lives. Ages in seconds."""

    name: str
    state: WorkerState
    age_s: float
    lease_ms: int
    num_owned: int

    @property
    def health(self) -> str:
        """How the scheduler sees it."""
        if self.lease_ms <= 0 or self.age_s >= DEAD_S:
            return "dead"
        if self.state.is_stuck:
            return "stuck"
        if self.state.is_draining:
            return "draining"
        return "suspect" if self.age_s >= SUSPECT_S else "ok"


@dataclass(frozen=True, slots=True)
class QueueLine:
    """One queue: requests that wait, and messages in the broker."""

    name: str
    num_waiting: int
    num_messages: int
    is_served: bool


@dataclass(frozen=True, slots=True)
class Status:
    """All of it at one moment of the store's clock (Unix time in ms)."""

    now_ms: int
    leader: str
    workers: list[WorkerLine]
    queues: list[QueueLine]
    num_open: int
    num_held: int
    num_dead_letters: int
    counters: Mapping[str, int]
    nodes: list[NodeReport]
    faults: list[Mapping[str, Any]]


def read_status(redis_url: str) -> Status:
    """Look once. Raises `StoreUnavailable`."""
    client: Any = connect(redis_url)
    try:
        overview = LedgerOverview(client)
        now_ms, beats = overview.beats()
        fleet = Fleet.decode(beats, now_ms)
        served = fleet.served_queues()
        backlog = read_backlog_now(client)
        with store_errors():
            workers = [
                WorkerLine(
                    name,
                    state,
                    fleet.ages_s[name],
                    int(client.pttl(lease_key(name))),
                    int(client.scard(running_key(name))),
                )
                for name, state in sorted(fleet.workers.items())
            ]
            queues = [
                QueueLine(
                    queue,
                    backlog.waiting.get(queue, 0),
                    overview.num_messages(queue),
                    queue in served,
                )
                for queue in sorted({*backlog.waiting, *served})
            ]
            return Status(
                now_ms=now_ms,
                leader=(client.get(LEADER) or b"").decode(),
                workers=workers,
                queues=queues,
                num_open=backlog.num_open,
                num_held=backlog.num_held,
                num_dead_letters=backlog.num_dead_letters,
                counters=backlog.events,
                nodes=NodeReport.decode(NodeBoard(client).read(fleet.nodes)),
                faults=FaultLog(client).last(NUM_FAULTS),
            )
    finally:
        client.close()


def as_screen(status: Status) -> RenderableType:
    """Tables for a terminal; without one rich draws them in plain text."""
    counts = "  ".join(f"{name} {count}" for name, count in sorted(status.counters.items()))
    head = Text(
        f"open {status.num_open} (held back {status.num_held})  "
        f"dead letters {status.num_dead_letters}  {counts}\n"
        f"upkeep by {status.leader or 'nobody'}"
    )
    tiers = tier_table(status.nodes)
    return Group(head, _workers(status), _queues(status), tiers, _faults(status))


def _workers(status: Status) -> Table:
    columns = (
        "worker",
        "model",
        "role",
        "health",
        "lease s",
        "owns",
        "running",
        "places",
        "HBM blocks",
    )
    table = plain_table("workers", *columns, "prefill tok/s")
    for line in status.workers:
        state = line.state
        table.add_row(
            line.name.partition("#")[0],
            state.model,
            str(state.role),
            Text(line.health, style="green" if line.health == "ok" else "bold red"),
            f"{line.lease_ms / 1000:.1f}" if line.lease_ms > 0 else NOTHING,
            str(line.num_owned),
            f"{state.num_running}+{state.num_waiting}",
            str(state.capacity),
            f"{state.num_used_blocks} used, {state.num_cached_blocks} cached of {state.num_blocks}",
            _rate(state.measured_prefill_tokens_per_s),
        )
    return table


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s else NOTHING


def _queues(status: Status) -> Table:
    table = plain_table("queues", "queue", "served", "waiting", "messages")
    for line in status.queues:
        served = "yes" if line.is_served else NOTHING
        table.add_row(line.name, served, str(line.num_waiting), str(line.num_messages))
    return table


def _faults(status: Status) -> Table:
    table = plain_table("last faults", "when", "what", "details")
    for fault in status.faults:
        details = "  ".join(f"{k} {v}" for k, v in fault.items() if k not in ("at_ms", "kind"))
        table.add_row(shown_time(int(fault["at_ms"])), str(fault["kind"]), details)
    return table


def shown_time(at_ms: int) -> str:
    """A moment of the store's clock in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ms / 1000))
