"""Requests go where they can be finished, to the node that has most room."""

from __future__ import annotations

import msgpack

from pipeline.ledger.keys import model_slug
from pipeline.scheduling.fleet import DEAD_S, SUSPECT_S, Fleet, Role, WorkerState, queues_of
from pipeline.scheduling.router import choose_decode, choose_entry


def state(name: str, role: Role, node: str = "a", **fields: object) -> WorkerState:
    values: dict[str, object] = {
        "worker": name,
        "node": node,
        "role": role,
        "model": "m",
        "namespace": "n",
        "queues": queues_of(role, "m", node),
        "capacity": 10,
    }
    return WorkerState.model_validate(values | fields)


def fleet(*states: WorkerState, age_s: float = 0.5) -> Fleet:
    beats = {
        s.worker.encode(): msgpack.packb([100_000, s.model_dump_json().encode()]) for s in states
    }
    return Fleet.decode(beats, 100_000 + int(age_s * 1000))


def test_a_request_starts_with_prefill_where_both_roles_live() -> None:
    assert (
        choose_entry(fleet(state("p", Role.PREFILL), state("d", Role.DECODE)), "m") == "prefill.m"
    )


def test_without_a_prefill_worker_the_decode_node_computes_the_prompt() -> None:
    assert choose_entry(fleet(state("d", Role.DECODE)), "m") == "decode.m.a"


def test_without_a_decode_worker_a_request_waits_unplaced() -> None:
    assert choose_entry(fleet(state("p", Role.PREFILL)), "m") == "unplaced.m"
    assert choose_entry(fleet(), "m") == "unplaced.m"


def test_c133_a_prefill_worker_of_another_layout_gets_nothing() -> None:
    old = state("d", Role.DECODE, namespace="block_tokens 32")
    new = state("p", Role.PREFILL, namespace="block_tokens 16")
    both = fleet(old, new)

    assert both.unpaired() == ["p"]
    assert choose_entry(both, "m") == "decode.m.a", "its decode node computes prompts itself"
    assert choose_entry(
        fleet(old, new, state("p2", Role.PREFILL, namespace=old.namespace)), "m"
    ) == ("decode.m.a"), "the queue is shared: who would take it is not known"


def test_c133_a_prefill_worker_is_paired_by_any_node_of_its_layout() -> None:
    nodes = (
        state("d1", Role.DECODE, "a", namespace="old"),
        state("d2", Role.DECODE, "b", namespace="new"),
    )

    paired = fleet(*nodes, state("p", Role.PREFILL, namespace="new"))
    assert paired.unpaired() == []
    assert choose_entry(paired, "m") == "prefill.m"
    assert choose_decode(paired, "m", "new") == "decode.m.b"


def test_c133_a_node_of_two_layouts_pairs_with_nobody() -> None:
    mixed = (
        state("d1", Role.DECODE, namespace="old"),
        state("d2", Role.DECODE, namespace="new"),
    )

    assert fleet(*mixed, state("p", Role.PREFILL, namespace="new")).unpaired() == ["p"]


def test_one_worker_of_both_roles_is_enough() -> None:
    assert choose_entry(fleet(state("b", Role.BOTH)), "m") == "prefill.m"


def test_the_least_loaded_node_decodes() -> None:
    busy = state("d1", Role.DECODE, "a", num_running=5)
    idle = state("d2", Role.DECODE, "b", num_running=1, num_waiting=1)

    assert choose_decode(fleet(busy, idle), "m") == "decode.m.b"


def test_load_counts_the_places_of_all_workers_of_a_node() -> None:
    small = state("d1", Role.DECODE, "a", num_running=2, capacity=4)
    large = (state("d2", Role.DECODE, "b", num_running=4), state("d3", Role.DECODE, "b"))

    assert choose_decode(fleet(small, *large), "m") == "decode.m.b"


def test_blocks_of_another_namespace_are_never_paired() -> None:
    other = state("d1", Role.DECODE, "a", namespace="other")

    assert choose_decode(fleet(other), "m", "n") is None
    assert choose_decode(fleet(other, state("d2", Role.DECODE, "b")), "m", "n") == "decode.m.b"


def test_suspect_and_draining_workers_get_nothing_new() -> None:
    draining = state("d", Role.DECODE, is_draining=True)

    assert choose_decode(fleet(draining), "m") is None
    assert choose_decode(fleet(state("d", Role.DECODE), age_s=SUSPECT_S + 0.1), "m") is None


def test_a_queue_counts_as_served_until_its_workers_are_dead() -> None:
    decode = state("d", Role.DECODE, is_draining=True)

    assert fleet(decode, age_s=DEAD_S - 0.1).served_queues() == {"decode.m.a"}
    assert fleet(decode, age_s=DEAD_S + 0.1).served_queues() == set()


def test_a_heartbeat_of_another_build_is_listed_and_gets_no_work() -> None:
    beats = {b"d1": msgpack.packb([100_000, b'{"role": "spectator"}'])}
    strange = Fleet.decode(beats, 100_100)

    assert set(strange.workers) == {"d1"}
    assert choose_decode(strange, "m") is None
    assert strange.served_queues() == set()


def of(name: str, role: Role, model: str, node: str = "a", **fields: object) -> WorkerState:
    queues = queues_of(role, model_slug(model), node)
    return state(name, role, node, **{"model": model, "queues": queues, **fields})


def test_a_request_goes_to_workers_of_its_model_only() -> None:
    mixed = fleet(
        of("p", Role.PREFILL, "a"),
        of("d1", Role.DECODE, "a", num_running=9),
        of("d2", Role.DECODE, "b"),
        of("d3", Role.DECODE, "b", "z"),
    )

    assert choose_entry(mixed, "a") == "prefill.a"
    assert choose_decode(mixed, "a") == "decode.a.a", "busy, but the only one"
    assert choose_entry(mixed, "b") == "decode.b.a"
    assert choose_entry(mixed, "c") == "unplaced.c"
    assert mixed.models == {"a": "a", "b": "b"}


def test_two_models_on_one_node_do_not_spoil_the_pairs_of_each_other() -> None:
    mixed = fleet(
        of("p", Role.PREFILL, "a", namespace="a"),
        of("d1", Role.DECODE, "a", namespace="a"),
        of("d2", Role.DECODE, "b", namespace="b"),
        of("p2", Role.PREFILL, "b", namespace="a"),
    )

    assert mixed.unpaired() == ["p2"]
    assert choose_entry(mixed, "a") == "prefill.a"
    assert choose_entry(mixed, "b") == "decode.b.a"


def test_a_name_that_is_no_word_finds_its_queues() -> None:
    slug = model_slug("org/m:v1")
    one = fleet(of("w", Role.BOTH, "org/m:v1"))

    assert choose_entry(one, slug) == f"prefill.{slug}"
    assert one.served_queues() == {f"prefill.{slug}", f"decode.{slug}.a"}
