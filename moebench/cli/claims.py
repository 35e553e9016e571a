"""`moebench claims`: the scoreboard of a run, or of what has not been run yet."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moebench.claims.scoreboard import Score
    from moebench.results.store import RunFolder


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--suite", metavar="NAME", help="Only claims of this suite.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(run: Path | None, suite: str | None, as_json: bool) -> None:
    """Show claims: reported beside obtained, verdict and why.

    RUN is a run folder. Without it, the newest run of each suite under runs/ counts, and claims of suites that were
    never run are listed as `not run`.
    """
    from moebench.cli.tables import print_json, print_scores

    scores = of_run(run, suite) if run else of_newest(suite)
    if as_json:
        print_json([score.to_json() for score in scores])
    elif scores:
        print_scores(scores)
    else:
        click.echo("no claims: this suite reproduces no paper")


def of_run(run: Path, suite: str | None) -> "list[Score]":
    """The scores of one run."""
    from moebench.claims.scoreboard import scoreboard
    from moebench.results.store import RunFolder
    from moebench.workloads.errors import InputError

    folder = RunFolder.open(run)
    if suite is not None and suite != folder.suite.name:
        raise InputError(f"{run}: is a run of suite {folder.suite.name}, not of {suite}")
    return scoreboard(folder.suite, folder)


def of_newest(suite: str | None) -> "list[Score]":
    """The scores of every paper, each from the newest finished run of its suite under runs/."""
    from moebench.claims.reported import papers
    from moebench.claims.scoreboard import scoreboard, unscored
    from moebench.workloads.errors import one_of
    from moebench.workloads.load import load_suite, suite_names

    known = sorted({*papers(), *suite_names()})
    if suite is not None and suite not in known:
        raise one_of("suite", suite, known)
    newest = newest_runs()
    found = []
    for name in [suite] if suite else known:
        if name in newest:
            found += scoreboard(newest[name].suite, newest[name])
        elif name in suite_names():
            found += scoreboard(load_suite(name))
        else:
            found += unscored(name)
    return found


def newest_runs(base: Path = Path("runs")) -> "dict[str, RunFolder]":
    """The newest finished run of each suite."""
    from moebench.results.store import RUN_FILE, RunFolder
    from moebench.workloads.errors import InputError

    found: dict[str, RunFolder] = {}
    for file in base.glob(f"*/{RUN_FILE}"):
        try:
            folder = RunFolder.open(file.parent)
            name = folder.suite.name
        except InputError as error:
            click.echo(f"moebench: left out: {error}", err=True)
            continue
        created = str(folder.record.get("created"))
        if folder.record.get("finished") and (name not in found or created > str(found[name].record["created"])):
            found[name] = folder
    return found
