"""A pipeline on loopback, and virtual environments with clients as people have them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.flow.rig import Rig
from tests.flow.wire import script, write_book
from tests.pipeline.intake.tool_templates import HERMES

MakeVenv = Callable[..., Path]
BOOK = {
    "slow": script(*[f"{number} " for number in range(20)], token_delay_ms=10),
    "warm": script("It is ", "warm."),
    "calls": script("<tool_call>\n", '{"name": "weather", ', '"arguments": {}}', "\n</tool_call>"),
}


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A prefill and a decode worker with scripted answers; the model is called `m`."""
    folder = tmp_path_factory.mktemp("clients")
    template = folder / "tools.jinja"
    template.write_text(HERMES)
    book = write_book(folder, BOOK, context_tokens=4096)
    env = {"POINTSMAN_CHAT_TEMPLATE": str(template)}
    rig = Rig(folder, engine="script", model=book, env=env)
    try:
        yield rig.start()
    finally:
        rig.close()


@pytest.fixture(scope="session")
def make_venv() -> MakeVenv:
    """Makes an environment with these packages, once for all runs; the path of its Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "pointsman" / "client-venvs"
    folder.mkdir(parents=True, exist_ok=True)

    def make(*packages: str, pip_args: tuple[str, ...] = ()) -> Path:
        wanted = " ".join((sys.version, *packages, *pip_args))
        venv = folder / hashlib.sha256(wanted.encode()).hexdigest()[:16]
        python = venv / "bin" / "python"
        with (folder / f"{venv.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (venv / "complete").exists():
                subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
                command = [python, "-m", "pip", "install", "-q", *pip_args, *packages]
                subprocess.run(command, check=True, timeout=400)
                (venv / "complete").touch()
        return python

    return make
