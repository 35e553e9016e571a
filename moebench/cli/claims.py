"""`moebench claims`: the scoreboard of a run, or of what has not been run yet."""

from collections.abc import Sequence
from itertools import groupby
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
@click.option("--experiment", multiple=True, metavar="E", help="Only claims of this experiment; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on standard output.")
def command(run: Path | None, suite: str | None, experiment: tuple[str, ...], as_json: bool) -> None:
    """Show claims: reported beside obtained, verdict and why.

    RUN is a run folder; of a run of some experiments the claims of those are shown. Without RUN, the newest finished
    run under runs/ that answers a claim counts; a quick or filtered one only where no run of the whole suite does, a
    what-if (--set) only where no other does. Which runs these are stands on standard error. Claims that no run answers
    are listed as `not run`.
    """
    from moebench.cli.score_table import print_scores
    from moebench.cli.tables import print_json

    shown = of_experiments([of_run(run, suite)] if run else of_newest(suite), experiment)
    others = ""
    if run and not experiment:
        shown, others = _asked_for(*shown)
    for folder in dict.fromkeys(folder for folder, scores in shown if scores or run):
        if folder is not None:
            click.echo(described(folder), err=True)
    if others:
        click.echo(others, err=True)
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
        click.echo("no claims of what was run" if others else "no claims: this suite reproduces no paper")


def _asked_for(shown: "Shown") -> "tuple[list[Shown], str]":
    """Of one run the claims that it was asked for, and in words how many others there are."""
    from moebench.claims.scoreboard import asked_for

    folder, scores = shown
    assert folder is not None
    kept, others = asked_for(scores, folder)
    return [(folder, kept)], others


def of_experiments(shown: "list[Shown]", wanted: Sequence[str]) -> "list[Shown]":
    """The scores of some experiments; of all where none is named."""
    from moebench.workloads.errors import one_of

    known = dict.fromkeys(score.claim.experiment for _, scores in shown for score in scores)
    for name in wanted:
        if name not in known:
            raise one_of("experiment", name, tuple(known))
    if not wanted:
        return shown
    return [(folder, [score for score in scores if score.claim.experiment in wanted]) for folder, scores in shown]


def described(folder: "RunFolder") -> str:
    """Which run it is, and what of its suite it leaves out."""
    from moebench.cases.plan import QUICK_SAMPLES
    from moebench.claims.scoreboard import what_if

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
    """The scores of every paper, each claim from the run under runs/ that counts for it, with that run."""
    from moebench.claims.reported import papers
    from moebench.claims.scoreboard import scoreboard, unscored
    from moebench.workloads.errors import one_of
    from moebench.workloads.load import load_suite, suite_names

    known = sorted({*papers(), *suite_names()})
    if suite is not None and suite not in known:
        raise one_of("suite", suite, known)
    runs = finished_runs()
    found: list[Shown] = []
    for name in [suite] if suite else known:
        if name in runs:
            found += of_runs(runs[name])
        elif name in suite_names():
            found.append((None, scoreboard(load_suite(name))))
        else:
            found.append((None, unscored(name)))
    return found


def of_runs(runs: "Sequence[RunFolder]") -> "list[Shown]":
    """The scores of a suite, each claim from the first of `runs` that answers it; claims in their order."""
    from moebench.claims.scoreboard import scoreboard
    from moebench.claims.verdict import NOT_RUN

    chosen = [(runs[0], score) for score in scoreboard(runs[0].suite, runs[0])]
    for run in runs[1:]:
        ran = run.filters.experiments or [experiment.name for experiment in run.suite.experiments]
        open_ = {s.claim.id for _, s in chosen if s.verdict == NOT_RUN and s.claim.experiment in ran}
        if not open_:
            continue
        answers = {s.claim.id: s for s in scoreboard(run.suite, run) if s.verdict != NOT_RUN and s.claim.id in open_}
        chosen = [(run, answers[s.claim.id]) if s.claim.id in answers else (of, s) for of, s in chosen]
    return [(run, [score for _, score in group]) for run, group in groupby(chosen, key=lambda pair: pair[0])]


def finished_runs(base: Path = Path("runs")) -> "dict[str, list[RunFolder]]":
    """The finished runs of each suite, newest first: of the whole suite, quick and narrowed ones, last the what-ifs."""
    from moebench.results.store import RUN_FILE, RunFolder
    from moebench.workloads.errors import InputError

    found: dict[str, list[RunFolder]] = {}
    for file in base.glob(f"*/{RUN_FILE}"):
        try:
            folder = RunFolder.open(file.parent)
        except InputError as error:
            click.echo(f"moebench: left out: {error}", err=True)
            continue
        if folder.record["finished"]:
            found.setdefault(folder.suite.name, []).append(folder)
    for runs in found.values():
        runs.sort(key=lambda r: (r.filters.is_whole, not r.filters.overrides, r.record["created"]), reverse=True)
    return found
