"""`pointsman batch run` as the operator sees it: a progress bar, or a line every few seconds."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from pipeline.batch.errors import BatchError
from pipeline.batch.line_client import LineClient, OnWait
from pipeline.batch.runner import BatchJob, BatchRunner
from pipeline.batch.tally import Tally

PLAIN_INTERVAL_S = 5.0
EXIT_STOPPED = 130


def run_batch(
    job: BatchJob,
    console: Console,
    make_client: Callable[[OnWait], LineClient] | None = None,
) -> int:
    """Run the job to its end or until Ctrl-C; returns the exit code. See `BatchRunner`.

    0: every request has its line (refused ones are named in the last sentence). 1: the batch could
    not start or go on. 130: stopped by Ctrl-C or SIGTERM.
    """
    try:
        with _Meter(console) as meter:
            tally, was_stopped = asyncio.run(_run(job, meter, make_client))
    except (BatchError, OSError) as error:
        console.print(Text(f"batch: {error}"), soft_wrap=True)
        return 1
    console.print(Text(_summary(tally, time.monotonic())), soft_wrap=True)
    if was_stopped and tally.num_ended < tally.num_requests:
        sentence = "stopped; the same command goes on with the rest, finished lines are kept"
        console.print(Text(sentence), soft_wrap=True)
        return EXIT_STOPPED
    return 0


async def _run(
    job: BatchJob, meter: _Meter, make_client: Callable[[OnWait], LineClient] | None
) -> tuple[Tally, bool]:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    tally = await BatchRunner(job, meter.show, make_client).run(stop)
    return tally, stop.is_set()


class _Meter:
    """Shows tallies; a context manager, because a live bar has to be put away."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_s = 0.0
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("batch"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=console,
        )

    def __enter__(self) -> _Meter:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def show(self, tally: Tally) -> None:
        """Bring the screen up to date."""
        now_s = time.monotonic()
        if not self._console.is_terminal:
            if now_s - self._shown_s >= PLAIN_INTERVAL_S:
                self._shown_s = now_s
                self._console.print(Text(_summary(tally, now_s)), soft_wrap=True)
            return
        if self._task is None:
            self._task = self._progress.add_task("", total=tally.num_requests)
        self._progress.update(
            self._task, completed=tally.num_ended, description=_pace(tally, now_s)
        )


def _pace(tally: Tally, now_s: float) -> str:
    remaining_s = tally.remaining_s(now_s)
    eta = "ETA -" if remaining_s is None else f"ETA {_duration(remaining_s)}"
    waiting = f"  [{tally.waiting_for}]".replace("[", "\\[") if tally.waiting_for else ""
    return f"{tally.num_failed} failed  {tally.tokens_per_s(now_s):.0f} tokens/s  {eta}{waiting}"


def _summary(tally: Tally, now_s: float) -> str:
    remaining_s = tally.remaining_s(now_s)
    is_over = tally.num_ended >= tally.num_requests
    eta = "" if is_over or remaining_s is None else f", ETA {_duration(remaining_s)}"
    waiting = f"; waiting: {tally.waiting_for}" if tally.waiting_for and not is_over else ""
    return (
        f"batch: {tally.num_ended} of {tally.num_requests} ended "
        f"({tally.num_done} done, {tally.num_failed} failed, {tally.num_skipped} from earlier runs), "
        f"{tally.tokens_per_s(now_s):.0f} tokens/s{eta}{waiting}"
    )


def _duration(duration_s: float) -> str:
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
