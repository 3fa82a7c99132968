"""`python -m gateway.api_page`: bring the tables of `docs/api.md` up to date with the code.

The text around the tables is written by hand; what lies between the two marks is made here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gateway.endpoints import CHAT, COMPLETION, ENDPOINTS, RESPONSE, Body
from gateway.openapi import body_schema
from pipeline.intake.field_policy import FieldPolicy

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
BEGIN = "<!-- made by `python -m gateway.api_page` from here -->"
END = "<!-- to here -->"
_BODIES = (
    ("`POST /v1/chat/completions`", CHAT),
    ("`POST /v1/completions`", COMPLETION),
    ("`POST /v1/responses`", RESPONSE),
)
_LIMITS = {
    "minimum": ">=",
    "exclusiveMinimum": ">",
    "maximum": "<=",
    "exclusiveMaximum": "<",
    "minLength": "length >=",
    "maxLength": "length <=",
    "minItems": "items >=",
}


def updated(page: str) -> str:
    """The page with its tables as the code has them.

    Raises:
        ValueError: a mark is missing.
    """
    head, _, rest = page.partition(BEGIN)
    _, mark, tail = rest.partition(END)
    if not mark:
        raise ValueError("the page lacks its marks")
    return f"{head}{BEGIN}\n\n{_tables()}\n{END}{tail}"


def _tables() -> str:
    parts = ["## Routes\n", _routes()]
    for title, body in _BODIES:
        parts += [f"## Fields of {title}\n", _fields(body)]
    return "\n".join(parts)


def _routes() -> str:
    rows = ["| route | what it does |", "|---|---|"]
    for endpoint in ENDPOINTS:
        query = f" (`{'`, `'.join(endpoint.query)}`)" if endpoint.query else ""
        rows.append(f"| `{endpoint.method} {endpoint.path}` | {endpoint.summary}{query} |")
    return "\n".join(rows) + "\n"


def _fields(body: Body) -> str:
    policy = body.policy or FieldPolicy(frozenset(), frozenset(), {})
    schema = body_schema(body)
    rows = ["| field | type | default |", "|---|---|---|"]
    for name, field in schema["properties"].items():
        if name not in policy.ignored:
            default = "required" if name in schema["required"] else _default(field)
            rows.append(f"| `{name}` | {_type(field)} | {default} |")
    ignored = ", ".join(f"`{name}`" for name in sorted(policy.ignored))
    refused = ", ".join(_refused(name, values) for name, values in sorted(policy.neutral.items()))
    return (
        "\n".join(rows)
        + f"\n\nPassed over, and named in the header `X-Ignored-Params`: {ignored}.\n"
        + f"\nRefused with 400 `unsupported_parameter`, unless they say what is so anyway: {refused}."
        + " So is every other field.\n"
    )


def _refused(name: str, values: tuple[object, ...]) -> str:
    if not values:
        return f"`{name}`"
    return f"`{name}` ({' or '.join(f'`{json.dumps(value)}`' for value in values)})"


def _default(field: Mapping[str, Any]) -> str:
    return f"`{json.dumps(field['default'])}`" if field.get("default") is not None else ""


def _type(field: Mapping[str, Any]) -> str:
    options = [option for option in field.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(_type(option) for option in options))
    if "const" in field or "enum" in field:
        values = field.get("enum", [field.get("const")])
        return ", ".join(f"`{json.dumps(value)}`" for value in values)
    kind = str(field.get("type", "any"))
    if kind == "array":
        kind = f"list of {_type(field.get('items', {}))}"
    limits = [f"{sign} {field[name]}" for name, sign in _LIMITS.items() if name in field]
    return f"{kind} {', '.join(limits)}".strip()


def main() -> int:
    """Rewrite the page in place."""
    PAGE.write_text(updated(PAGE.read_text("utf-8")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
