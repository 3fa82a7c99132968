"""What kombu's bookkeeping must bear, against a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from kombu import Connection, Queue
from kombu.transport import redis as kombu_redis

from workers.engine_pool import install_safe_qos

QUEUE = Queue("qos")


@pytest.fixture
def received(redis_url: str) -> Iterator[tuple[Connection, Any]]:
    """A connection and the message that came through it."""
    original = kombu_redis.Channel.QoS
    install_safe_qos()
    connection = Connection(redis_url)
    try:
        with connection.Producer() as producer:
            producer.publish("x", routing_key="qos", declare=[QUEUE], serializer="json")
        message = QUEUE(connection.channel()).get(no_ack=False)
        assert message is not None
        yield connection, message
    finally:
        kombu_redis.Channel.QoS = original
        connection.close()


@pytest.mark.parametrize("settle", ["ack", "reject", "requeue"])
def test_a_message_of_a_lost_connection_is_settled_in_silence(
    received: tuple[Connection, Any], settle: str
) -> None:
    _, message = received
    channel = message.channel
    lost, channel.connection, channel._pool = channel.connection, None, None  # what losing it does
    try:
        getattr(message, settle)()
    finally:
        channel.connection = lost
    assert message.acknowledged


def test_a_message_is_acknowledged_where_it_came_from(
    received: tuple[Connection, Any],
) -> None:
    _, message = received
    client = message.channel.client
    assert client.hlen("unacked") == 1
    message.ack()
    assert client.hlen("unacked") == 0
