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

    # Stop strings and grammars are clients' own words: no error may repeat them.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    max_tokens: int = Field(ge=0, description="0: the prompt is only scored")
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, description="0 is greedy")
    top_p: float = Field(default=1.0, ge=0.0, le=1.0, description="0 keeps one token")
    top_k: int = Field(default=0, ge=0, description="0 keeps all tokens")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = Field(default=0.0, ge=0.0, le=1.0, description="share of the likeliest token's")
    repetition_penalty: float = Field(default=1.0, gt=0.0, description="over prompt and output")
    presence_penalty: float = Field(default=0.0, description="over the output")
    frequency_penalty: float = Field(default=0.0, description="over the output")
    logit_bias: tuple[tuple[int, float], ...] = Field(default=(), description="token id, addend")
    min_tokens: int = Field(default=0, ge=0, description="nothing ends the output before")
    grammar: str = Field(default="", description="of `pipeline.intake.grammar`; empty: none")
    bad_words: tuple[tuple[int, ...], ...] = Field(default=(), description="as token ids")
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    uses_cache: bool = Field(default=True, description="False: its KV leaves no trace in any tier")
    cache_salt: str = Field(default="", description="KV is shared among equal ones of a tenant")
    continues_text: bool = Field(default=False, description="the answer goes on within a text")
    echo: bool = Field(default=False, description="the answer begins with the prompt")
    num_logprobs: int | None = Field(
        default=None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="None: no log-probabilities; n: the chosen token's and the n most likely",
    )

    @property
    def changes_logits(self) -> bool:
        """True if an option depends on which token it is, and so on the sequence."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
            or self.bad_words
        )

    @property
    def scores_prompt(self) -> bool:
        """True if the prompt's tokens get log-probabilities too, with as many alternatives."""
        return self.echo and self.num_logprobs is not None
