"""Case C078 in parts: when a stopping gateway may end."""

from __future__ import annotations

import pytest

from gateway.drain import LAST_WORDS_S, Drain
from gateway.http_errors import Draining


async def test_an_idle_gateway_ends_at_once() -> None:
    drain = Drain(30.0)
    assert not drain.advance(0.0)
    drain.begin(1.0)
    assert drain.advance(1.0)


async def test_running_work_is_waited_for_until_the_deadline_and_its_last_words() -> None:
    drain = Drain(30.0)
    with drain.active():
        drain.begin(0.0)
        assert not drain.advance(29.9)
        assert not drain.deadline.is_set()
        assert not drain.advance(30.0)
        assert drain.deadline.is_set()
        assert drain.advance(30.0 + LAST_WORDS_S)
    assert drain.advance(1.0)


async def test_new_work_is_refused_from_the_first_signal_on() -> None:
    drain = Drain(30.0)
    drain.refuse_new_work()
    drain.begin(0.0)
    with pytest.raises(Draining):
        drain.refuse_new_work()
