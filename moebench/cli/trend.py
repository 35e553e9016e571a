"""`moebench trend`: where the numbers of many runs changed, and in which commits."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moebench.compare.trend import Trend

COLUMNS = ("verdict", "metric", "case", "before", "after", "change", "commits", "when", "why")


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="[DIR]", default=Path("runs"))
@click.option("--metric", "metrics", multiple=True, metavar="M", help="Only this metric; repeatable. Default: times.")
@click.option("--since", default="", metavar="DATE", help="Only runs from this date on: 2026-11-30.")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N runs.")
@click.option("--strict", is_flag=True, help="Exit 3 where a newest change is not confirmed yet.")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Thresholds; default moebench.toml here or in a folder above.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output, every value in it.")
@click.option("--markdown", "as_markdown", is_flag=True, help="A Markdown table.")
def command(
    folder: Path,
    metrics: tuple[str, ...],
    since: str,
    last: int | None,
    strict: bool,
    config: Path | None,
    as_json: bool,
    as_markdown: bool,
) -> int:
    """Find the changes in the finished runs of DIR (default runs/), or in what pytest-benchmark saved there.

    Exact values change where they change. Measured ones change where a piecewise constant fit has a step that a rank
    test confirms; each step names the commits between its runs.

    Exits 1 where the newest change of a quantity made it slower (--since and --last forget what is long accepted).
    """
    from moebench.compare.history import read_history
    from moebench.compare.rules import find_rules
    from moebench.compare.trend import trend
    from moebench.workloads.errors import InputError

    if as_json and as_markdown:
        raise InputError("--json and --markdown both want standard output: choose one")
    rules = find_rules(config)
    found = trend(read_history(folder, metrics, since, last), rules)
    for text in found.history.left_out:
        click.echo(f"moebench: left out: {text}", err=True)
    if as_json:
        _print_json(found, strict)
    elif as_markdown:
        click.echo(_markdown(found), nl=False)
    else:
        _print_table(found)
    return found.exit_status(strict)


def _rows(found: "Trend") -> list[list[str]]:
    from moebench.compare.cells import SYMBOLS, share, value

    return [
        [
            f"{SYMBOLS[c.verdict]} {c.verdict}" + ("" if c.gates else " (shown only)"),
            c.series.key.quantity,
            c.series.key.case,
            value(c.before, c.series.unit),
            value(c.after, c.series.unit),
            share(c.change),
            c.commits,
            c.created[:16],
            c.reason,
        ]
        for c in found.changes
    ]


def _summary(found: "Trend") -> str:
    from collections import Counter

    from moebench.compare.comparison import VERDICTS

    counts = Counter(change.verdict for change in found.changes)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return f"{len(found.history.runs)} runs, {len(found.history.series)} series: {said or 'no change'}"


def _print_table(found: "Trend") -> None:
    from moebench.cli.tables import print_table
    from moebench.compare.escape import plain

    if found.changes:
        print_table(COLUMNS, [[plain(cell, 1000) for cell in row] for row in _rows(found)])
        click.echo()
    click.echo(_summary(found))


def _markdown(found: "Trend") -> str:
    from moebench.compare.escape import markdown, prose

    lines = ["### moebench: trend", "", prose(_summary(found)), ""]
    if found.changes:
        lines += ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for verdict, metric, case, before, after, change, commits, when, why in _rows(found):
        cells = [prose(verdict), markdown(metric), markdown(case), prose(before), prose(after), prose(change)]
        lines.append("| " + " | ".join([*cells, markdown(commits), prose(when), prose(why)]) + " |")
    return "\n".join(lines) + "\n"


def _print_json(found: "Trend", strict: bool) -> None:
    from moebench.cli.tables import print_json

    runs = [{"name": run.name, "created": run.created, "commit": run.commit} for run in found.history.runs]
    series = []
    for one in found.history.series:
        case, engine, metric, part = one.key
        known = {"suite": one.suite, "case": case, "engine": engine, "metric": metric, "part": part, "unit": one.unit}
        points = [[point.run, point.value] for point in one.points]
        series.append(known | {"machine": one.machine, "points": points})
    print_json(
        {
            "schema_version": 1,
            "exit_status": found.exit_status(strict),
            "runs": runs,
            "changes": [change.to_json() for change in found.changes],
            "series": series,
            "left_out": found.history.left_out,
        }
    )
