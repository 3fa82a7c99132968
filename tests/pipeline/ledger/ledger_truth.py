"""Everything that stands in the ledger's keys, and what must hold of it between any two calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import redis

FINAL = {"finished", "failed", "cancelled"}
# What a pipeline at rest keeps: for readers, counts, what workers told, and what runs out by itself.
LASTING = {
    "request", "tokens", "prompt_logprobs", "counters", "queues", "slots", "lease", "workers",
    "drains", "frontier", "pace_ms", "asked_lately", "crash", "cancels", "dead_letters",
}  # fmt: skip


class LedgerTruth:
    """A copy of the whole store; keys are known by their first word."""

    def __init__(self, client: redis.Redis) -> None:
        self._client: Any = client
        names = [name.decode() for name in self._client.scan_iter(count=1_000)]
        pipe = self._client.pipeline(transaction=False)
        for name in names:
            pipe.type(name)
        kinds = [kind.decode() for kind in pipe.execute()]
        readers = {
            "hash": pipe.hgetall,
            "set": pipe.smembers,
            "zset": lambda name: pipe.zrange(name, 0, -1),
            "list": lambda name: pipe.lrange(name, 0, -1),
            "string": pipe.get,
        }
        for name, kind in zip(names, kinds, strict=True):
            readers[kind](name)
        values = pipe.execute()
        self.values: dict[str, Any] = dict(zip(names, values, strict=True))
        self.requests = {
            name.partition(":")[2]: _texts(self.values[name])
            for name in names
            if name.startswith("request:")
        }

    def log(self, request_id: str) -> bytes:
        """The tokens that were written."""
        data: bytes = self.values.get(f"tokens:{request_id}") or b""
        return data

    def left_over(self) -> set[str]:
        """First words of what should be gone when every request has ended."""
        return {name.partition(":")[0] for name in self.values} - LASTING

    def faults(self) -> list[str]:
        """What does not hold; sentences."""
        return [
            *self._misplaced(),
            *self._indexes_that_lie(),
            *self._lines_that_lie(),
            *self._counts_that_lie(),
        ]

    def open_ids(self) -> set[str]:
        """Requests that have not ended."""
        return {name for name, fields in self.requests.items() if fields["state"] not in FINAL}

    def members(self, word: str) -> dict[str, set[str]]:
        """Members of all keys with this first word, by the rest of the key's name."""
        return {
            name.partition(":")[2]: {item.decode() for item in value}
            for name, value in self.values.items()
            if name.partition(":")[0] == word
        }

    def _places(self) -> dict[str, list[str]]:
        """Request id -> keys in which it waits or runs."""
        places: dict[str, list[str]] = defaultdict(list)
        for word in ("waiting", "released", "line", "held", "resting", "running"):
            for rest, ids in self.members(word).items():
                for request_id in ids:
                    places[request_id].append(f"{word}:{rest}" if rest else word)
        return places

    def _misplaced(self) -> Iterator[str]:
        places = self._places()
        on_trial = set().union(*self.members("trials").values())
        for name in places.keys() - self.requests.keys():
            yield f"{name} is nowhere but in {places[name]}"
        for name, fields in self.requests.items():
            found, state = sorted(places[name]), fields["state"]
            if state == "running":
                expected = [[f"running:{fields['owner']}"]]
            elif state in FINAL:
                expected = [[]]
            else:
                expected = [
                    sorted(places) for places in _waits(fields, may_be_on_trial=name in on_trial)
                ]
            if found not in expected:
                yield f"{name} is {fields} and stands in {found}, not in {expected}"

    def _indexes_that_lie(self) -> Iterator[str]:
        open_ids = self.open_ids()
        if self.members("deadlines").get("", set()) != open_ids:
            yield f"deadlines: {self.members('deadlines')}, open: {open_ids}"
        indexed: dict[str, set[str]] = defaultdict(set)
        for name in open_ids:
            fields = self.requests[name]
            indexed[f"tenant:{fields['tenant']}"].add(name)
            indexed[f"model:{fields['model']}"].add(name)
            if model_of(fields) != fields["model"]:
                yield f"{name} of {fields['model']} is in {fields['queue']}"
        if self.members("open") != indexed:
            yield f"open: {self.members('open')}, not {dict(indexed)}"
        for name in self.members("dead_letters").get("", set()):
            if self.requests[name]["state"] != "failed":
                yield f"{name} is a dead letter and {self.requests[name]['state']}"

    def _lines_that_lie(self) -> Iterator[str]:
        tenants: dict[str, set[str]] = defaultdict(set)
        for rest in self.members("line"):
            queue_and_lane, _, tenant = rest.rpartition(":")
            tenants[queue_and_lane].add(tenant)
        if self.members("lines") != tenants:
            yield f"lines: {self.members('lines')}, tenants in line: {dict(tenants)}"
        queues: dict[str, set[str]] = defaultdict(set)
        for rest in tenants:
            queue = rest.rpartition(":")[0]
            queues[queue.split(".")[1]].add(queue)
        if self.members("held_queues") != queues:
            yield f"held_queues: {self.members('held_queues')}, queues with lines: {dict(queues)}"

    def _counts_that_lie(self) -> Iterator[str]:
        held = self.members("held")
        owed, ahead, num_held = (Counter[tuple[str, str]]() for _ in range(3))
        for name in self.open_ids():
            fields = self.requests[name]
            model, tokens = fields["model"], int(fields.get("owed", 0))
            owed[model, ""] += tokens
            if "ahead" in fields:
                ahead[model, fields["ahead"]] += tokens
            num_held[model, fields["priority"]] += name in held.get(model, set())
        for word, expected in (("owed_tokens", +owed), ("ahead", +ahead), ("num_held", +num_held)):
            if self._counted(word) != expected:
                yield f"{word}: {self._counted(word)}, not {expected}"

    def _counted(self, word: str) -> Counter[tuple[str, str]]:
        """Counters with this first word, without zeros, by (model, field of a hash)."""
        counts: Counter[tuple[str, str]] = Counter()
        for name, value in self.values.items():
            first, _, model = name.partition(":")
            if first == word:
                fields = _texts(value) if isinstance(value, dict) else {"": value.decode()}
                counts.update({(model, field): int(count) for field, count in fields.items()})
        return Counter({key: count for key, count in counts.items() if count})


def model_of(fields: dict[str, str]) -> str:
    """Whose queue a request stands in, or stood in last."""
    return fields["queue"].split(".")[1]


def _waits(fields: dict[str, str], *, may_be_on_trial: bool) -> Iterator[list[str]]:
    """The sets of keys in which a queued request may stand; in one of them exactly."""
    queue, waiting = fields["queue"], f"waiting:{fields['queue']}"
    if queue.startswith("unplaced."):
        yield [waiting]
        return
    if "lane" in fields:
        yield [waiting, f"released:{queue}:{fields['lane']}"]
        return
    if "rests_until" in fields:
        yield [waiting, "resting"]
    if "trial" in fields and may_be_on_trial:
        yield [waiting]
    if "begun" not in fields:
        yield [
            waiting,
            f"held:{model_of(fields)}",
            f"line:{queue}:{fields['priority']}:{fields['tenant']}",
        ]


def _texts(fields: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
