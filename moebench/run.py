"""Runs a plan: correctness first, then each engine on its cases, rows written as they come.

Whatever ends a run early (Ctrl-C, a full disk, a dead process), the run folder holds every case that was done, and
`resume` finds the rest.
"""

import inspect
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from moebench import kinds
from moebench.cases.case import Case
from moebench.cases.plan import Filters, Machines, chosen_experiments, place_names, plan, quickened
from moebench.environment import environment, usable_cores
from moebench.results.rows import Row, with_finite_numbers, without_number
from moebench.results.store import (
    DISK_ERRORS,
    FolderTaken,
    RunFolder,
    StorageError,
    default_folder,
    new_record,
    storage,
)
from moebench.spending import Spending
from moebench.stopping import CannotGoOn, exit_status
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

ENGINES = {
    "sim": "moebench.sim.engine",
    "local": "moebench.local.engine",
    "cluster": "moebench.cluster.engine",
    "count": "moebench.gates.engine",
}
LEAST_FREE_BYTES = 1 << 20
MOST_TRIES = 20  # for a folder that no other run takes first

Engine = Callable[..., Generator[list[Row], None, None]]
Check = Callable[..., Any]


class Watch(Protocol):
    """Who follows a run: the progress bar, or a test."""

    def phase(self, title: str, total: int) -> None:
        """A phase of `total` steps begins."""

    def step(self, name: str) -> None:
        """One step of it is done."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        cases: in all; done: with rows, earlier sessions of a resumed run included.
        exit_status: what the process exits with where the run was interrupted.
        statuses: of this session's cases; reasons: one example each of those that have no number.
    """

    cases: int
    done: int = 0
    interrupted: bool = False
    exit_status: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    def count(self, rows: Sequence[Row]) -> None:
        """Take the rows of one more case into account."""
        self.done += 1
        status = next((row.status for row in rows if row.status != "passed"), "passed")
        self.statuses[status] += 1
        reason = next((row.reason for row in rows if row.status != "passed"), "")
        if reason:
            self.reasons.setdefault(status, f"{rows[0].case}: {reason}")


@dataclass(frozen=True)
class Job:
    """Everything that `execute` needs: the folder, all cases of the run, the machines they name.

    Attributes:
        is_resumed: whether the run began before; it is noted once nothing speaks against going on.
    """

    folder: RunFolder
    cases: Sequence[Case]
    topologies: Mapping[str, Topology]
    is_resumed: bool = False

    @property
    def suite(self) -> Suite:
        """The suite of the run."""
        return self.folder.suite


@dataclass(frozen=True)
class Plan:
    """What a run will do, before anything is written: the suite and the filters as they will be recorded."""

    suite: Suite
    filters: Filters
    engine: str
    cases: Sequence[Case]
    topologies: Mapping[str, Topology]


def prepare(suite: Suite, filters: Filters, engine: str = "auto") -> Plan:
    """Plan a run; writes nothing.

    Raises:
        InputError: suite and filters don't fit.
    """
    if filters.quick:
        suite = quickened(suite)
    machines = Machines(filters.overrides)
    cases = plan(suite, filters, engine, machines)
    topologies = {name: machines(name) for name in dict.fromkeys(case.topology for case in cases)}
    # The record names the user's own topologies as its copies are named, so that resuming needs no file.
    own = place_names(chosen_experiments(suite, filters))
    asked = tuple(name if name in own else machines(name).name for name in filters.topologies)
    return Plan(suite, replace(filters, topologies=asked), engine, cases, topologies)


def begin(ready: Plan, out: Path | None = None) -> Job:
    """Make the folder of a planned run."""
    _refuse_full_disk(out or default_folder(ready.suite.name))
    record = new_record(
        ready.suite,
        ready.filters,
        ready.engine,
        ready.topologies.values(),
        environment(seed=ready.suite.seed),
        len(ready.cases),
    )
    folder = _new_folder(ready.suite.name, out, record)
    if ready.suite.reported is not None:
        from moebench.claims.reported import own_file

        file = own_file(ready.suite.reported, ready.suite.source_path)
        if file is not None:
            folder.keep_reported(file)
    return Job(folder, ready.cases, ready.topologies)


def _new_folder(suite: str, out: Path | None, record: dict[str, Any]) -> RunFolder:
    """A folder of this run's own; where none was named, the next one if another run took the first."""
    for _ in range(0 if out else MOST_TRIES):
        with suppress(FolderTaken):
            return RunFolder.create(default_folder(suite), record)
    return RunFolder.create(out or default_folder(suite), record)


def resume(path: Path) -> Job:
    """Take up an interrupted run, with the suite and the machines that its folder states.

    Raises:
        InputError: no run there, or one of an unknown schema.
    """
    folder = RunFolder.open(path)
    topologies = folder.topologies

    def find(name: str) -> Topology:
        if name not in topologies:
            raise InputError(f"{path}: the run's file has no topology {name!r}")
        return topologies[name]

    cases = plan(folder.suite, folder.filters, folder.record["engine"], Machines(load=find))
    return Job(folder, cases, topologies, is_resumed=True)


