"""What models there are, from settings and heartbeats."""

from __future__ import annotations

from pipeline.intake.known_models import KEPT_S, KnownModel, KnownModels
from pipeline.scheduling.fleet import EMPTY_FLEET, Fleet, Role, WorkerState

MAIN = KnownModel("main", "digest", ("/here/main",), ("first",))


def fleet(**models: dict[str, object]) -> Fleet:
    """Workers by name, each with the fields of a heartbeat that tell of its model."""
    states = {
        name: WorkerState(
            worker=name,
            node="n",
            role=Role.BOTH,
            namespace="s",
            queues=(),
            capacity=1,
            **{"engine": "digest", "max_context": 512, **fields},  # type: ignore[arg-type]
        )
        for name, fields in models.items()
    }
    return Fleet(states, dict.fromkeys(states, 0.0))


def test_what_a_worker_announces_is_known_by_its_name_and_aliases() -> None:
    known = KnownModels([MAIN])
    known.observe(fleet(w={"model": "b", "model_aliases": ("x",), "model_path": "/b"}), 0.0)

    found = KnownModel("b", "digest", ("/b",), ("x",))
    assert known.by_name == {"main": MAIN, "b": found, "first": MAIN, "x": found}
    assert known.by_name["b"].max_context == 512


def test_a_name_goes_before_an_alias_and_the_configured_before_others() -> None:
    known = KnownModels([MAIN])
    known.observe(fleet(w={"model": "b", "model_aliases": ("main", "first")}), 0.0)

    assert known.by_name["main"] == known.by_name["first"] == MAIN
    assert known.by_name["b"].name == "b"


def test_a_configured_model_stays_as_it_is_when_its_workers_lie_elsewhere() -> None:
    known = KnownModels([MAIN])
    known.observe(fleet(w={"model": "main", "model_path": "/there"}), 0.0)

    assert known.by_name["main"] == MAIN
    assert known.by_name["main"].max_context == 512


def test_the_files_may_lie_where_any_of_its_workers_says() -> None:
    known = KnownModels([])
    paths = {name: {"model": "b", "model_path": f"/{name}"} for name in ("w2", "w1")}
    known.observe(fleet(**paths), 0.0)  # type: ignore[arg-type]

    assert known.by_name["b"].paths == ("/w1", "/w2")


def test_a_model_whose_workers_are_gone_is_known_for_a_while() -> None:
    known = KnownModels([MAIN])
    known.observe(fleet(w={"model": "b"}), 0.0)
    known.observe(EMPTY_FLEET, KEPT_S - 1)
    assert "b" in known.by_name
    known.observe(EMPTY_FLEET, KEPT_S + 1)
    assert list(known.by_name) == ["main", "first"]


def test_a_worker_of_a_build_that_does_not_tell_announces_nothing() -> None:
    known = KnownModels([])
    known.observe(fleet(w={"model": "b", "engine": ""}), 0.0)
    assert known.by_name == {}


def test_two_versions_of_a_model_are_told_apart_by_their_files_alone() -> None:
    known = KnownModels([])
    old = {"model": "b", "model_path": "/b", "text_digest": "1"}
    new = {"model": "b", "model_path": "/b", "text_digest": "2"}
    identities = []
    for workers in ({"w": old}, {"w": old, "v": old | {"model_path": "/c"}}, {"w": old, "v": new}):
        known.observe(fleet(**workers), 0.0)  # type: ignore[arg-type]
        identities.append(known.by_name["b"].identity)

    assert identities[0] == identities[1] != identities[2]


def test_a_configured_model_is_what_lies_in_its_own_place() -> None:
    known = KnownModels([MAIN])
    known.observe(fleet(w={"model": "main", "text_digest": "1"}), 0.0)

    assert known.by_name["main"].identity == MAIN.identity
