"""Whole pipelines of real processes for the tests of this folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flow.rig import Rig
from workers.models.convert import convert, packaged_gguf


@pytest.fixture(scope="module")
def make_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    """Makes pipelines that end with the test module."""
    rigs: list[Rig] = []

    def make(**options: Any) -> Rig:
        rig = Rig(tmp_path_factory.mktemp("rig"), **options)
        rigs.append(rig)
        return rig.start()

    yield make
    for rig in rigs:
        rig.close()


@pytest.fixture(scope="module")
def smollm2() -> Path:
    """The packaged model, converted once."""
    default = Path.home() / ".cache" / "pointsman-tests"
    directory = Path(os.environ.get("POINTSMAN_TEST_DATA", default)) / "smollm2"
    directory.parent.mkdir(parents=True, exist_ok=True)
    convert(packaged_gguf(), directory, lambda *_: None)
    return directory
