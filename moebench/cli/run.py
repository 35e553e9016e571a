"""`moebench run`: a suite from cases to verdicts and the report."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import click

from moebench.workloads.errors import InputError

if TYPE_CHECKING:
    from moebench.cases.case import Case
    from moebench.cluster.detect import Launched
    from moebench.run import Job, Outcome, Plan
    from moebench.spending import Spending
    from moebench.workloads.machine import Topology

# Options that choose what runs; a resumed run has them already.
_CHOICES = {
    "experiment": "experiments",
    "system": "systems",
    "gate": "gates",
    "batch_size": "batch_sizes",
    "dtype": "dtypes",
    "topology": "topologies",
}


@click.command()
@click.option("--suite", metavar="NAME|FILE", help="Suite by name, or a suite file of your own.")
@click.option("--experiment", multiple=True, metavar="E", help="Only this experiment; repeatable, as all filters are.")
@click.option(
    "--system",
    multiple=True,
    metavar="S",
    help="Only this system, or for kernels this implementation: any registered one.",
)
@click.option("--gate", multiple=True, metavar="G", help="Only this gate.")
@click.option("--batch-size", multiple=True, type=int, metavar="N", help="Only this batch size (sequences a rank).")
@click.option("--dtype", multiple=True, metavar="D", help="Only cases of this dtype.")
@click.option(
    "--topology",
    multiple=True,
    metavar="T",
    help="Only this topology (4x8-titan-rtx), size (4x8) or node type (titan-rtx) of the suite; any other topology, by "
    "name or file, runs in place of the suite's.",
)
@click.option(
    "--engine",
    type=click.Choice(["auto", "local", "cluster", "sim"]),
    default="auto",
    show_default=True,
    help="auto measures what stands on this machine, or the ranks of torchrun and srun, and simulates every other.",
)
@click.option("--emulate", metavar="NODESxRANKS", help="A cluster of network namespaces on this machine: 2x4.")
@click.option("--nic-rate", metavar="RATE", help="Rate of its NICs, one a node; default as calibrated, else 1gbit.")
@click.option("--switch-buffer", metavar="SIZE", help="Of a port of its switch; default as calibrated, else 512kb.")
@click.option("--unshaped", is_flag=True, help="Its ranks without a network between them: no rights are needed.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1, max=86400),
    metavar="SECONDS",
    help="How long a step of real ranks may take before they are taken for stuck and ended; 120 for the first one of a "
    "case unless said, then 20 times what steps take, and no less than 20.",
)
@click.option(
    "--time-budget",
    "budget",
    metavar="DURATION",
    help="Measure for about so long (10m): every point in two processes, or starts of its ranks, then in further ones "
    "where the intervals are widest.",
)
@click.option(
    "--interval",
    metavar="SHARE",
    help="Measure further processes until the 95 % interval of each median is at most so wide; 3% with --time-budget.",
)
@click.option("--set", "settings", multiple=True, metavar="PARAMETER=VALUE", help="What if: nic.bandwidth=25GB/s.")
@click.option(
    "--quick",
    is_flag=True,
    help="First choice of every assumption, common conventions, 32 draws, figures for wide windows: a first look.",
)
@click.option("--dry-run", is_flag=True, help="List cases, engine, expected time and memory; write nothing.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Run folder; default runs/SUITE-TIME.")
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the files that a part keeps on disk while it is measured; default the system's for such files.",
)
@click.option("--resume", "resumed", type=click.Path(path_type=Path), metavar="DIR", help="Continue a stopped run.")
def command(
    suite: str | None,
    engine: str,
    emulate: str | None,
    nic_rate: str | None,
    switch_buffer: str | None,
    unshaped: bool,
    timeout_s: float | None,
    budget: str | None,
    interval: str | None,
    settings: tuple[str, ...],
    quick: bool,
    dry_run: bool,
    out: Path | None,
    scratch: Path | None,
    resumed: Path | None,
    **filters: tuple,
) -> int:
    """Run a suite, print the claims table, write the run folder and its report.

    Ctrl-C or SIGTERM leaves a run that --resume continues. Under torchrun or srun, the ranks measure together and rank
    0 writes.
    """
    from moebench.cluster.detect import launched
    from moebench.cluster.emulation import emulated
    from moebench.disk_room import check_room, keep_files_in
    from moebench.spending import spending_of

    keep_files_in(scratch)
    place = launched()
    if place is not None and place.rank:
        from moebench.cluster.session import follow

        return follow(place)
    if place is None:  # a launcher's ranks end at once: they may stand in a collective that never returns
        from moebench.stopping import stop_on_sigterm

        stop_on_sigterm()
    with _peers(place):
        spending = spending_of(budget, interval)
        topology, rates = emulated(emulate, nic_rate, switch_buffer, unshaped)
        if resumed is not None:
            if suite or settings or quick or dry_run or out or topology or any(filters.values()) or engine != "auto":
                raise InputError(
                    "--resume continues a run as it was started: give no other option but --timeout, --time-budget, "
                    "--interval and --scratch"
                )
            return _resume(resumed, timeout_s, spending)
        if suite is None:
            from moebench.workloads.load import suite_names

            raise InputError(f"--suite is missing; choose one of: {', '.join(suite_names())}, or a file")
        if topology is not None or place is not None:
            from moebench.cluster.emulation import measured

            engine, filters["topology"] = measured(place, topology, engine, filters["topology"])
        with nullcontext() if dry_run or any(filters.values()) else _ahead(suite, engine):
            ready = _prepared(suite, engine, settings_of(settings, rates), quick, filters)
            _check_measured(settings, ready)
            _check_timeout(timeout_s, ready.cases)
            _check_spending(spending, ready.cases)
            if dry_run:
                _show_plan(ready)
                return 0
            from moebench.run import begin

            _check_ranks(ready.cases, ready.topologies)
            check_room(ready.cases, ready.topologies)
            job = begin(ready, out)
        return _execute(job, timeout_s, spending)


@contextmanager
def _peers(place: "Launched | None") -> Iterator[None]:
    """The ranks that a launcher started beside this one, if it did, are there for the block's runs."""
    if place is None:
        yield
        return
    from moebench.cluster.engine import join
    from moebench.cluster.session import Session

    session = Session(place)
    join(session)
    try:
        yield
    finally:
        join(None)
        session.close()


