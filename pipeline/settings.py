"""Settings that every process of a pipeline shares."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.errors import SettingsInvalid, UnknownSettings

PREFIX = "POINTSMAN_"
# Rooms with settings of their own; each root checks its own names.
ROOM_PREFIXES = ("POINTSMAN_GATEWAY_", "POINTSMAN_WORKER_", "POINTSMAN_KVD_", "POINTSMAN_TEST_")

_Settings = TypeVar("_Settings", bound=BaseSettings)


def default_data_dir() -> Path:
    """Where state lives unless told otherwise: `$XDG_DATA_HOME/pointsman`, else `~/.local/share/pointsman`."""
    base = os.environ.get("XDG_DATA_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "share"
    return root / "pointsman"


class PipelineSettings(BaseSettings):
    """What gateway, workers, Flower and the command line must agree on.

    Environment variables are the field names in capitals after `POINTSMAN_`.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="the pipeline's Redis: a redis, rediss or unix URL",
    )
    node: str = Field(
        default_factory=socket.gethostname,
        description="this machine's name: its workers and its kvd are one node",
    )
    engine: Literal["torch", "digest", "script"] = Field(
        default="torch", description="digest and script are test engines"
    )
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
    data_dir: Path = Field(
        default_factory=default_data_dir, description="of the gateway: batches, converted models"
    )
    database_url: str = Field(
        default="", description="of files and batches, for SQLAlchemy; empty: SQLite in `data_dir`"
    )
    files_url: str = Field(
        default="", description="where file bytes lie, for fsspec; empty: in `data_dir`"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="from this level on events are logged"
    )
    log_format: Literal["console", "json"] = Field(
        default="console", description="one line an event, for people or for machines"
    )

    lease_s: float = Field(default=4.0, gt=0.5, description="a silent worker is lost after this")
    max_attempts: int = Field(
        default=3,
        ge=1,
        description="a request that lost so many workers is given up; 1: no recovery",
    )
    max_waiting: int = Field(
        default=10_000, ge=1, description="requests beyond the workers' places; more are refused"
    )
    max_waiting_tokens: int = Field(
        default=0, ge=0, description="prompt tokens not computed yet; 0: no limit"
    )
    max_open_per_tenant: int = Field(
        default=0, ge=0, description="requests waiting and running; 0: no limit"
    )
    max_open_per_model: int = Field(
        default=0, ge=0, description="requests waiting and running; 0: no limit"
    )
    queue_deadline_s: float = Field(
        default=60.0,
        gt=0,
        description="waiting in a queue; who would wait longer is refused at once",
    )
    total_deadline_s: float = Field(
        default=600.0, gt=0, description="from submission to the last token"
    )
    first_token_deadline_s: float = Field(
        default=180.0,
        ge=0,
        description="to the first token, from submission; 0: none; batches have none",
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


def read_settings(settings: type[_Settings], *, other_prefixes: tuple[str, ...] = ()) -> _Settings:
    """A class's settings from this process's environment.

    Raises:
        UnknownSettings: a misspelt name.
        SettingsInvalid: values that make no sense.
    """
    refuse_unknown_names(settings, os.environ, other_prefixes=other_prefixes)
    try:
        return settings()
    except ValidationError as error:
        raise SettingsInvalid(_problems(settings, error)) from error


def _problems(settings: type[BaseSettings], error: ValidationError) -> tuple[str, ...]:
    """What is wrong with which variable, a sentence each."""
    prefix = settings.model_config.get("env_prefix", "")
    found = []
    for problem in error.errors(include_url=False, include_context=False, include_input=False):
        field = str(problem["loc"][0]) if problem["loc"] else ""
        name = field if field.startswith(PREFIX) else f"{prefix}{field.upper()}"
        found.append(f"{name if field else prefix + '*'}: {problem['msg']}")
    return tuple(found)


def load_pipeline_settings() -> PipelineSettings:
    """The shared settings of this process's environment. Raises as `read_settings`."""
    return read_settings(PipelineSettings, other_prefixes=ROOM_PREFIXES)
