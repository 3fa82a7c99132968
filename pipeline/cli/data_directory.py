"""The directory that holds everything one `pointsman serve` keeps."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from pipeline.cli.errors import DataDirectoryBusy
from pipeline.settings import default_data_dir

# sun_path holds 108 bytes with its final zero.
SOCKET_PATH_LIMIT_BYTES = 100


def default_path() -> Path:
    """`$POINTSMAN_DATA_DIR`, else what the processes take by default."""
    given = os.environ.get("POINTSMAN_DATA_DIR")
    return Path(given) if given else default_data_dir()


class DataDirectory:
    """Names of the files below one data directory. What we make there is its owner's alone."""

    def __init__(self, path: Path) -> None:
        self.path = path.expanduser().absolute()
        self.redis = self.path / "redis"
        self.models = self.path / "models"
        self.logs = self.path / "logs"
        self.nvme_slab = self.path / "kv" / "nvme.slab"
        self.flower_auth = self.path / "flower.auth"
        self.flower_db = self.path / "flower" / "tasks"
        self._lock = self.path / "serve.lock"

    def create(self) -> None:
        """Make the directories that are missing, for their owner only; those that exist stay as they are."""
        below = (self.redis, self.models, self.logs, self.nvme_slab.parent, self.flower_db.parent)
        for directory in (self.path, *below):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextmanager
    def locked(
        self, patience_s: float = 30.0, on_wait: Callable[[], None] = lambda: None
    ) -> Iterator[int]:
        """Hold the directory; yields the lock's file descriptor.

        The descriptor is handed to every child: the lock is one open file description, so it stays
        taken until the last child of a killed supervisor has gone too. Those are waited for,
        after `on_wait` was called.

        Raises:
            DataDirectoryBusy: a living supervisor holds it, or children that do not end.
        """
        fd = self._take(time.monotonic() + patience_s, on_wait)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield fd
        finally:
            self._lock.unlink(missing_ok=True)
            os.close(fd)

    @contextmanager
    def socket_directory(self) -> Iterator[Path]:
        """A directory for Unix sockets whose paths fit, removed at the end with what is in it."""
        run = self.path / "run"
        _remove(run)
        if len(os.fsencode(run / "kvd.sock")) > SOCKET_PATH_LIMIT_BYTES:
            path = Path(tempfile.mkdtemp(prefix="pointsman-"))
            run.symlink_to(path)  # the way there for other commands
        else:
            path = run
            path.mkdir(mode=0o700)
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
            _remove(run)

    @property
    def kvd_socket(self) -> Path:
        """Where the cache daemon of a running `pointsman serve` listens."""
        return (self.path / "run").resolve() / "kvd.sock"

    def _take(self, deadline_s: float, on_wait: Callable[[], None]) -> int:
        is_first = True
        while True:
            fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner_pid = int(os.pread(fd, 32, 0).strip() or 0)
                os.close(fd)
                if psutil.pid_exists(owner_pid) or time.monotonic() > deadline_s:
                    raise DataDirectoryBusy(self.path, owner_pid) from None
                if is_first:
                    on_wait()
                is_first = False
                time.sleep(0.1)
            else:
                if os.fstat(fd).st_nlink:
                    return fd
                os.close(fd)  # the former owner removed the file between our open and our lock

    def log_path(self, part: str) -> Path:
        """The part's log file."""
        return self.logs / f"{part}.log"


def _remove(run: Path) -> None:
    if run.is_symlink():
        run.unlink()
    else:
        shutil.rmtree(run, ignore_errors=True)


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, also if it existed with a wider mode."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)


def kept_secret(path: Path, user: str) -> str:
    """`user:password` from the file, made on first use with a random password, mode 0600."""
    with suppress(FileNotFoundError):
        kept = path.read_text(encoding="utf-8").strip()
        if kept.startswith(f"{user}:") and len(kept) > len(user) + 1:
            path.chmod(0o600)
            return kept
    text = f"{user}:{secrets.token_urlsafe(18)}"
    write_private(path, text + "\n")
    return text
