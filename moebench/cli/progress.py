"""The progress of a run, on standard error: cases done, time gone, time left. Plain lines where it is no terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_STEPS = 10  # lines a phase where there is no terminal
NAME_WIDTH = 120  # columns of a terminal that also shows the case


class ProgressBar:
    """A Watch (moebench.run) for people; use as a context manager."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._title = ""
        self._total = self._done = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                *([TextColumn("[dim]{task.fields[name]}")] if self._console.width >= NAME_WIDTH else []),
                console=self._console,
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def phase(self, title: str, total: int) -> None:
        """A phase of `total` steps begins."""
        self._title, self._total, self._done = title, total, 0
        if self._bar is not None:
            self._task = self._bar.add_task(title, total=total, name="")

    def step(self, name: str) -> None:
        """One step of it is done."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, name=name)
        elif self._done == self._total or self._done % max(1, self._total // PLAIN_STEPS) == 0:
            print(f"{self._title}: {self._done}/{self._total}", file=sys.stderr, flush=True)
