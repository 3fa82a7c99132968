"""What a client of files and batches can be refused with, in OpenAI's words.

RequestRefused (pipeline.intake.errors)
├── ObjectUnknown      404  not_found               → check the id and the key
├── FileInUse          400  file_in_use             → cancel the batch first, or wait for its end
├── FileEmpty          400  empty_file              → upload a file with at least one request
├── PurposeWrong       400  invalid_value           → upload the file with purpose `batch`
├── TooLateToCancel    400  batch_not_cancellable   → nothing to do, it is over
└── DatabaseAway       503  store_unavailable       → after Retry-After
"""

from __future__ import annotations

from pipeline.intake.errors import INVALID_REQUEST, SERVER_ERROR, RequestRefused

_RETRY_AFTER_S = 2


class ObjectUnknown(RequestRefused):
    """No such file or batch, or it is somebody else's."""

    def __init__(self, what: str, param: str | None = None) -> None:
        super().__init__(404, INVALID_REQUEST, "not_found", param, f"There is no such {what}.")


class FileInUse(RequestRefused):
    """An unfinished batch reads the file."""

    def __init__(self, batch_id: str) -> None:
        message = f"The file is the input of {batch_id}, which is not finished."
        super().__init__(400, INVALID_REQUEST, "file_in_use", None, message)


class FileEmpty(RequestRefused):
    """The input of a new batch has no bytes."""

    def __init__(self) -> None:
        message = "The input file is empty."
        super().__init__(400, INVALID_REQUEST, "empty_file", "input_file_id", message)


class PurposeWrong(RequestRefused):
    """The input of a new batch was uploaded for something else."""

    def __init__(self, purpose: str) -> None:
        message = f"The purpose of the input file must be 'batch', not '{purpose}'."
        super().__init__(400, INVALID_REQUEST, "invalid_value", "input_file_id", message)


class TooLateToCancel(RequestRefused):
    """The batch has all its results already, or has failed."""

    def __init__(self, status: str) -> None:
        message = f"A batch with the status '{status}' cannot be cancelled."
        super().__init__(400, INVALID_REQUEST, "batch_not_cancellable", None, message)


class DatabaseAway(RequestRefused):
    """The database of files and batches does not answer."""

    def __init__(self) -> None:
        message = "The server cannot read its files and batches at the moment."
        super().__init__(503, SERVER_ERROR, "store_unavailable", None, message)
        self.retry_after_s = _RETRY_AFTER_S
