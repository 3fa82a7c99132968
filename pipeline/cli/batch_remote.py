"""`pointsman batch submit|status|watch|cancel|fetch`: batches that a gateway runs by itself."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from pipeline.batch.api_client import BatchApi, BatchView, endpoint_of
from pipeline.batch.errors import BatchError

POLL_S = 0.5
PLAIN_INTERVAL_S = 5.0
EXIT_STOPPED = 130
_SHOWN = 20


def submit(
    api: BatchApi, path: Path, metadata: Mapping[str, str], console: Console, *, watches: bool
) -> int:
    """Upload a file and order its batch; prints the batch's id alone on a line."""

    def run() -> int:
        endpoint = endpoint_of(path)
        batch = api.create(api.upload(path), endpoint, metadata)
        console.print(batch.id, soft_wrap=True, highlight=False)
        return _watch(api, batch.id, console) if watches else 0

    return _guarded(run, console)


def status(api: BatchApi, batch_id: str | None, console: Console) -> int:
    """One batch in a sentence, or a table of the newest ones."""

    def run() -> int:
        if batch_id is not None:
            _say(console, _sentence(api.retrieve(batch_id)))
            return 0
        table = Table("batch", "status", "requests", "completed", "failed", box=None)
        for batch in api.latest(_SHOWN):
            table.add_row(batch.id, batch.status, *(str(count) for count in batch.counts))
        console.print(table, soft_wrap=True)
        return 0

    return _guarded(run, console)


def watch(api: BatchApi, batch_id: str, console: Console) -> int:
    """Follow a batch to its end. 0: completed. 1: it ended otherwise. 130: Ctrl-C, the batch goes on."""
    return _guarded(lambda: _watch(api, batch_id, console), console)


def cancel(api: BatchApi, batch_id: str, console: Console) -> int:
    """Cancel a batch and wait until its files are written."""

    def run() -> int:
        batch = api.cancel(batch_id)
        while not batch.is_over:
            time.sleep(POLL_S)
            batch = api.retrieve(batch_id)
        _say(console, _sentence(batch))
        return 0

    return _guarded(run, console)


def fetch(api: BatchApi, batch_id: str, output: Path, errors: Path | None, console: Console) -> int:
    """Download what a batch has written; a file appears under its name when it is whole."""

    def run() -> int:
        batch = api.retrieve(batch_id)
        if not batch.is_over:
            _say(console, f"{_sentence(batch)}; its files are written at the end")
            return 1
        for field, path in (("output_file_id", output), ("error_file_id", errors)):
            file_id = batch.fields.get(field)
            if path is not None and file_id is not None:
                _say(console, f"{path}: {_download(api, str(file_id), path)} bytes")
        num_failed = batch.counts[2]
        if num_failed and errors is None:
            _say(console, f"{num_failed} requests failed; --errors FILE fetches why")
        return 0

    return _guarded(run, console)


def _watch(api: BatchApi, batch_id: str, console: Console) -> int:
    show = _Bar(console) if console.is_terminal else _Lines(console)
    try:
        batch = api.retrieve(batch_id)
        while not batch.is_over:
            show.update(batch)
            time.sleep(POLL_S)
            batch = api.retrieve(batch_id)
        show.update(batch)
    finally:
        show.close()
    _say(console, _sentence(batch))
    for problem in batch.problems:
        _say(console, f"  {problem}")
    return 0 if batch.status == "completed" else 1


class _Lines:
    """A sentence now and then, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_s = float("-inf")

    def update(self, batch: BatchView) -> None:
        now_s = time.monotonic()
        if not batch.is_over and now_s - self._shown_s >= PLAIN_INTERVAL_S:
            self._shown_s = now_s
            _say(self._console, _sentence(batch))

    def close(self) -> None:
        """Nothing to put away."""


class _Bar:
    """A bar, for a terminal."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("batch", total=None, pace="")
        self._began_s: float | None = None
        self._before = 0
        self._progress.start()

    def update(self, batch: BatchView) -> None:
        total, completed, failed = batch.counts
        now_s = time.monotonic()
        if self._began_s is None and total:
            self._began_s, self._before = now_s, completed + failed
        pace = f"{failed} failed"
        if self._began_s is not None and (num_new := completed + failed - self._before):
            each_s = (now_s - self._began_s) / num_new
            left_s = round(each_s * (total - completed - failed))
            pace += f"  {1 / max(each_s, 1e-6):.1f}/s  ETA {left_s // 60}:{left_s % 60:02d}"
        self._progress.update(
            self._task,
            description=batch.status,
            completed=completed + failed,
            total=total or None,
            pace=pace,
        )

    def close(self) -> None:
        self._progress.stop()


def _sentence(batch: BatchView) -> str:
    total, completed, failed = batch.counts
    return (
        f"{batch.id}: {batch.status}, {completed + failed} of {total} ended "
        f"({completed} completed, {failed} failed), {batch.num_tokens} tokens"
    )


def _download(api: BatchApi, file_id: str, path: Path) -> int:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            num_bytes = api.download(file_id, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return num_bytes


def _guarded(run: Callable[[], int], console: Console) -> int:
    try:
        return run()
    except (BatchError, OSError) as error:
        _say(console, f"batch: {error}")
        return 1
    except KeyboardInterrupt:
        _say(console, "the batch goes on; `pointsman batch watch` shows it again")
        return EXIT_STOPPED


def _say(console: Console, sentence: str) -> None:
    console.print(Text(sentence), soft_wrap=True)
