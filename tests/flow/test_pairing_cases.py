"""C133: workers of different layout are never paired, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import client, complete


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """A decode worker with blocks of 32 tokens; its prefill worker comes with the test."""
    rig = make_rig(workers={})
    rig.start_worker("decode-0", "decode", POINTSMAN_WORKER_BLOCK_TOKENS="32")
    rig.wait_for_worker("decode-0")
    rig.wait_ready()
    return rig


async def test_c133_a_prefill_worker_of_another_layout_is_never_paired(rig: Rig) -> None:
    prompts = [f"number {n} " + "crosses the layouts " * 6 for n in range(6)]
    async with client(rig) as http:
        alone = await asyncio.gather(*(complete(http, text, max_tokens=20) for text in prompts))
        rig.start_worker("prefill-0", "prefill", POINTSMAN_WORKER_BLOCK_TOKENS="16")
        rig.wait_for_worker("prefill-0")
        unpaired = "pointsman_worker_unpaired"
        await asyncio.to_thread(wait_until, lambda: rig.metric(unpaired) == 1, 10, unpaired)
        before = beat_of(rig, "prefill-0")["num_steps"]
        among = await asyncio.gather(*(complete(http, text, max_tokens=20) for text in prompts))

        assert [a["choices"][0]["text"] for a in among] == [a["choices"][0]["text"] for a in alone]
        assert beat_of(rig, "prefill-0")["num_steps"] == before, "it computed nothing"
        assert (await http.get("/readyz")).status_code == 200, "a decode worker is pair enough"

        def is_told() -> bool:
            return any("prefill_workers_not_paired" in rig.log(name) for name in rig.processes)

        await asyncio.to_thread(wait_until, is_told, 5, "the log line")
        rig.kill("decode-0")
        await asyncio.to_thread(wait_until, lambda: gone(rig), 15, "decode-0 is struck off")
        assert (await http.get("/readyz")).status_code == 503, "a prefill worker alone is none"


def beat_of(rig: Rig, name: str) -> dict[str, int]:
    """The last heartbeat of a worker."""
    found: dict[str, int] = next(
        state for worker, state in rig.beats().items() if worker.startswith(f"{name}@")
    )
    return found


def gone(rig: Rig) -> bool:
    """The decode worker was struck off."""
    return not any(worker.startswith("decode-0@") for worker in rig.beats())
