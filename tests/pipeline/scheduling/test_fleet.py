"""What the heartbeats of all workers say together."""

from __future__ import annotations

import msgpack
import pytest

from pipeline.scheduling.fleet import EMPTY_FLEET, Fleet, Role, WorkerState


def fleet(*builds: tuple[str, str]) -> Fleet:
    """Workers of (model, build)."""
    states = {
        str(number): WorkerState(
            worker=str(number), node="a", role=Role.BOTH, model=model, namespace="n",
            queues=(), capacity=1, build=build,
        )
        for number, (model, build) in enumerate(builds)
    }  # fmt: skip
    return Fleet(states, dict.fromkeys(states, 0.0))


def test_a_fingerprint_stands_for_weights_and_program_and_for_nothing_else() -> None:
    one = fleet(("m", "x")).fingerprint("m")
    assert one.startswith("fp_")
    assert fleet(("m", "x"), ("m", "x"), ("other", "y")).fingerprint("m") == one
    assert fleet(("m", "y")).fingerprint("m") != one
    mixed = fleet(("m", "x"), ("m", "y")).fingerprint("m")
    assert mixed not in (one, fleet(("m", "y")).fingerprint("m"))
    assert fleet(("m", "y"), ("m", "x")).fingerprint("m") == mixed


def test_nobody_has_no_fingerprint() -> None:
    assert EMPTY_FLEET.fingerprint("m") == ""
    assert fleet(("m", "")).fingerprint("m") == "", "a worker of an earlier release"


@pytest.mark.parametrize(
    "beat",
    [b"", b"nonsense", msgpack.packb([1]), msgpack.packb([1, "{}", 3]), msgpack.packb(["x", "y"])],
)
def test_a_heartbeat_that_nobody_can_read_gets_no_work_and_hides_no_other(beat: bytes) -> None:
    (good,) = fleet(("m", "x")).workers.values()
    beats = {b"odd": beat, b"good": msgpack.packb([5_000, good.model_dump_json()])}
    seen = Fleet.decode(beats, 5_100)

    assert [state.worker for state in seen.usable()] == [good.worker]
    assert "odd" in seen.workers, "its requests are taken over when its lease runs out"
