"""What Redis lets each part do is what its scripts do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pipeline.ledger
from pipeline.cli.redis_acl import RIGHTS, AclUser

SCRIPTS = sorted((Path(pipeline.ledger.__file__).parent / "lua").glob("*.lua"))
CALL = re.compile(r"(?:redis\.call|count)\(\s*'(\w+)'")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_gateways_and_workers_may_run_every_command_of_a_script(path: Path) -> None:
    """Redis asks for rights only when a command comes up, which may be once in a month."""
    named = {command.lower() for command in CALL.findall(path.read_text())}
    for user in (AclUser.GATEWAY, AclUser.WORKER):
        assert named <= set(RIGHTS[user].commands)


def test_the_scripts_were_looked_through() -> None:
    text = "".join(path.read_text() for path in SCRIPTS)
    assert len(CALL.findall(text)) == len(re.findall(r"redis\.call\(|\bcount\(", text)) - 2, (
        "but for the helper itself, each call names its command"
    )
