"""Settings of the gateway process, read at its root and nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from pipeline.settings import read_settings, split_names

MIB = 1 << 20


class GatewaySettings(BaseSettings):
    """Environment variables are the field names in capitals after `POINTSMAN_GATEWAY_`."""

    model_config = SettingsConfigDict(env_prefix="POINTSMAN_GATEWAY_", frozen=True, extra="forbid")

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(
        default=8000, ge=0, lt=65536, description="port to listen on; 0 takes a free one"
    )
    tls_cert_file: Path | None = Field(
        default=None, description="a chain in PEM, with `tls_key_file`: HTTPS instead of HTTP"
    )
    tls_key_file: Path | None = Field(default=None, description="its private key in PEM")
    max_body_bytes: int = Field(default=20 * MIB, ge=1024, description="most of one request's body")
    max_pending_body_bytes: int = Field(
        default=256 * MIB,
        ge=1024,
        description="most of all bodies in memory, being read or encoded; more are refused",
    )
    max_file_bytes: int = Field(default=200 * MIB, ge=1024, description="most of one upload")
    drain_s: float = Field(default=30.0, ge=0, description="time for running streams at a stop")
    keys_file: Path | None = Field(
        default=None,
        description="who may call, and what (docs/api.md); empty: everybody, everything",
    )
    cancel_on_disconnect: bool = Field(
        default=True, description="a client of the OpenAI routes that leaves stops its request"
    )
    metrics_need_key: bool = Field(
        default=True,
        description="where there is a keys file, `/metrics` takes a key with the right `metrics`",
    )
    models: str = Field(
        default="", description="further models of the same engine: NAME=DIRECTORY, commas between"
    )
    models_dir: Path | None = Field(
        default=None,
        description="where directories of models lie by their names; empty: `models` in the data directory",
    )
    encode_threads: int = Field(
        default=2, ge=1, le=64, description="threads for chat templates and tokenizers"
    )
    write_timeout_s: float = Field(
        default=60.0, gt=0, description="a client that takes no byte so long is given up"
    )
    read_timeout_s: float = Field(
        default=60.0, gt=0, description="a client that stops so long in a body is given up"
    )
    strict_fields: bool = Field(
        default=False, description="fields that would be passed over are refused"
    )
    webhook_private: bool = Field(
        default=False, description="webhooks may go to private addresses, and by plain http"
    )
    keep_alive_s: int = Field(
        default=75, ge=1, description="an idle connection is closed after this"
    )

    @property
    def more_models(self) -> dict[str, str]:
        """The paths of `models` by name."""
        pairs = (pair.partition("=") for pair in split_names(self.models))
        return {name.strip(): path.strip() for name, _, path in pairs}

    @model_validator(mode="after")
    def _name_models(self) -> Self:
        if not all(pair.partition("=")[0].strip() for pair in split_names(self.models)):
            raise ValueError("models has an entry without a name; write NAME=DIRECTORY")
        return self

    @model_validator(mode="after")
    def _agree_on_tls(self) -> Self:
        if (self.tls_cert_file is None) is not (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together")
        return self


def load_gateway_settings() -> GatewaySettings:
    """The settings of this process's environment. Raises as `read_settings`."""
    return read_settings(GatewaySettings)
