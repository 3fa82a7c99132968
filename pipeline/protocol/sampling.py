"""How the next token is chosen, as every process understands it."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

MAX_TOP_LOGPROBS = 20


class SamplingParams(BaseModel):
    """Sampling of one sequence. Frozen; travels in the ledger as JSON.

    The gateway resolves defaults before it builds one: `max_tokens` is always a number that fits the
    context, `seed` is always set (random when the client gave none), so that a recovered request
    continues with exactly the tokens it would have had.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(default=1.0, ge=0.0, le=1.0, description="0 keeps one token")
    top_k: int = Field(default=0, ge=0, description="0 keeps all tokens")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="None: no log-probabilities; n: the chosen token's and the n most likely",
    )
