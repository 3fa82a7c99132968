"""Starts and stops the workers of models as the requests in the ledger ask for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.cli.errors import OptionInvalid
from pipeline.cli.model_keeper import KeptModel, ModelKeeper, Sight
from pipeline.cli.model_store import ModelPlan
from pipeline.cli.serve_options import ServeOptions
from pipeline.cli.supervisor import Supervisor
from pipeline.errors import StoreUnavailable
from pipeline.ledger.backlog import read_backlog_now
from pipeline.ledger.keys import model_slug
from pipeline.ledger.store import connect

# An interpreter with its libraries; a model's weights come on top. Measured when it has run.
WORKER_BYTES = 128 << 20
READ_LIMIT_S = 0.5
# Kinds of files with weights; where a directory has several, the first is the one that is loaded.
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")


@dataclass(slots=True)
class ResidentModels:
    """The models of one `pointsman serve` with a budget; `parts` are their workers by model."""

    supervisor: Supervisor
    keeper: ModelKeeper
    parts: Mapping[str, Sequence[str]]
    redis_url: str
    _client: Any = field(init=False)

    def __post_init__(self) -> None:
        self._client = connect(self.redis_url, timeout_s=READ_LIMIT_S)

    def close(self) -> None:
        """Read no more."""
        self._client.close()

    def tick(self, now_s: float) -> None:
        """Look at the ledger and the processes once; wait while Redis is away.

        Once workers are drained nobody is started or stopped any more: the order is to empty the node.
        """
        try:
            backlog = read_backlog_now(self._client)
        except StoreUnavailable:
            return
        sight = Sight(
            num_open={
                name: backlog.models[slug].num_open
                for name in self.parts
                if (slug := model_slug(name)) in backlog.models
            },
            num_bytes={
                name: self.supervisor.num_bytes(parts) for name, parts in self.parts.items()
            },
            ready={name for name, parts in self.parts.items() if self.supervisor.are_ready(parts)},
        )
        if self.keeper.look(now_s, sight) and not self.supervisor.is_drained():
            for model in self.keeper.models:
                self.supervisor.want(self.parts[model.name], is_wanted=model.is_wanted)


def make_keeper(options: ServeOptions, plans: Sequence[ModelPlan]) -> ModelKeeper | None:
    """The keeper of these models, not begun; None where all of them stay.

    Raises:
        OptionInvalid: `--keep-warm` names no model, or one fits beside those kept warm by no means.
    """
    names = [plan.name for plan in plans]
    for name in options.keep_warm:
        if name not in names or options.model_bytes is None:
            expected = f"a name of {', '.join(names)}, with --model-memory"
            raise OptionInvalid("--keep-warm", name, expected)
    if options.model_bytes is None:
        return None
    num_workers = sum(options.workers.values())
    models = [
        KeptModel(plan.name, num_workers * _guess_bytes(plan.path), plan.name in options.keep_warm)
        for plan in plans
    ]
    warm = sum(model.num_bytes for model in models if model.is_warm)
    needed = warm + max((model.num_bytes for model in models if not model.is_warm), default=0)
    if needed > options.model_bytes:
        expected = f"at least {needed >> 20}MiB, for the largest model beside those kept warm"
        raise OptionInvalid("--model-memory", f"{options.model_bytes >> 20}MiB", expected)
    return ModelKeeper(options.model_bytes, models)


def _guess_bytes(directory: Path | None) -> int:
    """What one worker of a model takes before it has run."""
    if directory is None or not directory.is_dir():
        return WORKER_BYTES
    for pattern in _WEIGHTS:
        sizes = [file.stat().st_size for file in directory.glob(pattern) if file.is_file()]
        if sizes:
            return WORKER_BYTES + sum(sizes)
    return WORKER_BYTES
