"""Processes die and freeze; every stream ends whole, with each token once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from tests.flow.rig import Rig, wait_until
from tests.flow.talk import (
    JobReading,
    Transcript,
    client,
    complete,
    stream,
    submit_job,
    text_of,
)

STEP_MS = "20"
RECOVERY_S = 6.0


def prompt(number: int) -> str:
    return f"request {number:03d} says " + "something of its own " * (1 + number % 4)


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    workers = {
        "prefill-0": "prefill",
        "prefill-1": "prefill",
        "decode-0": "decode",
        "decode-1": "decode",
    }
    return make_rig(workers=workers, env={"POINTSMAN_WORKER_STEP_DELAY_MS": STEP_MS})


async def undisturbed(rig: Rig, count: int, max_tokens: int) -> list[str]:
    """What the same requests answer when nothing goes wrong, one alone at a time."""
    async with client(rig) as http:
        limit = asyncio.Semaphore(8)

        async def one(number: int) -> str:
            async with limit:
                return await text_of(http, prompt(number), max_tokens=max_tokens)

        return list(await asyncio.gather(*(one(number) for number in range(count))))


async def streams_over(
    rig: Rig, count: int, max_tokens: int, fault: Callable[[], object]
) -> tuple[list[Transcript], float]:
    """Run streams, cause the fault when all have text; the transcripts and the longest wait after."""
    transcripts = [Transcript() for _ in range(count)]
    async with client(rig) as http:
        running = [
            asyncio.create_task(stream(http, prompt(number), transcript, max_tokens=max_tokens))
            for number, transcript in enumerate(transcripts)
        ]
        await asyncio.gather(*(transcript.got_text.wait() for transcript in transcripts))
        await asyncio.to_thread(fault)
        started_s = time.monotonic()
        for transcript in transcripts:
            transcript.got_text.clear()
        await asyncio.gather(*(transcript.got_text.wait() for transcript in transcripts))
        recovered_s = time.monotonic() - started_s
        await asyncio.wait_for(asyncio.gather(*running), 60)
    return transcripts, recovered_s


def owner_role(rig: Rig, role: str) -> str:
    """The name of a worker of this role that owns requests now."""

    def find() -> str | None:
        for name in rig.workers:
            if name.startswith(role):
                for key in rig.redis.scan_iter(f"running:{name}@*"):
                    if rig.redis.scard(key):
                        return name
        return None

    found: str = wait_until(find, 10, f"a busy {role}")
    return found


async def test_c130_a_killed_decode_worker_costs_a_pause_and_no_token(rig: Rig) -> None:
    expected = await undisturbed(rig, 16, 100)

    transcripts, recovered_s = await streams_over(
        rig, 16, 100, lambda: rig.kill(owner_role(rig, "decode"))
    )

    assert [t.text for t in transcripts] == expected
    assert {t.finish_reason for t in transcripts} == {"length"}
    assert all(t.error is None and t.is_done for t in transcripts)
    assert recovered_s < RECOVERY_S
    for name in ("decode-0", "decode-1"):
        if rig.processes[name].poll() is not None:
            rig.start_worker(name, "decode")
            rig.wait_for_worker(name)
    rig.wait_at_rest()


async def test_c130_a_frozen_decode_worker_counts_as_dead_and_wakes_up_fenced(rig: Rig) -> None:
    expected = await undisturbed(rig, 8, 100)
    frozen = ""

    def freeze() -> None:
        nonlocal frozen
        frozen = owner_role(rig, "decode")
        rig.freeze(frozen)

    transcripts, recovered_s = await streams_over(rig, 8, 100, freeze)
    rig.thaw(frozen)

    assert [t.text for t in transcripts] == expected
    assert recovered_s < RECOVERY_S
    rig.wait_at_rest()


async def test_c130_without_recovery_the_client_is_told(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(env={"POINTSMAN_WORKER_STEP_DELAY_MS": STEP_MS, "POINTSMAN_MAX_ATTEMPTS": "1"})
    transcript = Transcript()
    async with client(rig) as http:
        running = asyncio.create_task(stream(http, prompt(1), transcript, max_tokens=200))
        await transcript.has_chunks(4)
        rig.kill("decode-0")
        await asyncio.wait_for(running, 10)

    assert transcript.error is not None
    assert transcript.error["code"] == "worker_lost"
    assert transcript.finish_reason is None
    assert transcript.is_done


async def test_a_killed_gateway_costs_its_clients_a_reconnect_and_no_token(rig: Rig) -> None:
    expected = await undisturbed(rig, 16, 100)
    async with client(rig) as http:
        jobs = [
            JobReading(await submit_job(http, prompt(number), max_tokens=100))
            for number in range(16)
        ]
        reading = [asyncio.create_task(job.read_through(http)) for job in jobs]
        await asyncio.gather(*(job.has_events(5) for job in jobs))
        rig.kill("gateway")
        killed_s = time.monotonic()
        await asyncio.to_thread(rig.start_gateway)
        restarted_s = time.monotonic() - killed_s
        await asyncio.gather(*reading)

    assert [job.text for job in jobs] == expected
    assert all(job.end is not None and job.end["finish_reason"] == "length" for job in jobs)
    assert restarted_s < RECOVERY_S
    rig.wait_ready()
    rig.wait_at_rest()


async def test_c129_a_killed_prefill_worker_is_replaced_within_the_bound(rig: Rig) -> None:
    long_prompt = "a long prompt " * 30
    async with client(rig) as http:
        expected = await text_of(http, long_prompt + "x", max_tokens=20)
        # (b) and (c): the worker that owns it dies between claim and hand-over.
        rig.freeze("prefill-0")
        rig.freeze("prefill-1")
        running = asyncio.create_task(text_of(http, long_prompt + "x", max_tokens=20))
        await asyncio.sleep(0.2)
        # (a): still queued in the broker, both consumers frozen; one dies, one wakes up.
        rig.kill("prefill-0")
        rig.thaw("prefill-1")
        assert await asyncio.wait_for(running, RECOVERY_S) == expected
    rig.start_worker("prefill-0", "prefill")
    rig.wait_for_worker("prefill-0")
    rig.wait_at_rest()


@pytest.mark.parametrize("moment_ms", [0, 20, 60])
async def test_c129_a_prefill_worker_killed_at_any_moment_harms_no_answer(
    rig: Rig, moment_ms: int
) -> None:
    numbers = range(8)
    async with client(rig) as http:
        fresh = f"moment {moment_ms} "
        expected = [await text_of(http, fresh + prompt(n), max_tokens=10) for n in numbers]
        running = [
            asyncio.create_task(text_of(http, fresh + prompt(n), max_tokens=10)) for n in numbers
        ]
        await asyncio.sleep(moment_ms / 1000)
        started_s = time.monotonic()
        rig.kill("prefill-0")
        assert await asyncio.gather(*running) == expected
        assert time.monotonic() - started_s < RECOVERY_S + 2
    rig.start_worker("prefill-0", "prefill")
    rig.wait_for_worker("prefill-0")
    rig.wait_at_rest()


async def test_c136_a_killed_worker_is_noticed_within_five_seconds(rig: Rig) -> None:
    async with client(rig) as http:
        job = JobReading(await submit_job(http, prompt(3), max_tokens=100))
        reading = asyncio.create_task(job.read_through(http))
        await job.has_events(10)
        owner = rig.request_fields(job.job_id)["owner"].partition("@")[0]
        rig.kill(owner)
        killed_s = time.monotonic()
        wait_until(lambda: rig.request_fields(job.job_id)["attempt"] == "2", 5.0, "noticed")
        assert time.monotonic() - killed_s < 5.0
        await reading

    assert job.end is not None
    rig.start_worker(owner, "decode")
    rig.wait_for_worker(owner)


async def test_the_prompt_is_computed_by_decode_where_no_prefill_worker_lives(rig: Rig) -> None:
    async with client(rig) as http:
        expected = await text_of(http, prompt(9), max_tokens=30)
        for name in ("prefill-0", "prefill-1"):
            assert rig.terminate(name) == 0
        assert await text_of(http, prompt(9), max_tokens=30) == expected
        answer = await complete(http, "never seen before " * 4, max_tokens=30)
        assert answer["usage"]["completion_tokens"] == 30
    for name in ("prefill-0", "prefill-1"):
        rig.start_worker(name, "prefill")
        rig.wait_for_worker(name)
    rig.wait_ready()


async def test_a_worker_that_is_told_to_stop_gives_its_streams_to_another(rig: Rig) -> None:
    expected = await undisturbed(rig, 8, 100)
    stopped = ""

    def stop() -> None:
        nonlocal stopped
        stopped = owner_role(rig, "decode")
        rig.processes[stopped].terminate()

    transcripts, _ = await streams_over(rig, 8, 100, stop)

    assert [t.text for t in transcripts] == expected
    assert rig.processes[stopped].wait(30) == 0
    rig.start_worker(stopped, "decode")
    rig.wait_for_worker(stopped)
    rig.wait_at_rest()


async def test_a_killed_cache_daemon_costs_recomputation_only(rig: Rig) -> None:
    expected = await undisturbed(rig, 8, 60)

    transcripts, _ = await streams_over(rig, 8, 60, lambda: rig.kill("kvd"))

    assert [t.text for t in transcripts] == expected
    rig.start_kvd()
    assert await undisturbed(rig, 8, 60) == expected
    rig.wait_at_rest()
