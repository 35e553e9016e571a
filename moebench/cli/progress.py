"""The progress of a run, on standard error: cases done, time gone, time left. Plain lines where it is no terminal."""

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_STEPS = 10  # most lines a phase where there is no terminal
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
        elif tenths(self._done, self._total) > tenths(self._done - 1, self._total):
            print(f"{self._title}: {self._done}/{self._total}", file=sys.stderr, flush=True)


def tenths(done: float, total: float) -> int:
    """How many of the lines of a phase are due; the last one when all of it is done."""
    return PLAIN_STEPS if done >= total else int(PLAIN_STEPS * done / total)


class Share:
    """The progress of one thing by its share: a bar on a terminal, else a line at each tenth; a context manager."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._told = 0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            share = TextColumn("{task.percentage:3.0f} %")
            columns = (TextColumn("{task.description}"), BarColumn(), share, TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, share: float) -> None:
        """`share` of it, 0 to 1, is done."""
        if self._bar is not None:
            self._bar.update(self._task, completed=share)
        elif tenths(share, 1.0) > self._told:
            self._told = tenths(share, 1.0)
            print(f"{self._title}: {100 * share:.0f} %", file=sys.stderr, flush=True)
