"""Memory that is given to the NIXL library, by a stand-in of the library: it is large and seldom here."""

from __future__ import annotations

import gc
import sys
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tiering.errors import TransportMissing
from tiering.stores.slab_file import aligned_array
from tiering.transports.nixl_agent import NixlAgent


class NotSupported(Exception):
    """What the stand-in raises."""


class Library:
    """The few calls that concern memory."""

    refuses = False

    def __init__(self, name: str, config: object) -> None:
        del name, config

    def register_memory(self, rows: list[Any], kind: str) -> None:
        del rows, kind
        if self.refuses:
            raise NotSupported("no memory may be pinned")

    def get_agent_metadata(self) -> bytes:
        return b"where it lies"


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    api, bindings = ModuleType("nixl._api"), ModuleType("nixl._bindings")
    strict = SimpleNamespace(NIXL_THREAD_SYNC_STRICT=1)
    vars(api).update(nixl_thread_sync_t=strict, nixl_agent=Library, nixl_agent_config=dict)
    vars(bindings).update(NotSupported=NotSupported)
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setitem(sys.modules, "nixl._bindings", bindings)
    monkeypatch.setattr(Library, "refuses", False)


def test_memory_that_the_library_refuses_is_a_missing_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent = NixlAgent()
    monkeypatch.setattr(Library, "refuses", True)
    with pytest.raises(TransportMissing, match="no memory may be pinned"):
        agent.register(aligned_array(4096))


def test_memory_that_peers_may_write_to_stays_while_the_agent_lives() -> None:
    agent = NixlAgent()
    memory = aligned_array(4096)
    there = weakref.ref(memory)
    assert agent.register(memory) == b"where it lies"
    del memory
    gc.collect()
    assert there() is not None
