"""Where the KV of a request's prompt came from, as its client may see it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class LoadReason(StrEnum):
    """Why cached blocks below HBM were loaded, or were computed again instead.

    Loaded: FASTER by the measured rates; UNMEASURED, for a rate is not known yet; PROBE, for the
    rates are old; ALWAYS by settings. Loaded in part, the rest computed: LATE, given up at its
    deadline; REFUSED, a block failed its check here; GONE, it left its tier meanwhile or failed its
    check there; UNAVAILABLE, the daemon or peer broke off, or never answered. Computed: TOO_SHORT a
    run for the fixed cost of a load; SLOW_LINK, its bytes would come more slowly than the model makes
    them; NEVER by settings. ABSENT: no tier had any.
    """

    FASTER = "faster"
    UNMEASURED = "unmeasured"
    PROBE = "probe"
    ALWAYS = "always"
    LATE = "late"
    REFUSED = "refused"
    GONE = "gone"
    UNAVAILABLE = "unavailable"
    TOO_SHORT = "too_short"
    SLOW_LINK = "slow_link"
    NEVER = "never"
    ABSENT = "absent"


class CacheUse(BaseModel):
    """Prompt tokens that were not computed, by who gave them, and what was decided about the others.

    peer_tokens came from the node `peer`, for this request. recomputed_tokens: a tier below HBM or a
    peer had these too. load: about the tiers of the worker's node (None: HBM had all); pull: about
    the peer (None: none was asked, or none had more). Of load and pull together: estimated_ms of
    what was weighed, and compute_ms that computing the same tokens was estimated at (None: not known);
    taken_ms of what was brought.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    hbm_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    peer_tokens: int = 0
    recomputed_tokens: int = 0
    load: LoadReason | None = None
    pull: LoadReason | None = None
    peer: str | None = None
    estimated_ms: float | None = None
    compute_ms: float | None = None
    taken_ms: float | None = None

    @property
    def num_loaded(self) -> int:
        """Tokens that came from below HBM."""
        return self.dram_tokens + self.nvme_tokens + self.peer_tokens
