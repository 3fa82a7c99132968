"""How our modules are run as programs: from where they are, wherever the operator stands."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """`python -m module`, without the current directory on the path.

    The packages have everyday names: a folder `workers` where the operator happens to stand must
    not be taken for ours.
    """
    return (sys.executable, "-P", "-m", module, *arguments)


def with_import_path(env: Mapping[str, str]) -> dict[str, str]:
    """The environment, with our source on the path when the distribution is not installed."""
    try:
        distribution("pointsman")
    except PackageNotFoundError:
        source = str(Path(__file__).resolve().parents[2])
        paths = [source, *filter(None, [env.get("PYTHONPATH")])]
        return {**env, "PYTHONPATH": os.pathsep.join(paths)}
    return dict(env)
