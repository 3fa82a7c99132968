"""Which models there are, and by which names clients may call them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.scheduling.fleet import Fleet, WorkerState

# A model whose workers are gone is still known for a while: they may be starting again.
KEPT_S = 600.0


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One model. `paths` are where its directory, or its script file, may lie on this machine.

    `digests` are those of its files, as its workers have them (`text_digest`): several while two
    versions serve. `max_context` counts tokens of prompt and answer together; 0: not known before it is
    loaded.
    """

    name: str
    engine: str
    paths: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    max_context: int = field(default=0, compare=False)

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal as long as what was loaded for it still fits.

        Names and paths come and go with machines; they count only where nobody tells what lies there.
        """
        return (self.name, self.engine, *(self.digests or self.paths))

    def joined(self, other: KnownModel) -> KnownModel:
        """The same model, with what `other` knows of it beside."""
        return replace(
            self,
            paths=tuple(dict.fromkeys((*self.paths, *other.paths))),
            aliases=tuple(dict.fromkeys((*self.aliases, *other.aliases))),
            digests=tuple(sorted({*self.digests, *other.digests})),
            max_context=self.max_context or other.max_context,
        )

    def completed(self, other: KnownModel) -> KnownModel:
        """The same, but paths of its own are enough: what lies there is what it is."""
        return self.joined(replace(other, paths=(), digests=()) if self.paths else other)


class KnownModels:
    """The configured ones for good, the others as long as heartbeats tell of them."""

    def __init__(self, configured: Iterable[KnownModel]) -> None:
        self._configured = {known.name: known for known in configured}
        self._seen: dict[str, tuple[KnownModel, float]] = {}
        self.by_name: Mapping[str, KnownModel] = _table(self._configured, {})

    def observe(self, fleet: Fleet, now_s: float) -> None:
        """Take in who lives at this moment of a monotonic clock."""
        announced: dict[str, KnownModel] = {}
        for _, state in sorted(fleet.workers.items()):
            if state.model and state.engine:
                known = _announced(state)
                earlier = announced.get(known.name)
                announced[known.name] = known if earlier is None else earlier.joined(known)
        self._seen = {
            name: (known, at_s)
            for name, (known, at_s) in self._seen.items()
            if now_s - at_s < KEPT_S
        } | {name: (known, now_s) for name, known in announced.items()}
        seen = {name: known for name, (known, _) in sorted(self._seen.items())}
        self.by_name = _table(self._configured, seen)


def _announced(state: WorkerState) -> KnownModel:
    paths = (state.model_path,) if state.model_path else ()
    digests = (state.text_digest,) if state.text_digest else ()
    return KnownModel(
        state.model, state.engine, paths, state.model_aliases, digests, state.max_context
    )


def _table(
    configured: Mapping[str, KnownModel], seen: Mapping[str, KnownModel]
) -> dict[str, KnownModel]:
    """By name. A name goes before an alias, the configured before others, the first before later."""
    models = dict(configured)
    for name, known in seen.items():
        models[name] = models[name].completed(known) if name in models else known
    names = dict(models)
    for known in models.values():
        for alias in known.aliases:
            names.setdefault(alias, known)
    return names
