"""`moebench index`: one page over many runs."""

from pathlib import Path

import click

from moebench.cli.paths import OutputFile


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="[DIR]", default=Path("runs"))
@click.option("-o", "output", type=OutputFile(), metavar="FILE", help="Default: DIR/index.html.")
@click.option("--metric", "metrics", multiple=True, metavar="M", help="Only this metric; repeatable. Default: times.")
@click.option("--since", default="", metavar="DATE", help="Only runs from this date on: 2026-11-30.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N runs.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Thresholds; default moebench.toml here or in a folder above.",
)
def command(
    folder: Path, output: Path | None, metrics: tuple[str, ...], since: str, last: int | None, config: Path | None
) -> None:
    """Write one page over the runs of DIR (default runs/): trends with their changes, and every run with its report.

    The changes are those of `moebench trend`; claims are counted as each run's own report has them.
    """
    from moebench.compare.history import read_runs
    from moebench.compare.rules import find_rules
    from moebench.compare.trend import trend
    from moebench.report.index_view import write_index
    from moebench.results.store import storage
    from moebench.workloads.errors import InputError

    history = read_runs(folder, metrics, since, last)
    if not (history.runs or history.others):
        why = f"; left out: {history.left_out[0]}" if history.left_out else ""
        raise InputError(f"{folder}: no run{why}")
    found = trend(history, find_rules(config))
    path = output or folder / "index.html"
    with storage(path):
        write_index(found, folder, path)
    click.echo(path)
