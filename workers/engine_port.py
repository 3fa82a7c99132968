"""What goes into an engine and what comes out of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeline.protocol.failure import Ending
from pipeline.protocol.request import Priority
from workers.kv_jobs import LoadJob, PrefetchJob, StoreJob
from workers.sequence import Sequence, StepOutput


class EngineStopped(Exception):
    """A sequence was submitted to an engine that has ended; give it to another one."""


class EngineSink(Protocol):
    """Where the engine's results go. Called on the engine thread; must not block."""

    def on_admitted(self, sequence: Sequence) -> None:
        """The sequence left the waiting line for the first time: it has blocks and will run.

        Or it waits for nobody but another one as long, and stands in no other's way.
        """
        ...

    def on_step(self, outputs: list[StepOutput]) -> None:
        """Once per step that produced something; an output with an ending is the last one."""
        ...

    def on_prefilled(self, sequence: Sequence) -> None:
        """Only for hands_over sequences, after the `on_step` with their first token.

        All KV, the tail included, is committed in kvd or given up; `num_computed` and `tail_key`
        are set. The engine has let go of the sequence.
        """
        ...


@dataclass(frozen=True, slots=True)
class Submit:
    """A new sequence."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a request; `attempt` None means all of its attempts."""

    request_id: str
    attempt: int | None
    ending: Ending
    silent: bool


@dataclass(frozen=True, slots=True)
class ForgetCached:
    """Empty the HBM prefix cache, then set `done`."""

    done: threading.Event


@dataclass(frozen=True, slots=True)
class Expect:
    """So many prompts will come when there is room for them, by priority."""

    waiting: Mapping[Priority, int]


Command = Submit | Cancel | Expect | ForgetCached | LoadJob | StoreJob | PrefetchJob
