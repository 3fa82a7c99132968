"""`pointsman gateway|worker|kvd|flower`: options become environment, then the process is replaced.

The command line may not import the processes (they stand above it), and a part that runs alone
wants no parent: `exec` gives both. An option that was not given leaves the environment as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cli.data_directory import kept_secret
from pipeline.cli.deployment import CLIENT_ONLY_NAMES
from pipeline.cli.flower import FLOWER_USER, flower_command
from pipeline.cli.interpreter import with_import_path


def become(command: Sequence[str], settings: Mapping[str, object]) -> None:
    """Replace this process by the command; never returns.

    `settings` maps environment names to values; None leaves a name alone, True and False become
    `true` and `false`.
    """
    env = {name: text for name, text in os.environ.items() if name not in CLIENT_ONLY_NAMES}
    for name, value in settings.items():
        if value is not None:
            env[name] = str(value).lower() if isinstance(value, bool) else str(value)
    sys.stdout.flush()
    os.execve(command[0], tuple(command), with_import_path(env))  # noqa: S606 (no shell is wanted)


def become_flower(
    redis_url: str | None, address: str, port: int, db: Path | None, auth_file: Path | None
) -> None:
    """Become Flower; the password is FLOWER_BASIC_AUTH, else what the file keeps."""
    auth = os.environ.get("FLOWER_BASIC_AUTH")
    if not auth and auth_file is not None:
        auth_file.parent.mkdir(parents=True, exist_ok=True)
        auth = kept_secret(auth_file, FLOWER_USER)
    if db is not None:
        db = db.absolute()
        db.parent.mkdir(parents=True, exist_ok=True)
        os.umask(0o077)  # it is a pickle: whoever may write it may run code as Flower
    os.chdir("/")  # Celery looks for applications in the current directory first
    become(
        flower_command(address, port, db),
        {"POINTSMAN_REDIS_URL": redis_url, "FLOWER_BASIC_AUTH": auth},
    )
