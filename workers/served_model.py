"""The model that a worker serves: its runner, its text, and the keys of its blocks."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version

from pipeline.intake.detokenizer import StopMatcher, TextRules
from pipeline.intake.grammar import GrammarBook
from pipeline.intake.text_digest import text_digest
from pipeline.intake.vocabulary import load_vocabulary
from pipeline.ledger.claim import ClaimedRequest
from pipeline.settings import PipelineSettings
from tiering.block_hash import namespace_root
from workers.engine_port import EngineSink
from workers.kv_jobs import KvMover
from workers.models.load import load_runner
from workers.sequence import Sequence
from workers.settings import WorkerSettings
from workers.step_loop import Engine
from workers.token_grammar import TokenGrammar


class ServedModel:
    """Loaded once, when the worker starts."""

    def __init__(self, shared: PipelineSettings, settings: WorkerSettings) -> None:
        self._runner = load_runner(
            shared.engine,
            shared.model,
            block_tokens=settings.block_tokens,
            dtype=settings.dtype,
            device=settings.device,
            step_delay_ms=settings.step_delay_ms,
        )
        self._vocabulary = load_vocabulary(shared.engine, shared.model)
        self.text_digest = text_digest(shared.engine, shared.model)
        self._grammars = GrammarBook(self._vocabulary)
        self.layout = self._runner.spec.layout
        self.max_context = self._vocabulary.max_context
        self.engine_settings = settings.engine_settings(self.layout, self._runner.spec.memory)
        # Workers of the same namespace can use each other's blocks.
        self.namespace = self.key_root("").hex()
        program = f"{self.namespace} {settings.device} {_version()}"
        self.build = hashlib.sha256(program.encode()).hexdigest()[:16]

    def key_root(self, tenant_salt: str, cache_salt: str = "") -> bytes:
        """Where the keys of a tenant's blocks begin."""
        spec = self._runner.spec
        fields: dict[str, str | int | bytes] = {
            "fingerprint": spec.fingerprint,
            "layout": spec.layout.describe(),
            "salt": tenant_salt,
        }
        return namespace_root(fields | ({"cache_salt": cache_salt} if cache_salt else {}))

    def start_grammar(self, claim: ClaimedRequest) -> TokenGrammar:
        """A request's grammar, moved on over what it has written so far."""
        logged = [record.token_id for record in claim.logged]
        return self._grammars.start(claim.sampling.grammar, logged)

    def engine(self, mover: KvMover, sink: EngineSink) -> Engine:
        """The engine that runs it, not started yet."""
        return Engine(self._runner, self.engine_settings, mover, sink, self._stop_matcher)

    def _stop_matcher(self, sequence: Sequence) -> StopMatcher | None:
        rules = TextRules.of(sequence.sampling)
        return StopMatcher(self._vocabulary, rules) if rules.stop else None


def _version() -> str:
    try:
        return version("pointsman")
    except PackageNotFoundError:  # run from a checkout
        return ""
