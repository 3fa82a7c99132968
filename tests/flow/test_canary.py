"""A worker whose engine does not come back is shown as such, gets nothing, and ends at last."""

from __future__ import annotations

from collections.abc import Callable

import httpx

from pipeline.cli.status import read_status
from tests.flow.rig import Rig, wait_until

# A step takes longer than an engine may be away, a generation of two steps longer than a worker may.
ENVIRONMENT = {
    "POINTSMAN_WORKER_CANARY_IDLE_S": "1",
    "POINTSMAN_WORKER_STUCK_S": "3",
    "POINTSMAN_WORKER_STEP_DELAY_MS": "600000",
}


def test_a_stuck_engine_is_visible_and_its_worker_ends(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(workers={})
    rig.start_worker("both-0", "both", **ENVIRONMENT)
    rig.wait_for_worker("both-0")

    def healths() -> list[str]:
        return [line.health for line in read_status(rig.redis_server.url).workers]

    wait_until(lambda: healths() == ["stuck"], 30, "stuck")
    ready = wait_until(lambda: unready(rig), 5, "readyz")
    assert "both-0@node-a is stuck" in ready["reasons"]
    assert rig.processes["both-0"].wait(30) == 1
    assert "engine_stuck_worker_ends" in rig.log("both-0")


def unready(rig: Rig) -> dict[str, list[str]] | None:
    """What `/readyz` says once it is not 200."""
    answer = httpx.get(f"{rig.base_url}/readyz", timeout=5)
    return None if answer.status_code == 200 else answer.json()
