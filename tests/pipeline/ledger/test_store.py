"""What Redis answers when it takes no writes is an outage; what a bug of ours causes is not."""

from __future__ import annotations

import pytest
from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from pipeline.errors import StoreUnavailable
from pipeline.ledger.store import store_errors


@pytest.mark.parametrize(
    "refusal",
    [
        # redis-py takes the code off these two.
        ReadOnlyError("You can't write against a read only replica."),
        OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        ResponseError("NOREPLICAS Not enough good replicas to write."),
        ResponseError("MISCONF Errors writing to the AOF file: No space left on device"),
    ],
)
def test_a_refused_write_is_an_outage(refusal: ResponseError) -> None:
    with pytest.raises(StoreUnavailable), store_errors():
        raise refusal


def test_a_broken_script_is_no_outage() -> None:
    with pytest.raises(ResponseError), store_errors():
        raise ResponseError("ERR attempt to index a nil value script: on @user_script:3.")
