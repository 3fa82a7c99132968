"""A request while it runs on this worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from pipeline.protocol.cache_use import CacheUse
from pipeline.protocol.failure import Ending
from pipeline.protocol.request import Priority
from pipeline.protocol.sampling import SamplingParams
from pipeline.protocol.tokens import TokenRecord
from pipeline.scheduling.link_report import LinkReport
from workers.token_grammar import TokenGrammar


class SequencePhase(Enum):
    """Where a sequence stands in the step loop.

    WAITING for room, LOADING its cached blocks, RUNNING (prefill chunks, then decode), STORING its
    last blocks for a hand-over or for reuse, DONE.
    """

    WAITING = auto()
    LOADING = auto()
    RUNNING = auto()
    STORING = auto()
    DONE = auto()


class Peer(NamedTuple):
    """Another node that may have a sequence's blocks, and where its cache daemon lends them.

    `link`: what `pointsman link-test` measured from there to here, if it is not long ago.
    """

    node: str
    address: str
    link: LinkReport | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One attempt at one request on this worker; owned by the engine thread once submitted.

    `tokens` are prompt then generated ids. KV exists for the first `num_computed` of them; the last
    sampled token has none yet, so num_computed <= len(tokens) - 1 while decoding. `block_ids[i]`
    holds tokens [i * block_tokens, (i + 1) * block_tokens). `num_logged` output tokens were already
    in the ledger's log when this attempt began; they stand at the end of `tokens`. `grammar` is there
    if the sampling names one, and moves on with the tokens.
    """

    request_id: str
    attempt: int
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    key_root: bytes
    priority: Priority = Priority.NORMAL
    tenant: str = "default"
    owner: bytes = b""  # whom the tiers count its blocks for, see `owner_tag`
    peers: tuple[Peer, ...] = ()  # the likeliest first, see `PeerBook`
    num_logged: int = 0
    hands_over: bool = False
    tail_key: bytes | None = None
    deadline_s: float | None = None  # on this process's monotonic clock
    grammar: TokenGrammar | None = None

    phase: SequencePhase = SequencePhase.WAITING
    num_computed: int = 0
    num_cached: int = 0  # prompt tokens that this attempt did not compute
    cache_use: CacheUse | None = None  # where these came from; None before it starts
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def uses_cache(self) -> bool:
        """False: its KV may leave no trace in any tier, and comes from none."""
        return self.sampling.uses_cache

    @property
    def num_generated(self) -> int:
        """Output tokens so far, those of earlier attempts included."""
        return len(self.tokens) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one sequence got out of one step: at most one token, and its ending if this is it.

    `index` is the position of `record` in the output (0 is the first generated token). A sequence
    may end without a token (end-of-text is not part of the output; cancellation, failure).
    `prompt_records` come once, with the first output of a sequence that scores its prompt: the
    log-probabilities of all prompt tokens but the first.
    """

    sequence: Sequence
    index: int
    record: TokenRecord | None
    ending: Ending | None = None
    prompt_records: list[TokenRecord] | None = None
