"""The report of a run: one HTML file."""

from pathlib import Path

from moebench.report.render import render
from moebench.report.view import page
from moebench.results.store import RunFolder, write_atomically


def write_report(folder: RunFolder, path: Path | None = None) -> Path:
    """Write the report of a run and return where it is; by default report.html in the run's folder.

    Raises:
        InputError: the run's files can't be read, or the report can't be written.
    """
    target = path or folder.report
    view = page(folder)
    write_atomically(target, render("report", view))
    return target
