"""Load or recompute, from measured rates alone: no clock, no bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.protocol.cache_use import LoadReason
from pipeline.scheduling.transfer_cost import LoadPolicy, Rate, Run, TransferCost

TOKEN_BYTES = 1000.0
NOW_S = 100.0


def measured(
    dram_bytes_per_s: float = 1e9, nvme_bytes_per_s: float = 1e8, fixed_s: float = 0.01
) -> TransferCost:
    cost = TransferCost(TOKEN_BYTES)
    cost.count_copy(int(dram_bytes_per_s), 1.0, fixed_s, NOW_S)
    cost.count_promotion(int(nvme_bytes_per_s), 1.0)
    return cost


def test_a_rate_weighs_measurements_by_the_time_they_took() -> None:
    rate = Rate()
    assert rate.per_s == 0
    rate.add(1000, 1.0)
    rate.add(1, 0.001)
    assert rate.per_s == pytest.approx(1000, rel=0.01)
    for _ in range(60):
        rate.add(100, 1.0)
    assert rate.per_s == pytest.approx(100, rel=0.05)


@given(
    rate=st.floats(10, 1e5),
    bandwidth=st.floats(1e5, 1e10),
    fixed_s=st.floats(1e-4, 0.1),
    num_tokens=st.integers(1, 200_000),
)
def test_the_decision_is_the_break_even_of_the_design(
    rate: float, bandwidth: float, fixed_s: float, num_tokens: int
) -> None:
    choice = measured(bandwidth, fixed_s=fixed_s).choose(Run(num_tokens, 0), rate, NOW_S)
    share = rate * TOKEN_BYTES / int(bandwidth)
    least = fixed_s * rate / (1 - share) if share < 1 else float("inf")
    if num_tokens > least * 1.001:
        assert (choice.num_tokens, choice.reason) == (num_tokens, LoadReason.FASTER)
    if num_tokens < least * 0.999:
        assert choice.num_tokens == 0
        if abs(share - 1) > 1e-6:
            expected = LoadReason.SLOW_LINK if share >= 1 else LoadReason.TOO_SHORT
            assert choice.reason is expected


def test_a_slow_disk_does_not_keep_what_dram_has_from_being_loaded() -> None:
    cost = measured(nvme_bytes_per_s=1e5)  # 100 tokens/s
    choice = cost.choose(Run(500, 500), 1000, NOW_S)
    assert (choice.num_tokens, choice.reason) == (500, LoadReason.FASTER)
    choice = cost.choose(Run(0, 500), 1000, NOW_S)
    assert (choice.num_tokens, choice.reason) == (0, LoadReason.SLOW_LINK)
    assert measured().choose(Run(500, 500), 1000, NOW_S).num_tokens == 1000


def test_what_is_not_measured_is_tried_and_what_was_long_ago_is_tried_again() -> None:
    fresh = TransferCost(TOKEN_BYTES)
    assert fresh.choose(Run(10, 0), 1e5, NOW_S).reason is LoadReason.UNMEASURED
    slow = measured(1e3)
    assert slow.choose(Run(10, 0), 1e5, NOW_S).reason is LoadReason.SLOW_LINK
    assert slow.choose(Run(10, 0), 0.0, NOW_S).reason is LoadReason.UNMEASURED
    assert slow.choose(Run(10, 0), 1e5, NOW_S + 31).reason is LoadReason.PROBE
    slow.count_promotion(0, 2.0)
    assert slow.choose(Run(0, 10), 1e5, NOW_S).reason is LoadReason.SLOW_LINK, "nothing came"
    unread = TransferCost(TOKEN_BYTES)
    unread.count_copy(10**9, 1.0, 0.01, NOW_S)
    assert unread.choose(Run(10, 10), 1e5, NOW_S).reason is LoadReason.UNMEASURED


def test_a_rate_that_others_measured_is_good_until_there_are_some_of_our_own() -> None:
    told = TransferCost(TOKEN_BYTES)
    told.expect(1e6, 0.01, NOW_S)
    assert told.choose(Run(500, 0), 100, NOW_S).reason is LoadReason.FASTER
    assert told.choose(Run(500, 0), 2000, NOW_S).reason is LoadReason.SLOW_LINK
    assert told.choose(Run(500, 0), 100, NOW_S + 31).reason is LoadReason.PROBE
    told.count_copy(10_000, 1.0, 0.01, NOW_S)
    assert told.choose(Run(500, 0), 100, NOW_S).reason is LoadReason.SLOW_LINK, "it is slower now"
    told.expect(1e9, 0.0, NOW_S)
    assert told.choose(Run(500, 0), 100, NOW_S).reason is LoadReason.SLOW_LINK, "we know better"


def test_the_deadline_of_a_load_follows_from_its_prediction() -> None:
    cost = measured()
    assert cost.choose(Run(1_000_000, 0), 1000, NOW_S).limit_s == pytest.approx(3 * 1.01)
    assert cost.choose(Run(100, 0), 1000, NOW_S).limit_s == pytest.approx(0.15)


def test_a_load_is_waited_for_as_long_as_computing_would_take() -> None:
    cost = measured()
    assert cost.choose(Run(1000, 0), 1000, NOW_S).limit_s == pytest.approx(1.0)
    assert cost.choose(Run(5000, 0), 1000, NOW_S).limit_s == pytest.approx(2.0)


@pytest.mark.parametrize(("policy", "num_tokens"), [(LoadPolicy.ALWAYS, 10), (LoadPolicy.NEVER, 0)])
def test_settings_can_take_the_decision(policy: LoadPolicy, num_tokens: int) -> None:
    choice = TransferCost(TOKEN_BYTES, policy).choose(Run(10, 0), 1e9, NOW_S)
    assert (choice.num_tokens, choice.reason.value) == (num_tokens, policy.value)


def test_nothing_cached_is_no_decision() -> None:
    assert measured().choose(Run(0, 0), 1000, NOW_S).reason is LoadReason.ABSENT
