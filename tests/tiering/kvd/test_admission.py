"""Which blocks NVMe takes when writes are dear."""

from __future__ import annotations

from tiering.kvd.admission import AdmissionFilter, WriteBudget, WritePressure

CALM = WritePressure(occupancy=0.5, is_budget_short=False)
FULL = WritePressure(occupancy=0.95, is_budget_short=False)
DAY_S = 86_400


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def new_filter(*, num_writes: int, num_hits: int) -> AdmissionFilter:
    made = AdmissionFilter(100, max_writes_per_hit=3)
    for _ in range(num_writes):
        made.count_write()
    for _ in range(num_hits):
        made.count_hit()
    return made


def test_everything_passes_while_there_is_room() -> None:
    assert new_filter(num_writes=90, num_hits=0).admits(key_of(1), 1, CALM)


def test_everything_passes_a_full_tier_whose_writes_pay() -> None:
    assert new_filter(num_writes=90, num_hits=30).admits(key_of(1), 1, FULL)


def test_under_pressure_a_block_that_was_used_once_is_turned_away_the_first_time_only() -> None:
    filtering = new_filter(num_writes=90, num_hits=29)
    assert not filtering.admits(key_of(1), 1, FULL)
    assert filtering.is_on
    assert filtering.admits(key_of(2), 2, FULL)
    assert filtering.admits(key_of(1), 1, FULL)


def test_a_few_writes_are_no_pressure() -> None:
    assert new_filter(num_writes=24, num_hits=0).admits(key_of(1), 1, FULL)


def test_the_filter_goes_off_well_below_the_limit_only() -> None:
    filtering = new_filter(num_writes=90, num_hits=29)
    filtering.admits(key_of(1), 1, FULL)
    for _ in range(30):
        filtering.count_hit()
    assert not filtering.admits(key_of(3), 1, FULL)
    filtering.count_hit()
    assert filtering.admits(key_of(4), 1, FULL)
    assert not filtering.is_on


def test_old_writes_fade() -> None:
    filtering = new_filter(num_writes=1000, num_hits=0)
    assert not filtering.admits(key_of(1), 1, FULL)
    for _ in range(70):
        filtering.count_hit()
    assert filtering.admits(key_of(2), 1, FULL)


def test_what_was_turned_away_is_remembered_for_a_bounded_number_of_blocks() -> None:
    filtering = new_filter(num_writes=90, num_hits=0)
    for number in range(1000):
        assert not filtering.admits(key_of(number), 1, FULL)
    assert not filtering.admits(key_of(1), 1, FULL)
    assert filtering.admits(key_of(999), 1, FULL)


def test_a_budget_that_runs_short_turns_the_filter_on() -> None:
    budget = WriteBudget(1000, now_s=0)
    budget.spend(501)
    assert budget.is_short(0)
    pressure = WritePressure(occupancy=0, is_budget_short=True)
    filtering = new_filter(num_writes=0, num_hits=0)
    assert not filtering.admits(key_of(1), 1, pressure)
    assert filtering.admits(key_of(2), 2, pressure)
    assert filtering.admits(key_of(3), 1, CALM)


def test_a_spent_budget_refuses_writes_until_the_day_has_gone_on() -> None:
    budget = WriteBudget(1000, now_s=0)
    budget.spend(990)
    assert budget.has(10, 0)
    assert not budget.has(11, 0)
    assert budget.has(260, DAY_S / 4)
    assert budget.has(1000, 10 * DAY_S)
    assert not budget.has(1001, 10 * DAY_S)


def test_without_a_budget_nothing_is_refused() -> None:
    budget = WriteBudget(None, now_s=0)
    budget.spend(1 << 60)
    assert budget.has(1 << 60, 0)
    assert not budget.is_short(0)
