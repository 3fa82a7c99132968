"""C099 and its neighbours: the process that runs batches is killed, frozen or told to stop."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from functools import partial

import openai
import pytest
from openai.types import Batch

from pipeline.cli.embedded_redis import free_port
from tests.flow.batches import batch_line, ids_of, order, result_lines, sdk, wait_over
from tests.flow.rig import Rig, wait_until
from tests.flow.wire import num_tokens_run

NUM_LINES = 64
NUM_BEFORE = 27
MAX_TOKENS = 12


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    """Eight sequences at once, so that 64 lines take a while."""
    env = {
        "POINTSMAN_WORKER_STEP_DELAY_MS": "15",
        "POINTSMAN_WORKER_MAX_BATCH_SEQUENCES": "8",
    }
    return make_rig(env=env)


@pytest.fixture
def second_port(rig: Rig) -> int:
    """A second gateway on the same Redis and data directory."""
    port = free_port()
    rig.start_gateway("gateway-2", port)
    return port


def prompt(number: int) -> str:
    return f"{number:03d} is a question of its own"


def order_64(client: openai.OpenAI) -> Batch:
    ids = range(NUM_LINES)
    return order(client, [batch_line(f"r{n}", prompt(n), max_tokens=MAX_TOKENS) for n in ids])


def wait_half_done(client: openai.OpenAI, batch: Batch) -> None:
    def is_half_done() -> bool:
        counts = client.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= NUM_BEFORE

    wait_until(is_half_done, 30)


def num_submitted(rig: Rig) -> int:
    return int(rig.redis.hget("counters", "submitted") or 0)


def assert_all_there_once(client: openai.OpenAI, batch: Batch) -> None:
    assert batch.status == "completed"
    output = result_lines(client, batch.output_file_id)
    assert len(output) == NUM_LINES
    assert sorted(ids_of(output)) == sorted(f"r{number}" for number in range(NUM_LINES))
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["text"] for line in output}
    for number in (0, 31, 63):
        alone = client.completions.create(
            model="m", prompt=prompt(number), temperature=0, max_tokens=MAX_TOKENS
        )
        assert texts[f"r{number}"] == alone.choices[0].text


def test_c099_a_killed_runner_started_again_runs_no_line_twice(rig: Rig) -> None:
    client = sdk(rig)
    submitted, tokens = num_submitted(rig), num_tokens_run(rig)
    batch = order_64(client)
    wait_half_done(client, batch)
    rig.kill("gateway")
    rig.start_gateway()
    ended = wait_over(sdk(rig), batch.id)

    assert num_submitted(rig) - submitted == NUM_LINES
    # Every line once: its prompt and all output tokens but the last, which is never put in.
    once = NUM_LINES * (len(prompt(0)) + MAX_TOKENS - 1)
    assert num_tokens_run(rig) - tokens <= once + NUM_LINES
    assert_all_there_once(client, ended)


def test_another_gateway_takes_over_when_the_runner_dies(rig: Rig, second_port: int) -> None:
    client, other = sdk(rig), sdk(rig, port=second_port)
    submitted = num_submitted(rig)
    batch = order_64(client)
    wait_half_done(client, batch)
    rig.kill("gateway")
    try:
        ended = wait_over(other, batch.id)
        assert num_submitted(rig) - submitted == NUM_LINES
        assert_all_there_once(other, ended)
    finally:
        rig.start_gateway()
        rig.terminate("gateway-2")


def test_a_frozen_runner_that_wakes_up_changes_nothing(rig: Rig, second_port: int) -> None:
    client = sdk(rig)
    other = sdk(rig, port=second_port)
    batch = order_64(client)
    wait_half_done(client, batch)
    rig.freeze("gateway")
    # SQLite has one writer: frozen in the middle of a write, it holds the other gateway up until it
    # wakes (a server database would end its transaction). Late is right; a line done twice is not.
    with contextlib.suppress(TimeoutError):
        wait_over(other, batch.id, 12)
    rig.thaw("gateway")
    ended = wait_over(other, batch.id)
    assert_all_there_once(client, ended)
    assert client.batches.retrieve(batch.id) == ended
    rig.terminate("gateway-2")


def test_a_runner_that_is_told_to_stop_leaves_its_lines_to_the_next(rig: Rig) -> None:
    submitted = num_submitted(rig)
    batch = order_64(sdk(rig))
    wait_half_done(sdk(rig), batch)
    assert rig.terminate("gateway") == 0
    rig.start_gateway()
    ended = wait_over(sdk(rig), batch.id)

    assert num_submitted(rig) - submitted == NUM_LINES
    assert_all_there_once(sdk(rig), ended)


def test_a_killed_and_a_frozen_worker_lose_no_line(rig: Rig) -> None:
    client = sdk(rig)
    batch = order_64(client)
    wait_half_done(client, batch)
    rig.kill("decode-0")
    rig.start_worker("decode-0", "decode")
    rig.signal("prefill-0", signal.SIGSTOP)
    wait_until(lambda: "worker_ready" in rig.log("decode-0"), 30)
    rig.signal("prefill-0", signal.SIGCONT)
    assert_all_there_once(client, wait_over(client, batch.id, 60))


@pytest.mark.slow
def test_gateway_and_worker_killed_three_times_each_lose_and_double_nothing(rig: Rig) -> None:
    num_lines = 600
    lines = [batch_line(f"r{n}", prompt(n), max_tokens=MAX_TOKENS) for n in range(num_lines)]
    batch = order(sdk(rig), lines)

    def has_done(goal: int) -> bool:
        counts = sdk(rig).batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed >= goal

    for fault in range(3):
        goal = (fault + 1) * num_lines // 5
        wait_until(partial(has_done, goal), 120)
        rig.kill("gateway")
        rig.kill("decode-0")
        rig.start_worker("decode-0", "decode")
        rig.start_gateway()
    ended = wait_over(sdk(rig), batch.id, 120)
    assert ended.status == "completed"
    output = result_lines(sdk(rig), ended.output_file_id)
    assert len(output) == num_lines
    assert len(set(ids_of(output))) == num_lines
