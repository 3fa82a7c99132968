"""What a worker hears of its node's cache daemon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from redis import Redis

from pipeline.ledger.node_board import NodeBoard
from tiering.kvd.operator import KvdOperator
from workers.node_reporter import NodeReporter


@pytest.fixture
def purges() -> list[int]:
    return []


@pytest.fixture
def reporter(kvd: Any, purges: list[int]) -> Iterator[NodeReporter]:
    """Only its look at kvd is used: nothing is posted."""
    operator = KvdOperator(kvd.socket_path, "test")
    yield NodeReporter("node", operator, NodeBoard(Redis()), lambda: purges.append(1))
    operator.close()


def test_each_purge_is_passed_on_once_and_a_new_daemon_is_none(
    kvd: Any, reporter: NodeReporter, purges: list[int]
) -> None:
    reporter.report()
    reporter.report()
    assert purges == []
    purge(kvd)
    reporter.report()
    reporter.report()
    assert len(purges) == 1
    kvd.kill()
    assert reporter.report().kvd is None
    kvd.start()
    reporter.report()
    assert len(purges) == 1
    purge(kvd)
    reporter.report()
    assert len(purges) == 2


def test_a_purge_before_the_first_look_is_no_business_of_ours(
    kvd: Any, reporter: NodeReporter, purges: list[int]
) -> None:
    purge(kvd)
    reporter.report()
    assert purges == []


def purge(kvd: Any) -> None:
    with KvdOperator(kvd.socket_path, "operator") as operator:
        operator.purge(b"tenant..")
