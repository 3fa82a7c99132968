"""Where the KV of a request's prompt came from, as its client may see it."""

from __future__ import annotations

from enum import StrEnum

from pydantic import BaseModel, ConfigDict


class LoadReason(StrEnum):
    """Why cached blocks below HBM were loaded, or were computed again instead.

    Loaded: FASTER by the measured rates; UNMEASURED, for a rate is not known yet; PROBE, for the
    rates are old; ALWAYS by settings. Computed: TOO_SHORT a run for the fixed cost of a load;
    SLOW_LINK, its bytes would come more slowly than the model makes them; LATE, given up at its
    deadline (what had come by then is kept); NEVER by settings. ABSENT: no tier had any.
    """

    FASTER = "faster"
    UNMEASURED = "unmeasured"
    PROBE = "probe"
    ALWAYS = "always"
    TOO_SHORT = "too_short"
    SLOW_LINK = "slow_link"
    LATE = "late"
    NEVER = "never"
    ABSENT = "absent"


class CacheUse(BaseModel):
    """Prompt tokens that were not computed, by the tier that gave them; None: no load was asked."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    hbm_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    load: LoadReason | None = None
