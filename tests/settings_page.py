"""`python -m tests.settings_page`: bring the tables of `docs/settings.md` up to date with the code.

It lies here because nothing that ships may know gateway and workers at once. The text around the tables
is written by hand.
"""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from gateway.settings import GatewaySettings
from pipeline.settings import PipelineSettings
from tiering.settings import KvdSettings
from workers.settings import WorkerSettings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "settings.md"
BEGIN = "<!-- made by `python -m tests.settings_page` from here -->"
END = "<!-- to here -->"
ROOMS: tuple[tuple[str, type[BaseSettings]], ...] = (
    ("All processes", PipelineSettings),
    ("The gateway", GatewaySettings),
    ("A worker", WorkerSettings),
    ("The cache daemon", KvdSettings),
)
# Defaults that depend on the machine.
_SHOWN = {"node": "the host's name", "data_dir": "`~/.local/share/pointsman`"}


def updated(page: str) -> str:
    """The page with its tables as the code has them.

    Raises:
        ValueError: a mark is missing.
    """
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError("the page lacks its marks")
    tables = "\n".join(_table(title, settings) for title, settings in ROOMS)
    return f"{head}{BEGIN}\n\n{tables}\n{END}{tail}"


def _table(title: str, settings: type[BaseSettings]) -> str:
    rows = [f"## {title}\n", "| variable | default | what it is |", "|---|---|---|"]
    prefix = settings.model_config.get("env_prefix", "")
    for name, field in settings.model_fields.items():
        if field.validation_alias is None:  # else it is another room's
            what = ". ".join(filter(None, (field.description, _choices(field.annotation))))
            rows.append(f"| `{prefix}{name.upper()}` | {_default(name, field)} | {what} |")
    return "\n".join(rows) + "\n"


def _default(name: str, field: FieldInfo) -> str:
    value = field.default
    if name in _SHOWN:
        return _SHOWN[name]
    if value is PydanticUndefined:
        return "needed"
    if value is None or value == "" or isinstance(value, SecretStr):
        return ""
    shown = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{shown}`"


def _choices(kind: Any) -> str:
    if get_origin(kind) is Literal:
        names = [str(name) for name in get_args(kind)]
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        names = [str(member.value) for member in kind]
    else:
        return ""
    return "One of " + ", ".join(f"`{name}`" for name in names)


def main() -> int:
    """Write the page."""
    PAGE.write_text(updated(PAGE.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
