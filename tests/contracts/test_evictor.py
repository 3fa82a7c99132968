"""What every eviction policy promises."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiering.eviction.arc import ArcEvictor
from tiering.eviction.evictor import Evictor, NewEvictor
from tiering.eviction.lfu import LfudaEvictor, LfuEvictor
from tiering.eviction.lru import LruEvictor
from tiering.eviction.policies import EvictionPolicy, new_evictor_of
from tiering.eviction.s3_fifo import S3FifoEvictor
from tiering.eviction.ttl import TtlEvictor

NUM_SLOTS = 8
every_policy = pytest.mark.parametrize(
    "new_evictor",
    [new_evictor_of(policy, 600.0, lambda: 0.0) for policy in EvictionPolicy],
    ids=list(EvictionPolicy),
)
keys = st.binary(min_size=1, max_size=1)
verbs = st.sampled_from(["admit", "withdraw", "evict", "discard"])
histories = st.lists(st.tuples(verbs, keys), max_size=80)


def act(evictor: Evictor, verb: str, key: bytes) -> None:
    match verb:
        case "admit":
            evictor.admit(key)
        case "withdraw":
            evictor.withdraw(key)
        case _:
            evictor.remove(key, is_evicted=verb == "evict")


@every_policy
@given(histories)
def test_victims_are_exactly_the_admitted_blocks_each_once(
    new_evictor: NewEvictor, history: list[tuple[str, bytes]]
) -> None:
    evictor, evictable = new_evictor(NUM_SLOTS), set()
    for verb, key in history:
        act(evictor, verb, key)
        if verb == "admit":
            evictable.add(key)
        else:
            evictable.discard(key)
        assert len(evictor) == len(evictable)
    assert sorted(evictor.next_victims(1000)) == sorted(evictable)


@every_policy
@given(histories, st.integers(0, 20))
def test_proposing_victims_changes_nothing(
    new_evictor: NewEvictor, history: list[tuple[str, bytes]], count: int
) -> None:
    evictor, undisturbed = new_evictor(NUM_SLOTS), new_evictor(NUM_SLOTS)
    for verb, key in history:
        act(evictor, verb, key)
        act(undisturbed, verb, key)
        evictor.next_victims(count)
    victims = evictor.next_victims(1000)
    assert victims == undisturbed.next_victims(1000)
    assert evictor.next_victims(count) == victims[:count]
    assert evictor.next_victims(0) == []


@every_policy
@given(st.lists(keys, max_size=200))
def test_a_block_in_use_is_never_a_victim_however_full_the_cache(
    new_evictor: NewEvictor, asked: list[bytes]
) -> None:
    evictor = new_evictor(NUM_SLOTS)
    resident: list[bytes] = []
    for key in asked:
        if key in resident:
            evictor.withdraw(key)
        else:
            while len(resident) >= NUM_SLOTS:
                (victim,) = evictor.next_victims(1)
                evictor.remove(victim, is_evicted=True)
                resident.remove(victim)
            resident.append(key)
            evictor.admit(key)
            evictor.withdraw(key)
        assert key not in evictor.next_victims(1000)
        evictor.admit(key)


@every_policy
def test_a_block_used_again_and_again_outlives_a_scan(new_evictor: NewEvictor) -> None:
    evictor = new_evictor(NUM_SLOTS)
    for number in range(NUM_SLOTS):
        evictor.admit(bytes([number]))
    evictor.admit(b"\0")
    for number in range(100, 200):
        evictor.admit(b"\0")  # used in passing
        (victim,) = evictor.next_victims(1)
        assert victim != b"\0"
        evictor.remove(victim, is_evicted=True)
        evictor.admit(bytes([number]))


@every_policy
def test_memory_of_gone_blocks_is_bounded(new_evictor: NewEvictor) -> None:
    evictor = new_evictor(4)
    for number in range(100_000):
        key = number.to_bytes(4, "big")
        evictor.admit(key)
        evictor.remove(key, is_evicted=True)
    kept = sum(len(value) for value in vars(evictor).values() if hasattr(value, "__len__"))
    assert kept <= 1 << 16


@every_policy
def test_each_call_costs_the_same_in_a_large_tier(new_evictor: NewEvictor) -> None:
    def cost_s(num_blocks: int) -> float:
        evictor = new_evictor(num_blocks)
        for number in range(num_blocks):
            evictor.admit(number.to_bytes(4, "big"))
        began_s = time.process_time()
        for number in range(2000):
            evictor.admit(number.to_bytes(4, "big"))
            (victim,) = evictor.next_victims(1)
            evictor.remove(victim, is_evicted=True)
            evictor.admit(victim)
        return time.process_time() - began_s

    cost_s(1000)
    assert min(cost_s(50_000) for _ in range(3)) < 20 * min(cost_s(500) for _ in range(3))


def test_lru_proposes_the_least_recently_admitted_first() -> None:
    evictor = LruEvictor()
    for key in (b"a", b"b", b"c", b"a"):
        evictor.admit(key)
    assert evictor.next_victims(3) == [b"b", b"c", b"a"]


@pytest.mark.parametrize("new_evictor", [LfuEvictor, LfudaEvictor])
def test_lfu_proposes_the_least_often_used_first(new_evictor: Callable[[int], Evictor]) -> None:
    evictor = new_evictor(NUM_SLOTS)
    for key in (b"a", b"b", b"c", b"c", b"a", b"a"):
        evictor.admit(key)
    assert evictor.next_victims(3) == [b"b", b"c", b"a"]


def test_lfu_remembers_the_uses_of_a_block_that_returns() -> None:
    evictor = LfuEvictor(NUM_SLOTS)
    for key in (b"a", b"a", b"a", b"b", b"b"):
        evictor.admit(key)
    evictor.remove(b"a", is_evicted=True)
    evictor.admit(b"a")
    assert evictor.next_victims(1) == [b"b"]


def test_lfuda_lets_old_fame_fade() -> None:
    evictor = LfudaEvictor(NUM_SLOTS)
    for _ in range(5):
        evictor.admit(b"old")
    for number in range(20):
        evictor.admit(bytes([number]))
        (victim,) = evictor.next_victims(1)
        evictor.remove(victim, is_evicted=True)
        if victim == b"old":
            return
        evictor.admit(bytes([number, number]))
    pytest.fail("a block that was popular once stays for good")


def test_arc_gives_frequent_blocks_more_room_when_they_come_back() -> None:
    evictor = ArcEvictor(4)
    for key in (b"a", b"b", b"a", b"b"):
        evictor.admit(key)  # T2: a, b
    for key in (b"c", b"d"):
        evictor.admit(key)  # T1: c, d
    assert evictor.next_victims(2) == [b"c", b"d"]
    for victim in (b"c", b"d"):
        evictor.remove(victim, is_evicted=True)
    for key in (b"c", b"e", b"f"):
        evictor.admit(key)  # c comes back: T1 may have one block
    assert evictor.next_victims(4) == [b"e", b"a", b"b", b"c"]


def test_s3_fifo_lets_a_block_that_returns_pass_the_small_queue() -> None:
    evictor = S3FifoEvictor(20)
    evictor.admit(b"a")
    evictor.remove(b"a", is_evicted=True)
    for key in (b"a", b"b", b"c"):
        evictor.admit(key)
    assert evictor.next_victims(3) == [b"b", b"a", b"c"]


def test_ttl_names_what_was_idle_too_long_and_nothing_else() -> None:
    now_s = 0.0
    evictor = TtlEvictor(10, lambda: now_s)
    evictor.admit(b"a")
    now_s = 5.0
    evictor.admit(b"b")
    evictor.admit(b"leased")
    evictor.withdraw(b"leased")
    assert evictor.find_expired(9.9) == []
    assert evictor.find_expired(10) == [b"a"]
    assert evictor.find_expired(100) == [b"a", b"b"]


# replay


def replay_module() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "evict_replay.py"
    spec = importlib.util.spec_from_file_location("evict_replay", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evict_replay"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("policy", ["lru", "lfu", "arc", "lfuda", "s3fifo"])
def test_a_replay_hits_as_often_as_independent_implementations_do(policy: str) -> None:
    bench = replay_module()
    if not bench.TRACES.is_dir():
        pytest.skip("no traces here")
    requests = bench.read_requests(bench.TRACES / "mooncake_synthetic_trace.jsonl")
    for num_slots, wanted in zip(
        bench.CAPACITIES[:3], bench.REFERENCE["synthetic", policy], strict=False
    ):
        got = bench.replay_policy(requests, EvictionPolicy(policy), num_slots)
        assert abs(got.hit_rate - wanted) <= bench.TOLERANCE