def execute(
    job: Job, watch: Watch, jobs: int | None = None, check: Check | None = None, timeout_s: float | None = None,
    spending: Spending | None = None, meanwhile: Callable[[], None] | None = None,
) -> Outcome:  # fmt: skip
    """Run every case that has no rows yet.

    Args:
        jobs: processes an engine may use; default the usable cores.
        check: the correctness gate, `check(cases) -> a Status each`; default moebench.checks.correctness.check_cases.
        timeout_s: how long a step of real ranks may take; default as the engine thinks.
        spending: how long an engine may measure what is uncertain again; default not at all.
        meanwhile: what the caller has to do anyway, while engines start what takes long to start.

    Raises:
        StorageError: rows can't be written; those of earlier cases are safe.
        CannotGoOn: an engine lost what it runs on; likewise.
        InputError: another process writes there, or the rows there are damaged; nothing was changed.
    """
    outcome = Outcome(cases=len(job.cases))
    try:
        with job.folder.writing() as append:
            done = job.folder.done()
            left = [case for case in job.cases if case.hash not in done]
            outcome.done = len(job.cases) - len(left)
            if job.is_resumed:
                job.folder.note_resumed(environment(seed=job.suite.seed))

            def keep(rows: list[Row]) -> None:
                rows = _naming_owner(with_finite_numbers(rows))
                append(rows)
                outcome.count(rows)

            _get_ready(left, job, jobs or usable_cores())
            if meanwhile is not None and left:
                meanwhile()
            left = _correct_cases(left, job, watch, keep, check)
            for name in dict.fromkeys(case.engine for case in left):
                own = [case for case in left if case.engine == name]
                watch.phase(f"engine {name}", len(own))
                for rows in _run_engine(name, own, job, jobs or usable_cores(), timeout_s, spending):
                    keep(rows)
                    watch.step(rows[0].case)
    except KeyboardInterrupt as stop:
        outcome.interrupted, outcome.exit_status = True, exit_status(stop)
        return outcome
    except (StorageError, CannotGoOn) as error:
        raise type(error)(
            f"{error}; {outcome.done} of {outcome.cases} cases are safe in {job.folder.path}, "
            f"and `moebench run --resume {job.folder.path}` continues"
        ) from error
    job.folder.finish()
    return outcome


def _naming_owner(rows: list[Row]) -> list[Row]:
    """Rows whose reasons say whose system it is, where that is another package's."""
    from moebench.systems.registry import package_of

    owner = package_of(rows[0].system)
    if owner is None:
        return rows
    return [replace(row, reason=f"package {owner}: {row.reason}") if row.reason else row for row in rows]


def _correct_cases(
    cases: list[Case], job: Job, watch: Watch, keep: Callable[[list[Row]], None], check: Check | None
) -> list[Case]:
    """The cases that pass their check instance; the others get a row that says why they have no number."""
    check = check or _check()
    by_key: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        kind = case.workload.kind
        by_key.setdefault((kind, *kinds.of(kind, "check_key")(case)), []).append(case)
    watch.phase("correctness", len(by_key))
    passed: set[str] = set()
    for own, status in zip(by_key.values(), check([own[0] for own in by_key.values()]), strict=True):
        watch.step(" ".join((own[0].system, own[0].workload.labels[0][0])))
        if status.status == "passed":
            passed.update(case.hash for case in own)
            continue
        for case in own:
            hardware = job.topologies[case.topology].hardware.name
            row = without_number(case, hardware, status.status, status.reason)
            report = getattr(status, "report", "")
            keep([replace(row, detail={"report": report}) if report else row])
    return [case for case in cases if case.hash in passed]


def _check() -> Check:
    from moebench.checks.correctness import check_cases

    return check_cases


def _get_ready(cases: Sequence[Case], job: Job, jobs: int) -> None:
    """Let engines start what takes long to start, before the correctness gate."""
    for name in dict.fromkeys(case.engine for case in cases):
        get_ready = getattr(import_module(ENGINES[name]), "get_ready", None)
        if get_ready is not None:
            get_ready([case for case in cases if case.engine == name], job.topologies, jobs)


def _run_engine(
    name: str, cases: Sequence[Case], job: Job, jobs: int, timeout_s: float | None, spending: Spending | None
) -> Iterator[list[Row]]:
    """The rows of one case at a time; a full disk met by the engine itself (traces) is the same clear error."""
    run_cases: Engine = import_module(ENGINES[name]).run_cases
    known = inspect.signature(run_cases).parameters
    options = {"traces": job.folder.traces, "timeout_s": timeout_s, "spending": spending}
    extra = {name: value for name, value in options.items() if name in known}
    missing = {case.hash: case.name for case in cases}
    with closing(run_cases(cases, job.topologies, job.suite, jobs, **extra)) as results:
        while True:
            with storage(job.folder.path, DISK_ERRORS):
                rows = next(results, None)
            if rows is None:
                break
            missing.pop(rows[0].case_hash, None)
            yield rows
    if missing:
        example = next(iter(missing.values()))
        raise RuntimeError(f"engine {name} gave no rows for {len(missing)} cases, such as {example}")


def _refuse_full_disk(path: Path) -> None:
    """A disk that is full before the start is an error before anything is written."""
    place = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if free < LEAST_FREE_BYTES:
        raise StorageError(f"{path}: can't write: {free} bytes are free on that disk")
