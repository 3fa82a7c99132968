"""The ledger's Lua scripts, each one atomic step."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def load_script(name: str) -> str:
    """Source of `lua/<name>.lua` behind the shared part."""
    folder = files("pipeline.ledger") / "lua"
    common = (folder / "common.lua").read_text(encoding="utf-8")
    return f"{common}\n{(folder / f'{name}.lua').read_text(encoding='utf-8')}"