def _check_ranks(cases: Sequence["Case"], topologies: "Mapping[str, Topology]") -> None:
    """Refuse cases whose ranks can't be started here, before anything is written."""
    if any(case.engine == "cluster" for case in cases):
        from moebench.cluster.engine import check

        check(cases, topologies)


def _check_timeout(timeout_s: float | None, cases: Sequence["Case"]) -> None:
    """Refuse a limit on the steps of ranks where there are none."""
    if timeout_s is not None and math.isnan(timeout_s):
        raise InputError("--timeout nan: say how many seconds")
    if timeout_s is not None and all(case.engine != "cluster" for case in cases):
        raise InputError("--timeout is about real ranks (--emulate, torchrun, srun), and no case runs on any")


def _ahead(suite: str, engine: str) -> AbstractContextManager[None]:
    """Lets processes get ready while the block reads a suite that several will simulate: a paper's, as its file says.

    Raises:
        InputError: no such file, or no TOML.
    """
    from moebench.environment import usable_cores
    from moebench.sim.workers import ahead
    from moebench.workloads.places import SUITES, find
    from moebench.workloads.toml_file import read_toml

    is_simulated = engine in ("auto", "sim") and "reported" in read_toml(find(SUITES, suite)).data
    return ahead() if is_simulated and usable_cores() > 1 else nullcontext()


def _prepared(suite: str, engine: str, settings: dict[str, str], quick: bool, filters: dict[str, tuple]) -> "Plan":
    from moebench.cases.plan import Filters
    from moebench.cli.left_out import tell_left_out
    from moebench.run import prepare
    from moebench.workloads.load import load_suite

    chosen = {_CHOICES[name]: tuple(values) for name, values in filters.items()}
    ready = prepare(load_suite(suite), Filters(**chosen, overrides=settings, quick=quick), engine)
    tell_left_out()
    return ready


