"""The report of a run: one HTML file."""

from collections.abc import Sequence
from pathlib import Path

from moebench.claims.scoreboard import Score
from moebench.report.render import render
from moebench.report.view import page
from moebench.results.store import RunFolder, write_atomically


def write_report(
    folder: RunFolder, path: Path | None = None, scores: Sequence[Score] | None = None, for_phones: bool = True
) -> Path:
    """Write the report of a run and return where it is; by default report.html in the run's folder.

    Args:
        scores: its scoreboard, where that is known already.
        for_phones: draw each figure twice, wide and narrow; else once, in half the time.

    Raises:
        InputError: the run's files can't be read, or the report can't be written.
    """
    target = path or folder.report
    view = page(folder, scores, for_phones)
    write_atomically(target, render("report", view))
    return target
