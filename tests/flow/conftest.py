"""Whole pipelines of real processes for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.flow.rig import Rig


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
