"""A Redis server of our own: its configuration, and its life when nothing else supervises it."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from pathlib import Path
from urllib.parse import quote

import redis

from pipeline.cli.data_directory import write_private
from pipeline.cli.errors import RedisUnreachable
from pipeline.cli.redis_binary import find_redis_binary

LOOPBACK = "127.0.0.1"
START_LIMIT_S = 20.0
STOP_LIMIT_S = 10.0


def free_port(host: str = LOOPBACK) -> int:
    """A port that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class EmbeddedRedis:
    """One server on loopback TCP, or on a Unix socket, with a random password.

    The password travels in a configuration file of mode 0600, never on a command line. `persistent`
    keeps an append-only file in `data_dir`, flushed once a second; without it nothing is written.
    Either way the server evicts nothing: a full memory is an error that its client sees.

    A supervisor uses `prepare`, `command` and `is_answering`; a test uses `start`, `stop`, `kill`
    and `restart`. Port, password and data stay the same through all of them.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        port: int | None = None,
        unix_socket: Path | None = None,
        persistent: bool = True,
    ) -> None:
        self._data_dir = data_dir.absolute()
        self._unix_socket = unix_socket
        self._port = 0 if unix_socket is not None else (port or free_port())
        self._persistent = persistent
        self._password = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL for redis-py, password included: `redis://` on TCP, `unix://` on a socket."""
        if self._unix_socket is not None:
            return f"unix://:{self._password}@{quote(str(self._unix_socket))}?db=0"
        return f"redis://:{self._password}@{LOOPBACK}:{self._port}/0"

    @property
    def pid(self) -> int | None:
        """The process that `start` made, None when it is not running."""
        is_alive = self._process is not None and self._process.poll() is None
        return self._process.pid if self._process is not None and is_alive else None

    @property
    def command(self) -> tuple[str, ...]:
        """The command line of the server; call `prepare` before it runs."""
        return (str(find_redis_binary().path), str(self._config_path))

    def prepare(self) -> None:
        """Write the configuration file."""
        self._data_dir.mkdir(parents=True, exist_ok=True)
        write_private(self._config_path, self._config())

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            RedisUnreachable: it ended, or did not answer within 20 s; the end of its log is named.
        """
        self.prepare()
        with (self._data_dir / "redis.log").open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 (a path we found ourselves)
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        deadline_s = time.monotonic() + START_LIMIT_S
        while not self.is_answering():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                tail = (self._data_dir / "redis.log").read_text(errors="replace")[-800:]
                raise RedisUnreachable(self._address, f"did not start:\n{tail}")
            time.sleep(0.02)

    def stop(self) -> None:
        """End it in good order (the append-only file is flushed); idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """End it with SIGKILL, as a crash would; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Stop if running, and start again with the same address, password and data."""
        self.stop()
        self.start()

    def is_answering(self) -> bool:
        """True once the server accepts commands (it refuses them while it loads its file)."""
        client = redis.Redis.from_url(self.url, socket_timeout=2, socket_connect_timeout=2)
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False
        finally:
            client.close()

    @property
    def _address(self) -> str:
        return str(self._unix_socket) if self._unix_socket else f"{LOOPBACK}:{self._port}"

    @property
    def _config_path(self) -> Path:
        return self._data_dir / "redis.conf"

    def _config(self) -> str:
        where = [f"port {self._port}", f"bind {LOOPBACK}"]
        if self._unix_socket is not None:
            where += [f"unixsocket {_quoted(self._unix_socket)}", "unixsocketperm 600"]
        return "\n".join(
            [
                *where,
                f"dir {_quoted(self._data_dir)}",
                f'requirepass "{self._password}"',
                f"appendonly {'yes' if self._persistent else 'no'}",
                "appendfsync everysec",
                'save ""',
                "maxmemory-policy noeviction",
                # The largest backlog of token messages that a gateway may owe before it is cut off
                # and replays from the log.
                "client-output-buffer-limit pubsub 64mb 16mb 60",
                "tcp-backlog 128",
                "protected-mode yes",
                "daemonize no",
                "",
            ]
        )


def url_of_running(data_dir: Path) -> str | None:
    """The URL of the server whose configuration lies in a data directory; None if there is none."""
    try:
        lines = (data_dir / "redis.conf").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    fields = {name: value for name, _, value in (line.partition(" ") for line in lines)}
    password = fields.get("requirepass", "").strip('"')
    if "unixsocket" in fields:
        path = fields["unixsocket"].strip('"').replace('\\"', '"').replace("\\\\", "\\")
        return f"unix://:{password}@{quote(path)}?db=0"
    return f"redis://:{password}@{LOOPBACK}:{fields['port']}/0" if "port" in fields else None


def _quoted(path: Path) -> str:
    text = os.fspath(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
