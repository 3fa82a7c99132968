"""Sees whether the engine still comes back: by its turns while it works, by a short generation while idle."""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from pipeline.protocol.request import Priority
from pipeline.protocol.sampling import SamplingParams
from workers.sequence import Sequence
from workers.step_loop import Engine, EngineStopped

log = structlog.get_logger(__name__)

_PROMPT = (0, 1, 2)
_MAX_TOKENS = 2  # a prefill and a decode step
# Looks come about once a second. Of a longer gap only this counts: then this process stood still, or
# Redis kept the heartbeat waiting, and it says nothing of the engine.
_MAX_GAP_S = 2.0


@dataclass(slots=True)
class Canary:
    """Looked through by the heartbeat. A busy engine is never given anything.

    idle_s: after so long without a step two tokens are generated; 0: never. limit_s: a turn of the step
    loop, or the generation, that takes longer makes the engine stuck.
    """

    engine: Engine
    key_root: bytes
    idle_s: float
    limit_s: float
    _sequence: Sequence | None = None
    _num_sent: int = 0
    _turn: int = 0
    _num_steps: int = -1
    _waited_s: float = 0.0
    _idle_s: float = 0.0
    _last_look_s: float | None = None

    @property
    def is_stuck(self) -> bool:
        """The engine has not come back for longer than it may take."""
        return self._waited_s > self.limit_s

    @property
    def waited_s(self) -> float:
        """How long one turn, or the generation, has been under way."""
        return self._waited_s

    def look(self, now_s: float) -> None:
        """Once, quickly. `now_s` is a monotonic clock."""
        gap_s = 0.0 if self._last_look_s is None else min(now_s - self._last_look_s, _MAX_GAP_S)
        self._last_look_s = now_s
        was_stuck = self.is_stuck
        if self._is_awaited():
            self._waited_s += gap_s
        else:
            self._waited_s = 0.0
        if self.is_stuck != was_stuck:
            event = "engine_stuck" if self.is_stuck else "engine_came_back"
            log.warning(event, num_steps=self._num_steps)
        self._count_idleness(gap_s)
        if self.idle_s and self._idle_s >= self.idle_s and self._sequence is None:
            self._send()

    def _is_awaited(self) -> bool:
        """True if the engine is in the same turn as at the last look, or owes us a generation."""
        turn = self.engine.turn_under_way
        is_same_turn = turn != 0 and turn == self._turn
        self._turn = turn
        sequence = self._sequence
        if sequence is not None and sequence.ending is not None:
            self._sequence = None
            if sequence.ending.failure is not None:
                # Three failed steps in a row end the engine: let them come soon.
                log.warning("canary_failed", ending=sequence.ending.encode())
                self._idle_s = self.idle_s
        return is_same_turn or self._sequence is not None

    def _count_idleness(self, gap_s: float) -> None:
        num_steps = self.engine.stats().num_steps
        if num_steps != self._num_steps:
            self._num_steps, self._idle_s = num_steps, 0.0
        else:
            self._idle_s += gap_s

    def _send(self) -> None:
        self._num_sent += 1
        sequence = Sequence(
            request_id=f"canary-{self._num_sent}",
            attempt=1,
            tokens=list(_PROMPT),
            num_prompt_tokens=len(_PROMPT),
            sampling=SamplingParams(max_tokens=_MAX_TOKENS, temperature=0.0),
            key_root=self.key_root,
            priority=Priority.BATCH,
        )
        try:
            self.engine.submit(sequence)
        except EngineStopped:
            return
        self._sequence, self._idle_s = sequence, 0.0
