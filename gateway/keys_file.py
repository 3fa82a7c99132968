"""The keys file, read again when it changes: a key comes or goes without a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from gateway.auth import KeyRing, KeysFileBroken

log = structlog.get_logger(__name__)

LOOK_S = 1.0
_Stamp = tuple[int, int, int] | None


class KeysFile:
    """Holds the keys of a file, or the open ring where there is none.

    It looks at the file once a second at most. What is broken, or gone, changes nothing.
    """

    def __init__(self, path: Path | None, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Raises as `KeyRing.load`."""
        self._path = path
        self._clock_s = clock_s
        self._read = self._seen = self._stamp()
        self._ring = KeyRing.load(path)
        self._looked_s = clock_s()

    @property
    def ring(self) -> KeyRing:
        """Who may call now."""
        now_s = self._clock_s()
        if self._path is not None and now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self._look(self._path)
        return self._ring

    def _look(self, path: Path) -> None:
        stamp, before = self._stamp(), self._seen
        self._seen = stamp
        # Seen alike twice: somebody may be writing into it.
        if stamp == self._read or stamp != before:
            return
        self._read = stamp
        try:
            self._ring = KeyRing.load(path)
        except (KeysFileBroken, OSError) as error:
            log.error("keys_not_read", error=str(error))
        else:
            log.info("keys_read", num_keys=self._ring.num_keys)

    def _stamp(self) -> _Stamp:
        """Changes with the file; None: it is not there."""
        if self._path is None:
            return None
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
