"""`moebench claims`: the scoreboard of a run, or of what has not been run yet."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from moebench.claims.scoreboard import Score
    from moebench.results.store import RunFolder

    Shown = tuple[RunFolder | None, list[Score]]


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--suite", metavar="NAME", help="Only claims of this suite.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(run: Path | None, suite: str | None, as_json: bool) -> None:
    """Show claims: reported beside obtained, verdict and why.

    RUN is a run folder. Without it, the newest finished run of each suite under runs/ counts, a quick or filtered one
    too; which one that is stands on standard error. Claims of suites that were never run are listed as `not run`.
    """
    from moebench.cli.score_table import print_scores
    from moebench.cli.tables import print_json

    shown = [of_run(run, suite)] if run else of_newest(suite)
    for folder, scores in shown:
        if folder is not None and (scores or run):
            click.echo(described(folder), err=True)
    scores = [score for _, scores in shown for score in scores]
    if as_json:
        print_json(
            [
                score.to_json() | {"run": str(folder.path) if folder else None}
                for folder, scores in shown
                for score in scores
            ]
        )
    elif scores:
        print_scores(scores)
    else:
        click.echo("no claims: this suite reproduces no paper")


def described(folder: "RunFolder") -> str:
    """Which run it is, and what of its suite it leaves out."""
    from moebench.claims.scoreboard import what_if
    from moebench.plan import QUICK_SAMPLES

    filters = folder.filters
    facts = [f"{folder.path}: {folder.suite.name}, {str(folder.record.get('created')).replace('T', ' ')}"]
    if not folder.record.get("finished"):
        facts.append("not finished")
    if filters.quick:
        facts.append(f"--quick (the first choice of every assumption, at most {QUICK_SAMPLES} draws)")
    for name in ("experiments", "systems", "gates", "batch_sizes", "dtypes", "topologies"):
        if wanted := getattr(filters, name):
            facts.append(f"only {name.replace('_', ' ')} {', '.join(map(str, wanted))}")
    if changed := what_if(folder):
        facts.append(changed)
    return "; ".join(facts)


def of_run(run: Path, suite: str | None) -> "Shown":
    """The scores of one run."""
    from moebench.claims.scoreboard import scoreboard
    from moebench.results.store import RunFolder
    from moebench.workloads.errors import InputError

    folder = RunFolder.open(run)
    if suite is not None and suite != folder.suite.name:
        raise InputError(f"{run}: is a run of suite {folder.suite.name}, not of {suite}")
    return folder, scoreboard(folder.suite, folder)


def of_newest(suite: str | None) -> "list[Shown]":
    """The scores of every paper, each from the newest finished run of its suite under runs/, with that run."""
    from moebench.claims.reported import papers
    from moebench.claims.scoreboard import scoreboard, unscored
    from moebench.workloads.errors import one_of
    from moebench.workloads.load import load_suite, suite_names

    known = sorted({*papers(), *suite_names()})
    if suite is not None and suite not in known:
        raise one_of("suite", suite, known)
    newest = newest_runs()
    found: list[Shown] = []
    for name in [suite] if suite else known:
        if name in newest:
            found.append((newest[name], scoreboard(newest[name].suite, newest[name])))
        elif name in suite_names():
            found.append((None, scoreboard(load_suite(name))))
        else:
            found.append((None, unscored(name)))
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
