"""Settings that every process of a pipeline shares."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.errors import UnknownSettings

PREFIX = "POINTSMAN_"
# Rooms with settings of their own; each root checks its own names.
ROOM_PREFIXES = ("POINTSMAN_GATEWAY_", "POINTSMAN_WORKER_", "POINTSMAN_KVD_", "POINTSMAN_TEST_")


def default_data_dir() -> Path:
    """Where state lives unless told otherwise: $XDG_DATA_HOME/pointsman."""
    base = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(base) / "pointsman"


class PipelineSettings(BaseSettings):
    """What gateway, workers, Flower and the command line must agree on.

    Environment variables are the field names in capitals after `POINTSMAN_`.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0", description="redis, rediss or unix URL"
    )
    node: str = Field(default_factory=socket.gethostname, description="one per machine and kvd")
    engine: Literal["torch", "digest", "script"] = "torch"
    model: Path | None = Field(default=None, description="model directory, or the script file")
    model_name: str = Field(default="", description="name that clients use; empty: from `model`")
    chat_template: Path | None = Field(
        default=None, description="a file, instead of the model's own template"
    )
    chat_template_kwargs: bool = Field(
        default=True, description="clients may pass values to the template"
    )
    model_aliases: str = Field(
        default="", description="further names that clients may use, with commas between"
    )
    data_dir: Path = Field(default_factory=default_data_dir)
    database_url: str = Field(
        default="", description="of files and batches, for SQLAlchemy; empty: SQLite in `data_dir`"
    )
    files_url: str = Field(
        default="", description="where file bytes lie, for fsspec; empty: in `data_dir`"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["console", "json"] = "console"

    lease_s: float = Field(default=4.0, gt=0.5, description="a silent worker is lost after this")
    max_attempts: int = Field(default=3, ge=1, description="1 turns recovery off")
    max_waiting: int = Field(
        default=10_000, ge=1, description="beyond the workers' places; more are refused"
    )
    max_waiting_tokens: int = Field(default=0, ge=0, description="of prompts; 0: no limit")
    max_open_per_tenant: int = Field(
        default=0, ge=0, description="waiting and running; 0: no limit"
    )
    max_open_per_model: int = Field(default=0, ge=0, description="waiting and running; 0: no limit")
    queue_deadline_s: float = Field(default=60.0, gt=0)
    total_deadline_s: float = Field(default=600.0, gt=0)
    first_token_deadline_s: float = Field(
        default=180.0, ge=0, description="from submission; 0: none; batches have none"
    )
    token_gap_deadline_s: float = Field(
        default=60.0, ge=0, description="between two tokens, recovery included; 0: none"
    )
    batch_deadline_s: float = Field(
        default=86_400.0, gt=0, description="of a batch, and of requests at batch priority"
    )
    retention_s: int = Field(default=600, ge=1, description="how long an ended request is readable")
    dead_letter_retention_s: int = Field(
        default=86_400, ge=1, description="how long a dead letter keeps its prompt"
    )

    @property
    def served_model_name(self) -> str:
        """`model_name`, else the last part of `model`, else the engine's name."""
        if self.model_name:
            return self.model_name
        return self.model.stem if self.model is not None else self.engine


def split_names(text: str) -> tuple[str, ...]:
    """Names with commas between, each once, in their order."""
    names = (name.strip() for name in text.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def refuse_unknown_names(
    settings: type[BaseSettings], environ: Iterable[str], *, other_prefixes: tuple[str, ...] = ()
) -> None:
    """Refuse environment variables under a class's prefix that no field owns.

    pydantic-settings passes over a misspelt name in silence.

    Raises:
        UnknownSettings: at least one such name is set.
    """
    prefix = settings.model_config.get("env_prefix", "")
    owned = {f"{prefix}{field}".upper() for field in settings.model_fields}
    strangers = tuple(
        sorted(
            name
            for name in environ
            if name.startswith(prefix) and name not in owned and not name.startswith(other_prefixes)
        )
    )
    if strangers:
        raise UnknownSettings(strangers)


def load_pipeline_settings() -> PipelineSettings:
    """The shared settings of this process's environment.

    Raises:
        UnknownSettings: a misspelt name.
        pydantic.ValidationError: a value that makes no sense.
    """
    refuse_unknown_names(PipelineSettings, os.environ, other_prefixes=ROOM_PREFIXES)
    return PipelineSettings()
