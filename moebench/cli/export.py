"""`moebench export`: rows of a run in the formats of other tools."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from moebench.cli.paths import OutputFile
from moebench.cli.trace import write_timeline

FORMATS = ("nccl-tests", "perfetto", "csv", "markdown")


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--as", "form", type=click.Choice(FORMATS), required=True, help="The format.")
@click.option("--case", metavar="CASE", help="Of perfetto: a case's name, or a part of it that no other case has.")
@click.option("--experiment", "experiments", multiple=True, metavar="E", help="Only these rows; may be repeated.")
@click.option("--metric", "metrics", multiple=True, metavar="M", help="Only these columns; may be repeated.")
@click.option("-o", "--out", "output", type=OutputFile(), metavar="FILE", help="Default: standard output.")
def command(
    run: Path, form: str, case: str | None, experiments: tuple[str, ...], metrics: tuple[str, ...], output: Path | None
) -> None:
    """Write rows of RUN, a run folder, as other tools read them.

    nccl-tests: exchanges with its columns; busbw is algbw times (n - 1) / n. perfetto: the simulated timeline of a case
    for ui.perfetto.dev, compressed where FILE ends with .gz. csv: a line a case with every metric, in SI units.
    markdown: a table for readers.
    """
    from moebench.results.store import RunFolder

    _refuse(form, case, experiments, metrics)
    if form == "perfetto":
        assert case is not None
        write_timeline(run, case, output)
        return
    folder = RunFolder.open(run)
    _known(folder, experiments)
    _write(_text(folder, form, experiments, metrics), output)


def _refuse(form: str, case: str | None, experiments: Sequence[str], metrics: Sequence[str]) -> None:
    """Options that mean nothing for a format."""
    from moebench.workloads.errors import InputError

    is_trace = form == "perfetto"
    if is_trace and not case:
        raise InputError("perfetto shows one case: name it with --case; `moebench explain RUN` lists all")
    for option, given, fits in (
        ("--case", case, is_trace),
        ("--experiment", experiments, not is_trace),
        ("--metric", metrics, form in ("csv", "markdown")),
    ):
        if given and not fits:
            raise InputError(f"{option} means nothing for {form}")


def _known(folder: Any, experiments: Sequence[str]) -> None:
    from moebench.workloads.errors import one_of

    names = [experiment.name for experiment in folder.suite.experiments]
    for name in experiments:
        if name not in names:
            raise one_of("experiment", name, names, str(folder.path))


def _text(folder: Any, form: str, experiments: Sequence[str], metrics: Sequence[str]) -> str:
    if form == "nccl-tests":
        from moebench.export.nccl_tests import nccl_text

        return nccl_text(folder, experiments)
    from moebench.export.tables import csv_text, markdown_text, wide

    table = wide(folder, experiments, metrics)
    return csv_text(table) if form == "csv" else markdown_text(table, metrics)


def _write(text: str, output: Path | None) -> None:
    from moebench.results.store import storage, write_atomically

    if output is None:
        click.echo(text, nl=False)
        return
    with storage(output):
        write_atomically(output, text)
    click.echo(output)
