"""How much of a prompt goes into a step beside decode rows, so that these come on in time.

A controller and no model of the machine: what a chunk costs depends on its context, its neighbours
and on who else uses the cores. It compares steps with decode rows alone to those with a chunk.
"""

from __future__ import annotations

_LEAST_TOKENS = 4  # progress, and what a product computes at no cost more than for one
_AIM = 0.75  # of the limit: a single step may be slower than the ones before it
_FASTEST_FALL, _FASTEST_RISE = 0.5, 1.25
_WEIGHT = 0.5  # of the newest step
_MOST_OFF = 0.1  # that it counts as: others on the machine may have made a single step slow
_UNNOTICED_S = 0.01  # a gap between tokens that needs no care
_STEPS_BETWEEN_QUIET = 64


class ChunkSizer:
    """Keeps steps with a chunk below `max_slowdown` times what the decode rows take alone.

    Within that rows and prompts share the time by their numbers, and beyond it where more prompts wait
    than rows decode: one stream at its full pace would keep all others from their first token. Pure:
    it is told times. max_slowdown 0: no limit.
    """

    def __init__(self, max_slowdown: float, max_tokens: int) -> None:
        self._max_slowdown = max_slowdown
        self._max_tokens = max_tokens
        self._quiet_s: dict[int, float] = {}
        # Prompt tokens in a second that chunks add to steps; None before the first chunk.
        self._tokens_per_s: float | None = None
        self._num_asked = 0
        self._num_since_quiet = 0

    def limit(self, num_decode: int, num_prompts: int) -> int:
        """Most prompt tokens of the next step, beside so many decode rows; 0: look at them alone.

        num_prompts: those that take part, or would if there were room. Alone the rows run once for each
        size of batch and now and then after that, for without it nothing is known to compare with.
        """
        if not self._max_slowdown or not num_decode:
            return self._max_tokens
        quiet_s = self._quiet_s.get(num_decode.bit_length())
        if quiet_s is None or self._num_since_quiet >= _STEPS_BETWEEN_QUIET:
            return 0
        if self._tokens_per_s is None:
            allowed_s = self._allowed_s(quiet_s, _AIM * self._max_slowdown)
            self._tokens_per_s = _LEAST_TOKENS / allowed_s
        shared = 1 + num_prompts / num_decode
        if num_prompts <= num_decode:
            shared = min(shared, self._max_slowdown)
        slowdown = max(_AIM * self._max_slowdown, shared)
        wanted = self._allowed_s(quiet_s, slowdown) * self._tokens_per_s
        self._num_asked = int(min(max(wanted, _LEAST_TOKENS), self._max_tokens))
        return self._num_asked

    @staticmethod
    def _allowed_s(quiet_s: float, slowdown: float) -> float:
        """What a chunk may add to a step; something, or no prompt would go on."""
        return max(slowdown * quiet_s, _UNNOTICED_S, 1.05 * quiet_s) - quiet_s

    def learn(self, num_prefill: int, num_decode: int, step_s: float) -> None:
        """A step of so many tokens of both kinds took so long."""
        if not self._max_slowdown or not num_decode:
            return
        size = num_decode.bit_length()
        if not num_prefill:
            self._num_since_quiet = 0
            known_s = self._quiet_s.get(size, step_s)
            most_s = _MOST_OFF * known_s
            off_s = min(max(step_s - known_s, -most_s), most_s)
            self._quiet_s[size] = known_s + _WEIGHT * off_s
            return
        self._num_since_quiet += 1
        quiet_s = self._quiet_s.get(size)
        known = self._tokens_per_s
        if quiet_s is None or known is None or num_prefill < self._num_asked // 2:
            return  # the end of a prompt: too little to tell
        tokens_per_s = num_prefill / max(step_s - quiet_s, 1e-6)
        self._tokens_per_s = min(max(tokens_per_s, _FASTEST_FALL * known), _FASTEST_RISE * known)
