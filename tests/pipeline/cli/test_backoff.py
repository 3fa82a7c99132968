"""The wait before a dead part starts again."""

from __future__ import annotations

from pipeline.cli.backoff import Backoff


def test_the_wait_doubles_up_to_thirty_seconds() -> None:
    backoff = Backoff()
    assert [backoff.next_delay_s(0.1) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]


def test_a_minute_of_life_starts_the_waits_anew() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_delay_s(1.0)
    assert backoff.next_delay_s(60.0) == 0.5


def test_it_never_gives_up() -> None:
    backoff = Backoff()
    assert {backoff.next_delay_s(0.0) for _ in range(5_000)} == {0.5, 1, 2, 4, 8, 16, 30}
