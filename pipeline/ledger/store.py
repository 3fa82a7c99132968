"""Connections to Redis with bounded waits, and one shape for its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, ResponseError

from pipeline.errors import StoreUnavailable

SOCKET_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.02
NUM_RETRIES = 2
# redis-py has types for some refusals, and takes their code off the message.
_REFUSAL_TYPES = (OutOfMemoryError, ReadOnlyError, MasterDownError)
_REFUSALS = ("OOM", "READONLY", "MISCONF", "LOADING", "NOREPLICAS", "MASTERDOWN")


def connect(url: str, *, timeout_s: float = SOCKET_TIMEOUT_S) -> redis.Redis:
    """A client that waits `timeout_s` for each answer and then raises; it does not retry on its own.

    Where it has to connect first, that takes up to `CONNECT_TIMEOUT_S` more.

    redis-py retries by default, which hides an outage from code that has to know of it.
    """
    return redis.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=None,
        health_check_interval=0,
    )


def connect_async(
    url: str, *, max_connections: int = 16, num_retries: int = NUM_RETRIES
) -> redis.asyncio.Redis:
    """The asyncio form: callers wait for one of `max_connections` instead of opening more.

    A connection that broke while it lay in the pool is no outage: the command is sent again on a new
    one, so every command and script here may be repeated. A time-out is not tried again. A
    subscription takes no retries: one that is silently renewed hides what it missed.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=SOCKET_TIMEOUT_S,
        socket_timeout=SOCKET_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        retry=Retry(ConstantBackoff(RETRY_S), num_retries, (RedisConnectionError,)),
    )
    # from_pool: closing the client closes the pool.
    return redis.asyncio.Redis.from_pool(pool)


@contextmanager
def store_errors() -> Iterator[None]:
    """Turn "Redis is away, loading, full or read-only" into `StoreUnavailable`.

    A script error of ours is a bug and passes through.
    """
    try:
        yield
    except _REFUSAL_TYPES as error:
        raise StoreUnavailable(str(error)) from error
    except ResponseError as error:
        # From inside a script the code may stand anywhere in the message.
        if any(code in str(error) for code in _REFUSALS):
            raise StoreUnavailable(str(error)) from error
        raise
    except (redis.RedisError, OSError, TimeoutError) as error:
        raise StoreUnavailable(f"{type(error).__name__}: {error}") from error
