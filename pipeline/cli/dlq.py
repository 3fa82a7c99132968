"""`pointsman dlq`: what was given up, and how to try it again. Prompts are never shown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.table import Table

from pipeline.cli.errors import CommandRefused
from pipeline.cli.status import shown_time
from pipeline.ledger.dead_letters import DeadLetter, DeadLetters
from pipeline.ledger.keys import model_slug
from pipeline.ledger.overview import LedgerOverview
from pipeline.ledger.store import connect
from pipeline.ledger.worker_ledger import WorkerLedger
from pipeline.scheduling.fleet import Fleet
from pipeline.scheduling.router import choose_entry
from pipeline.tasks.app import make_app
from pipeline.tasks.publisher import Publisher

REVIVED_EXPIRY_S = 7 * 86_400


class DeadLetterUnknown(CommandRefused):
    """The list holds no such request, or nothing is left of it."""

    def __init__(self, request_id: str) -> None:
        super().__init__(request_id)
        self.request_id = request_id

    def __str__(self) -> str:
        return f"{self.request_id} is no dead letter, or its prompt is kept no longer"


@contextmanager
def connected(redis_url: str) -> Iterator[Any]:
    """A client for one command."""
    client = connect(redis_url)
    try:
        yield client
    finally:
        client.close()


def list_letters(redis_url: str) -> Table:
    """All that are known, the newest first. Raises `StoreUnavailable`."""
    table = Table(box=None, pad_edge=False)
    for column in ("request", "ended", "tenant", "prompt tokens", "lost workers", "can retry"):
        table.add_column(column, no_wrap=True)
    with connected(redis_url) as client:
        letters = DeadLetters(client)
        for request_id in letters.ids():
            letter = letters.find(request_id)
            if letter is None:
                table.add_row(request_id, "-", "-", "-", "-", "no")
                continue
            table.add_row(
                request_id,
                shown_time(letter.ended_ms),
                letter.tenant,
                str(letter.num_prompt_tokens),
                str(len(letter.workers)),
                "yes" if letter.is_kept else "no",
            )
    return table


def show_letter(redis_url: str, request_id: str) -> str:
    """Everything about one but its prompt, a line each.

    Raises:
        DeadLetterUnknown: it is not in the list.
        StoreUnavailable: Redis does not answer.
    """
    with connected(redis_url) as client:
        letter = DeadLetters(client).find(request_id)
    if letter is None:
        raise DeadLetterUnknown(request_id)
    return "\n".join(f"{name:<14} {value}" for name, value in _lines(letter))


def _lines(letter: DeadLetter) -> list[tuple[str, object]]:
    return [
        ("request", letter.request_id),
        ("model", letter.model),
        ("tenant", letter.tenant),
        ("submitted", shown_time(letter.created_ms)),
        ("ended", shown_time(letter.ended_ms)),
        ("ending", letter.ending),
        ("priority", letter.priority),
        ("attempts", letter.attempt),
        ("lost workers", ", ".join(letter.workers)),
        ("prompt tokens", letter.num_prompt_tokens),
        ("output bytes", letter.num_log_bytes),
        ("sampling", letter.sampling_json),
        ("can retry", "yes" if letter.is_kept else "no"),
    ]


def retry_letter(redis_url: str, request_id: str) -> str:
    """Queue one again with its output so far; the queue.

    Raises:
        DeadLetterUnknown: nothing is left to be tried.
        StoreUnavailable: Redis does not answer; upkeep sends the message if it got that far.
    """
    with connected(redis_url) as client:
        letter = DeadLetters(client).find(request_id)
        if letter is None:
            raise DeadLetterUnknown(request_id)
        now_ms, beats = LedgerOverview(client).beats()
        queue = choose_entry(Fleet.decode(beats, now_ms), model_slug(letter.model))
        ledger = WorkerLedger(client, max_attempts=1, retention_s=1)
        messages = ledger.revive(request_id, queue, REVIVED_EXPIRY_S)
        if messages is None:
            raise DeadLetterUnknown(request_id)
        with make_app(redis_url) as app:
            Publisher(app).publish_all(messages)
    return queue


def drop_letter(redis_url: str, request_id: str) -> None:
    """Forget one.

    Raises:
        DeadLetterUnknown: it is not in the list.
        StoreUnavailable: Redis does not answer.
    """
    with connected(redis_url) as client:
        if not DeadLetters(client).drop(request_id):
            raise DeadLetterUnknown(request_id)
