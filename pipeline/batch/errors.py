"""Why a batch does not start or stops early.

BatchError
├── BatchFileInvalid       a line of the input is not a batch request: correct it, nothing was sent
├── ResultsDamaged         a whole line of the output is no result: move the file away, or repair it
├── ResultsBusy            another run writes the same file: let it, or choose another file
├── GatewayRefuses         the key or the address is wrong: no line would pass
├── GatewayGone            the gateway stayed away: the same command goes on where this one stopped
├── PipelineRefuses        the model cannot be used from here: no line would pass
└── PipelineGone           Redis or all workers stayed away: the same command goes on where this one stopped
"""

from __future__ import annotations

from pathlib import Path


class BatchError(Exception):
    """Root of this package's errors."""


class BatchFileInvalid(BatchError):
    """A line of the input cannot be a request."""

    def __init__(self, path: Path, line_number: int, problem: str) -> None:
        super().__init__(path, line_number, problem)
        self.path, self.line_number, self.problem = path, line_number, problem

    def __str__(self) -> str:
        return f"{self.path}, line {self.line_number}: {self.problem}; nothing was sent"


class ResultsDamaged(BatchError):
    """A finished line of a results file cannot be read."""

    def __init__(self, path: Path, line_number: int) -> None:
        super().__init__(path, line_number)
        self.path, self.line_number = path, line_number

    def __str__(self) -> str:
        return (
            f"{self.path}, line {self.line_number} is not a result line; "
            "is it the results file of another program? Nothing was sent"
        )


class ResultsBusy(BatchError):
    """Another process writes this results file."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.path = path

    def __str__(self) -> str:
        return f"{self.path} is being written by another run"


class GatewayRefuses(BatchError):
    """The gateway answered in a way that every other line would be answered too."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message

    def __str__(self) -> str:
        return f"the gateway answered {self.status}: {self.message}"


class GatewayGone(BatchError):
    """The gateway could not be reached for longer than the patience."""

    def __init__(self, url: str, patience_s: float, cause: str) -> None:
        super().__init__(url, patience_s, cause)
        self.url, self.patience_s, self.cause = url, patience_s, cause

    def __str__(self) -> str:
        if not self.patience_s:
            return f"no gateway answers at {self.url} ({self.cause}); --url names another"
        return f"{self.url} was away for {self.patience_s:.0f} s ({self.cause})"


class PipelineRefuses(BatchError):
    """Every other line would be refused for the same reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"no line can run from here: {self.message}"


class PipelineGone(BatchError):
    """Nothing could be run for longer than the patience."""

    def __init__(self, cause: str, patience_s: float) -> None:
        super().__init__(cause, patience_s)
        self.cause, self.patience_s = cause, patience_s

    def __str__(self) -> str:
        return f"{self.cause}, for {self.patience_s:.0f} s"
