"""One NIXL agent: registered memory, and writes into that of another agent.

The library is the extra `nixl`. It moves bytes by UCX: over RDMA where there is any, else over shared
memory or TCP (`UCX_TLS`, `UCX_NET_DEVICES`). An agent that may write to us may write to all memory
that we registered; over TCP it is not even held to that. Only peers who proved the secret are told
where it lies.
"""

from __future__ import annotations

import importlib
import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from tiering.errors import TransportMissing
from tiering.stores.block_store import ByteArray

_MAX_PEERS = 64
_SHORTEST_PAUSE_S = 0.0001
_LONGEST_PAUSE_S = 0.005


class NixlAgent:
    """Any thread.

    Raises:
        TransportMissing: the library is not installed, or it cannot be used here.
    """

    def __init__(self) -> None:
        try:
            api = importlib.import_module("nixl._api")
            bindings = importlib.import_module("nixl._bindings")
        except ImportError as error:
            raise TransportMissing("nixl", str(error)) from error
        # It writes its own lines to standard output, where a daemon's events are: warnings to stderr.
        logging.getLogger("nixl").handlers.clear()
        errors = [value for value in vars(bindings).values() if isinstance(value, type)]
        self._errors = tuple(error for error in errors if issubclass(error, Exception))
        strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        try:
            config = api.nixl_agent_config(sync_mode=strict)
            self._agent: Any = api.nixl_agent(secrets.token_hex(16), config)
        except self._errors as error:
            raise TransportMissing("nixl", str(error)) from error
        self._lock = threading.Lock()
        self._memory: list[ByteArray] = []
        self._peers: OrderedDict[bytes, str] = (
            OrderedDict()
        )  # metadata -> name, used last at the end

    def register(self, memory: ByteArray) -> bytes:
        """Let peers write into this array for as long as the agent lives; what they have to know.

        The agent keeps the array: a peer that was given up may still write there.

        Raises:
            TransportMissing: the library refuses the memory.
        """
        try:
            self._agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
            self._memory.append(memory)
            return bytes(self._agent.get_agent_metadata())
        except self._errors as error:
            raise TransportMissing("nixl", str(error)) from error

    def write(
        self,
        peer: bytes,
        parts: Sequence[ByteArray],
        addresses: Sequence[int],
        check: Callable[[], None],
    ) -> None:
        """Copy arrays to addresses in the memory of the peer with this metadata; returns when they are there.

        `check` is called now and then, and ends the wait by raising; what was under way may still
        arrive then.

        Raises:
            ConnectionError: the peer is gone, or is none.
        """
        rows = [(part.ctypes.data, part.nbytes, 0) for part in parts]
        there = [(a, part.nbytes, 0) for a, part in zip(addresses, parts, strict=True)]
        agent = self._agent
        try:
            known = agent.register_memory([(*row, "") for row in rows], "DRAM")
            try:
                source, target = (agent.get_xfer_descs(some, "DRAM") for some in (rows, there))
                handle = agent.initialize_xfer("WRITE", source, target, self._name_of(peer))
                try:
                    self._finish(handle, check)
                finally:
                    agent.release_xfer_handle(handle)
            finally:
                agent.deregister_memory(known)
        except self._errors as error:
            self._forget(peer)
            raise ConnectionError(f"nixl: {error}") from error

    def _finish(self, handle: Any, check: Callable[[], None]) -> None:
        pause_s = _SHORTEST_PAUSE_S
        state = self._agent.transfer(handle)
        while state == "PROC":
            check()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise ConnectionError("nixl: the write failed")

    def _name_of(self, peer: bytes) -> str:
        with self._lock:
            if peer not in self._peers:
                name = self._agent.add_remote_agent(peer)
                self._peers[peer] = name.decode() if isinstance(name, bytes) else name
            self._peers.move_to_end(peer)
            oldest = next(iter(self._peers)) if len(self._peers) > _MAX_PEERS else None
            name = self._peers[peer]
        if oldest is not None:
            self._forget(oldest)
        return str(name)

    def _forget(self, peer: bytes) -> None:
        with self._lock:
            name = self._peers.pop(peer, None)
            if name is not None:
                try:
                    self._agent.remove_remote_agent(name)
                except self._errors:
                    return  # it knows it no more
