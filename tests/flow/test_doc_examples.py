"""The examples of the pages for users run as they stand there, but for host and model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.flow.rig import REPOSITORY, Rig

BLOCK = re.compile(r"```(bash|python)\n(.*?)```", re.DOTALL)
PAGES = ("README.md", "docs/api.md", "docs/batches.md")
EXAMPLES = [
    pytest.param(language, text, id=f"{page}-{number}-{language}")
    for page in PAGES
    for number, (language, text) in enumerate(BLOCK.findall((REPOSITORY / page).read_text("utf-8")))
]


@pytest.fixture(scope="module")
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(engine="script", workers={"both-0": "both"}, has_kvd=False)


@pytest.mark.parametrize(("language", "text"), EXAMPLES)
def test_an_example_runs_and_says_what_came(rig: Rig, language: str, text: str) -> None:
    code = text.replace("http://127.0.0.1:8000", rig.base_url)
    for name in ("MODEL", "smollm2-135m-instruct"):
        code = code.replace(name, "m")
    command = {
        "bash": ["bash", "-euo", "pipefail", "-c", code],
        "python": [sys.executable, "-c", code],
    }[language]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert '"error":{' not in done.stdout, done.stdout


def test_the_pages_have_examples_of_every_kind() -> None:
    languages = {str(example.values[0]) for example in EXAMPLES}
    assert languages == {"bash", "python"}
    assert len(EXAMPLES) >= 7
