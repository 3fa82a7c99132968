"""Which models of one machine have workers, where they do not all fit: those that are asked for."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

# A model that was started stays so long, that two which do not fit together do not only load.
MIN_STAY_S = 10.0


@dataclass(slots=True)
class KeptModel:
    """One model. `num_bytes` is what its workers take together: guessed, and measured once they ran.

    Times are of one monotonic clock. `asked_s`: since when requests wait for its workers.
    """

    name: str
    num_bytes: int
    is_warm: bool = False
    is_wanted: bool = False
    started_s: float = float("-inf")
    used_s: float = float("-inf")
    asked_s: float | None = None


@dataclass(frozen=True, slots=True)
class Sight:
    """What is so now, by model: requests that have not ended, bytes of its processes, who is ready."""

    num_open: Mapping[str, int]
    num_bytes: Mapping[str, int]
    ready: Collection[str] = ()


@dataclass(slots=True)
class ModelKeeper:
    """Decides who is wanted within a budget of bytes; what is done about it is the caller's.

    A model that requests wait for is started, if need be in the place of those that were used
    longest ago. One in use is never stopped, nor one that is kept warm. Together with those kept warm
    a model may take the whole budget.
    """

    budget_bytes: int
    models: list[KeptModel] = field(default_factory=list)

    def begin(self, now_s: float) -> list[str]:
        """Want the warm ones, and then the others in their order as far as they fit."""
        for model in sorted(self.models, key=lambda model: not model.is_warm):
            if model.is_warm or self._wanted_bytes + model.num_bytes <= self.budget_bytes:
                model.is_wanted, model.started_s = True, now_s
        return [model.name for model in self.models if model.is_wanted]

    @property
    def num_resident(self) -> int:
        """How many models can have workers at once: the warm ones and the smallest of the others."""
        free_bytes = self.budget_bytes - sum(m.num_bytes for m in self.models if m.is_warm)
        others = sorted(model.num_bytes for model in self.models if not model.is_warm)
        num_fitting = sum(needed <= free_bytes for needed in accumulate(others))
        return len(self.models) - len(others) + num_fitting

    def look(self, now_s: float, sight: Sight) -> bool:
        """Take in what is so, and decide; True if somebody else is wanted than before."""
        for model in self.models:
            self._note(model, now_s, sight)
        asked = [model for model in self.models if model.asked_s is not None]
        leaving = [m for m in self.models if not m.is_wanted and sight.num_bytes.get(m.name)]
        if not asked:
            return self._make_room(now_s, self._shared_bytes - self.budget_bytes, is_enough=False)
        first = min(asked, key=lambda model: model.asked_s or 0.0)
        missing = self._wanted_bytes + self._share_of(first) - self.budget_bytes
        if missing > 0:
            return self._make_room(now_s, missing, is_enough=True)
        if missing + sum(sight.num_bytes[m.name] for m in leaving if m is not first) > 0:
            return False  # somebody is still on the way out
        first.is_wanted, first.started_s, first.asked_s = True, now_s, None
        return True

    def _note(self, model: KeptModel, now_s: float, sight: Sight) -> None:
        if model.name in sight.ready and model.is_wanted:
            model.num_bytes = sight.num_bytes.get(model.name) or model.num_bytes
        if not sight.num_open.get(model.name):
            model.asked_s = None
            return
        model.used_s = now_s
        if not model.is_wanted and model.asked_s is None:
            model.asked_s = now_s

    def _share_of(self, model: KeptModel) -> int:
        """What it takes, at most all that those kept warm leave."""
        warm_bytes = sum(other.num_bytes for other in self.models if other.is_warm)
        return min(model.num_bytes, max(0, self.budget_bytes - warm_bytes))

    def _make_room(self, now_s: float, missing_bytes: int, *, is_enough: bool) -> bool:
        """Let those go that were used longest ago; with `is_enough` only if that is enough."""
        victims = list(self._victims(now_s, missing_bytes))
        found_bytes = sum(model.num_bytes for model in victims)
        if is_enough and found_bytes < missing_bytes:
            return False
        for model in victims:
            model.is_wanted = False
        return bool(victims)

    def _victims(self, now_s: float, missing_bytes: int) -> Iterator[KeptModel]:
        for model in sorted(self.models, key=lambda model: model.used_s):
            is_idle = model.used_s < now_s and now_s - model.started_s >= MIN_STAY_S
            if missing_bytes > 0 and model.is_wanted and is_idle and not model.is_warm:
                missing_bytes -= model.num_bytes
                yield model

    @property
    def _shared_bytes(self) -> int:
        """As `_wanted_bytes`; one that is larger than its share alone may stay, if it is alone."""
        wanted = [model for model in self.models if model.is_wanted]
        return sum(m.num_bytes if m.is_warm else self._share_of(m) for m in wanted)

    @property
    def _wanted_bytes(self) -> int:
        return sum(model.num_bytes for model in self.models if model.is_wanted)
