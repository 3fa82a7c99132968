"""What a sequence needs before it can wait for its turn."""

from __future__ import annotations

import structlog

from pipeline.protocol.failure import Ending
from workers.block_flow import BlockFlow
from workers.endings import BROKEN, ending_at_start
from workers.logit_rules import rules_for
from workers.model import ModelSpec
from workers.prompt_lookup import PromptLookup
from workers.sequence_run import SequenceRun
from workers.stop_matching import StopMatcherFactory

log = structlog.get_logger(__name__)


def set_up_run(
    run: SequenceRun,
    spec: ModelSpec,
    flow: BlockFlow,
    stop_matcher: StopMatcherFactory,
    max_drafts: int,
) -> Ending | None:
    """Give a new run what its request asks for; its ending if that is known already.

    Where a token changes the logits of the next ones, nothing is guessed.
    """
    sequence = run.sequence
    try:
        run.stop_matcher = stop_matcher(sequence)
        ending = ending_at_start(sequence, run.stop_matcher, spec)
        if ending is None:
            flow.name_blocks(run)
            run.rules = rules_for(sequence, spec)
    except Exception:
        # The edge to what a request brings along: it may not take others down.
        log.exception("sequence_refused", request_id=sequence.request_id)
        return BROKEN
    if max_drafts and run.rules is None and sequence.grammar is None:
        run.lookup = PromptLookup(sequence.tokens, max_drafts, spec.context_tokens)
    if sequence.sampling.scores_prompt and not sequence.num_generated:
        run.prompt_records = []
    return ending
