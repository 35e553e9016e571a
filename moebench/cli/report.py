"""`moebench report`: the HTML report of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from moebench.cli.paths import OutputFile

if TYPE_CHECKING:
    from moebench.claims.scoreboard import Score
    from moebench.results.store import RunFolder


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "output", type=OutputFile(), metavar="FILE", help="Default: RUN/report.html.")
def command(run: Path, output: Path | None) -> None:
    """Write the HTML report of RUN, a run folder."""
    from moebench.results.store import RunFolder

    click.echo(write(RunFolder.open(run), output))


def write(
    folder: "RunFolder", output: Path | None = None, scores: "Sequence[Score] | None" = None, for_phones: bool = True
) -> Path:
    """Write the report of a run; returns where it is. The rest is as of `moebench.report.html.write_report`.

    Raises:
        StorageError: it can't be written.
    """
    from moebench.report.html import write_report
    from moebench.results.store import storage

    path = output or folder.report
    with storage(path):
        write_report(folder, path, scores=scores, for_phones=for_phones)
    return path
