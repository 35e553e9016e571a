"""What a finished run prints: step times, verdicts, where its files lie, and last what must not be overlooked."""

from collections.abc import Sequence

import click

from moebench.claims.scoreboard import MOST_LISTED, asked_for, scoreboard, what_if
from moebench.cli.report import write
from moebench.cli.score_table import print_counts, print_scores
from moebench.cli.step_table import print_times
from moebench.results.rows import SUBJECTS, Row
from moebench.run import Job

MEANINGS = {"wrong": "it does not compute what the reference computes", "failed": "it did not run to its end"}


def conclude(job: Job) -> None:
    """Print all of it, and write the report."""
    folder = job.folder
    rows = folder.rows(*SUBJECTS)
    if changed := what_if(folder):
        click.echo(changed)
    print_times(job.cases, rows, str(folder.path))
    every = scoreboard(folder.suite, folder)
    scores, others = asked_for(every, folder)
    if scores:
        click.echo()
        if len(scores) > MOST_LISTED:
            print_counts(scores, str(folder.path))
        else:
            print_scores(scores)
    if others:
        click.echo(others)
    is_quick = folder.filters.quick
    written = write(folder, scores=every, for_phones=not is_quick)
    click.echo(f"results: {folder.results}")
    click.echo(f"report: {written}")
    if is_quick:
        click.echo(f"Its figures are for wide windows; for phones too with: moebench report {folder.path}")
    for alarm in alarms(rows):
        click.secho(alarm, err=True, fg="red", bold=True)


def alarms(rows: Sequence[Row]) -> list[str]:
    """A line for each system, status and reason of cases that are wrong or failed, in whichever session they ran."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status in MEANINGS:
            found.setdefault((row.system, row.status, row.reason), []).append(row.case)
    return [
        f"!! {system} is {status.upper()}: {MEANINGS[status]}. {len(cases)} case{'s' * (len(cases) > 1)} without a "
        f"number, such as {cases[0]}: {reason}"
        for (system, status, reason), cases in found.items()
    ]
