"""What the operator sees: a line per part while things come up or go down, and plain sentences."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.progress_bar import ProgressBar
from rich.text import Text


class _BarIfKnown(ProgressColumn):
    def render(self, task: Task) -> ProgressBar | Text:
        if task.total is None or task.finished:
            return Text("")
        return ProgressBar(total=task.total, completed=task.completed, width=24)


class _Elapsed(ProgressColumn):
    def render(self, task: Task) -> Text:
        elapsed_s = task.finished_time if task.finished else task.elapsed
        return Text(f"{elapsed_s or 0.0:6.1f} s", style="dim")


class Screen:
    """Live lines on a terminal, plain lines elsewhere (a pipe, a log, CI)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began_s: dict[str, float] = {}
        self._last_percent: dict[str, int] = {}

    def begin(self, name: str, text: str) -> None:
        """Show that something about `name` has begun."""
        self._began_s[name] = time.monotonic()
        self._last_percent[name] = 0
        if not self.console.is_terminal:
            self._plain(f"{name}: {text}")
            return
        if self._progress is None:
            self._progress = self._new_progress()
            self._progress.start()
        self._tasks[name] = self._progress.add_task(text, name=name, total=None)

    def update(self, name: str, text: str, percent: float) -> None:
        """Show how far it is; plain lines come every ten per cent."""
        if self._progress is not None and name in self._tasks:
            self._progress.update(
                self._tasks[name], description=text, total=100.0, completed=min(percent, 99.9)
            )
        elif percent >= self._last_percent[name] + 10:
            self._last_percent[name] = int(percent)
            self._plain(f"{name}: {percent:.0f} % {text}")

    def end(self, name: str, text: str) -> None:
        """Show that it is done, and how long it took."""
        if self._progress is not None and name in self._tasks:
            task_id = self._tasks.pop(name)
            self._progress.update(task_id, description=text, total=100.0, completed=100.0)
            return
        took_s = time.monotonic() - self._began_s.get(name, time.monotonic())
        self._plain(f"{name}: {text}, {took_s:.1f} s")

    def settle(self) -> None:
        """Leave the live lines as they are, so that what follows stands below them."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()

    def say(self, text: str) -> None:
        """One sentence, never cut or wrapped."""
        stamp = time.strftime("%H:%M:%S")
        self.console.print(Text(f"{stamp} {text}"), soft_wrap=True)

    def _plain(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def _new_progress(self) -> Progress:
        return Progress(
            SpinnerColumn(finished_text="[green]✔"),
            TextColumn("{task.fields[name]:<12}"),
            TextColumn("{task.description}"),
            _BarIfKnown(),
            _Elapsed(),
            console=self.console,
        )