def settings_of(settings: Sequence[str], rates: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """What --set says, besides what --emulate's options mean."""
    found = dict(rates)
    for text in settings:
        name, equals, value = text.partition("=")
        if not (name.strip() and equals and value.strip()):
            raise InputError(f"--set {text}: write PARAMETER=VALUE, such as nic.bandwidth=25GB/s")
        if name.strip() in found:
            raise InputError(f"--set {name.strip()} is given twice")
        found[name.strip()] = value.strip()
    return found


def _check_measured(settings: Sequence[str], ready: "Plan") -> None:
    """Refuse to set what no measurement would follow: only the network of an emulated cluster does."""
    from moebench.cases.gates import ENGINE as COUNT
    from moebench.cluster.emulation import SHAPED
    from moebench.workloads.places import EMULATED

    measured = {case.topology: case.engine for case in ready.cases if case.engine not in ("sim", COUNT)}
    for topology, engine in measured.items():
        is_shaped = ready.topologies[topology].node_type == EMULATED
        for text in settings:
            if not (is_shaped and text.partition("=")[0].strip() in SHAPED):
                raise InputError(
                    f"--set {text} describes another machine, and engine {engine} measures {topology} as it is: "
                    "predict it with --engine sim"
                )


def _check_spending(spending: "Spending | None", cases: Sequence["Case"]) -> None:
    """Refuse a budget for measuring where nothing is measured by it."""
    if spending is not None and not any(case.engine in ("local", "cluster") for case in cases):
        raise InputError(
            "--time-budget and --interval are about what engines local and cluster measure, and no case runs in them"
        )


def _resume(path: Path, timeout_s: float | None, spending: "Spending | None") -> int:
    from moebench.run import resume

    job = resume(path)
    _check_ranks(job.cases, job.topologies)
    _check_timeout(timeout_s, job.cases)
    _check_spending(spending, job.cases)
    return _execute(job, timeout_s, spending)


def _execute(job: "Job", timeout_s: float | None, spending: "Spending | None") -> int:
    from moebench.cli.conclusion import conclude
    from moebench.cli.progress import ProgressBar
    from moebench.report.side_by_side import import_drawing
    from moebench.run import execute
    from moebench.systems.scratch import remove_left

    click.echo(f"{len(job.cases)} cases into {job.folder.path}", err=True)
    try:
        with ProgressBar() as progress:
            outcome = execute(job, progress, timeout_s=timeout_s, spending=spending, meanwhile=import_drawing)
    finally:
        remove_left()  # files of ranks that were ended
    _show_outcome(outcome)
    if outcome.interrupted:
        click.echo(
            f"stopped: {outcome.done} of {outcome.cases} cases are done; "
            f"continue with: moebench run --resume {job.folder.path}",
            err=True,
        )
        return outcome.exit_status
    conclude(job)
    return 0


def _show_outcome(outcome: "Outcome") -> None:
    for status, count in sorted(outcome.statuses.items()):
        if status != "passed":
            example = outcome.reasons.get(status, "")
            click.echo(f"{count} {status}" + (f", such as {example}" if example else ""), err=True)


def _show_plan(ready: "Plan") -> None:
    from moebench.cli.tables import print_table
    from moebench.dryrun import estimates, total_s

    found = estimates(ready)
    print_table(
        ["case", "engine", "time here", "memory a rank"],
        [[e.case.name, e.case.engine, _seconds(e.time_s), _memory(e.memory_bytes, e.status)] for e in found],
    )
    cases = "1 case" if len(found) == 1 else f"{len(found)} cases"
    click.echo(f"{cases}, about {_seconds(total_s(found))} after the correctness check; nothing was written")


def _seconds(time_s: float | None) -> str:
    if time_s is None:
        return "-"
    if time_s < 1:
        return f"{1000 * time_s:.0f} ms"
    return f"{time_s:.0f} s" if time_s < 120 else f"{time_s / 60:.0f} min"


def _memory(peak_bytes: float | None, status: str) -> str:
    if peak_bytes is None:
        size = "-"
    else:
        size = f"{peak_bytes / 2**20:.3g} MiB" if peak_bytes < 2**30 else f"{peak_bytes / 2**30:.3g} GiB"
    return size if status in ("passed", "") else f"{size} {status}"
