"""Which models have workers within a budget of memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pipeline.cli.model_keeper import MIN_STAY_S, KeptModel, ModelKeeper, Sight

LATER_S = MIN_STAY_S + 1


def keeper(budget: int, *sizes: int, warm: str = "") -> ModelKeeper:
    """Models a, b, c ... of these sizes, begun at time 0."""
    models = [
        KeptModel(name, size, name in warm) for name, size in zip("abcdef", sizes, strict=False)
    ]
    made = ModelKeeper(budget, models)
    made.begin(0.0)
    return made


def wanted(made: ModelKeeper) -> str:
    return "".join(model.name for model in made.models if model.is_wanted)


def look(made: ModelKeeper, now_s: float, num_open: str = "", **num_bytes: int) -> str:
    """Open requests for the models named; all processes have the size that is thought, or this."""
    sizes: Mapping[str, int] = {
        model.name: model.num_bytes for model in made.models if model.is_wanted
    } | num_bytes
    made.look(now_s, Sight(dict.fromkeys(num_open, 1), sizes, sizes.keys()))
    return wanted(made)


def test_it_begins_with_the_warm_ones_and_with_what_fits_beside_them() -> None:
    assert wanted(keeper(10, 4, 4, 4)) == "ab"
    assert wanted(keeper(10, 4, 4, 4, warm="c")) == "ac"
    assert wanted(keeper(10, 4, 8, 4)) == "ac"


def test_what_fits_is_started_when_it_is_asked_for() -> None:
    made = keeper(10, 4, 8, 4)
    assert look(made, 1.0) == "ac"
    made.budget_bytes = 20
    assert look(made, 2.0, "b") == "abc"


def test_the_one_used_longest_ago_makes_room_and_is_gone_before_the_next_begins() -> None:
    made = keeper(10, 4, 4, 4)
    look(made, 1.0, "b")
    look(made, 2.0, "a")
    assert look(made, LATER_S, "c") == "a", "b was used first"
    assert look(made, LATER_S + 1, "c", b=4) == "a", "b is on its way out"
    assert look(made, LATER_S + 2, "c", b=0) == "ac"


def test_a_model_in_use_or_kept_warm_is_not_stopped() -> None:
    made = keeper(10, 4, 4, 4, warm="a")
    assert look(made, LATER_S, "bc") == "ab"
    assert look(made, LATER_S + 1, "c") == "a"


def test_nobody_goes_where_that_would_not_be_enough() -> None:
    made = keeper(10, 4, 4, 8)
    assert look(made, LATER_S, "ac") == "ab"


def test_what_was_started_just_now_stays_a_while() -> None:
    made = keeper(4, 4, 4)
    look(made, LATER_S, "b")
    assert look(made, LATER_S + 1, "b") == "b"
    assert look(made, LATER_S + 2, "a") == "b"
    assert look(made, 2 * LATER_S + 2, "a") == ""


def test_measured_bytes_count_once_it_has_run() -> None:
    made = keeper(10, 6, 6, 6)
    assert look(made, 1.0, "b", a=3) == "ab", "smaller than was thought"
    assert look(made, LATER_S, "b", a=3, b=9) == "b", "larger: who is idle makes room"


def test_a_model_that_turns_out_larger_than_the_budget_is_served_alone() -> None:
    made = keeper(10, 6, 6)
    look(made, 1.0, "a", a=12)
    assert look(made, LATER_S, "b", a=12) == ""
    assert look(made, LATER_S + 1, "b") == "b"
    assert look(made, 2 * LATER_S, "a") == ""
    assert look(made, 2 * LATER_S + 1, "a") == "a"


def test_a_model_larger_than_the_budget_stays_while_nobody_else_is_asked_for() -> None:
    made = keeper(10, 6, 6)
    look(made, 1.0, "a", a=12)
    assert look(made, LATER_S, a=12) == "a"


def test_as_many_are_resident_at_once_as_fit_beside_the_warm_ones() -> None:
    assert keeper(10, 8, 4, 4).num_resident == 2
    assert keeper(10, 8, 4, 4, warm="a").num_resident == 1
    assert keeper(20, 8, 4, 4).num_resident == 3


def test_those_who_asked_first_are_served_first() -> None:
    made = keeper(4, 4, 4, 4)
    look(made, 1.0, "a")
    look(made, 2.0, "ac")
    assert look(made, LATER_S, "bc") == ""
    assert look(made, LATER_S + 1, "bc") == "c"


def test_whoever_is_asked_for_no_more_is_not_started() -> None:
    made = keeper(4, 4, 4)
    assert look(made, 1.0, "ab") == "a"
    assert look(made, LATER_S) == "a"


@pytest.mark.parametrize("num_rounds", [30])
def test_wanted_models_fit_whatever_is_asked_for(num_rounds: int) -> None:
    made = keeper(10, 3, 4, 5, 6)
    for number in range(num_rounds):
        names = look(made, number * LATER_S / 2, "abcd"[number * 7 % 4])
        assert sum(model.num_bytes for model in made.models if model.name in names) <= 10
