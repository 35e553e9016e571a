"""The `cluster` engine: the real program of each case on real ranks, timed across them.

Cases that share a point are measured in one start of the ranks, interleaved. A case that fails there is left out, with
the ranks' own report, and the others are started again.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

from moebench import kinds
from moebench.cases.case import Case
from moebench.cluster.blame import blame
from moebench.cluster.launchers import Launcher, check_startable, launcher_of
from moebench.cluster.rows import Measured, rows_of_case, take, times_s
from moebench.cluster.session import Session
from moebench.cluster.worker import FIRST_STEP_S, TARGET, Request, plan_samples
from moebench.local.engine import by_point
from moebench.ranks.run import PlaceLost, RanksError
from moebench.results.rows import Row
from moebench.spend import NOT_REACHED, Held, interval_width, spend
from moebench.spending import Spending
from moebench.stopping import CannotGoOn
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

PROCESSES = 2
BLOCKS = 7
BUDGET_S = 150.0  # of the samples of one start
LONGEST_S = 86400.0  # of one start; ranks that do nothing are noticed long before
MOST_LOSSES = 1  # of what ranks stand on, while a point is measured
_START_S = 2.0  # of the ranks: their start, meeting and warm-up

_session: Session | None = None


def join(session: Session | None) -> None:
    """Let later runs use the ranks that a launcher has started; None: none."""
    global _session
    _session = session


def check(cases: Sequence[Case], topologies: Mapping[str, Topology]) -> None:
    """Refuse, before anything is written, cases that this engine can't start.

    Raises:
        InputError: says what is missing and what to do.
    """
    names = dict.fromkeys(case.topology for case in cases if case.engine == "cluster")
    check_startable([topologies[name] for name in names], _session)


def measuring_s(step_s: float) -> float:
    """About how long one case takes, of which a step takes so long."""
    [steps], blocks = plan_samples([step_s], BLOCKS, BUDGET_S)
    return PROCESSES * (_START_S + 2 * blocks * (steps + 1) * step_s)


def run_cases(
    cases: Sequence[Case],
    topologies: Mapping[str, Topology],
    suite: Suite,
    jobs: int = 1,
    processes: int = PROCESSES,
    blocks: int = BLOCKS,
    timeout_s: float | None = None,
    spending: Spending | None = None,
) -> Iterator[list[Row]]:
    """Measure `cases` on real ranks; yields the rows of one case at a time.

    Args:
        cases: what to run; those that share a point are interleaved.
        topologies: this machine's, or that of the ranks of the joined session.
        suite, jobs: unused; every engine takes the same arguments.
        processes, blocks: starts of the ranks a point, and blocks in each; every case is timed twice a block.
        timeout_s: how long a step may take before its ranks are taken for stuck and ended; default by what it takes
            (`moebench.cluster.worker.Request`).
        spending: start the ranks again for what is still uncertain; topologies share the time equally, and a point that
            it can't reach at all is `skipped`.

    Raises:
        InputError: a topology that can't be started here.
        CannotGoOn: it could at first.
    """
    check(cases, topologies)
    names = list(dict.fromkeys(case.topology for case in cases))
    for index, name in enumerate(names):
        topology = topologies[name]
        runnable = []
        for case in cases:
            if case.topology != name:
                continue
            refused = kinds.of(case.workload.kind, "refusal")(case, topology)
            if refused is None:
                runnable.append(case)
            else:
                status, reason = refused
                yield rows_of_case(case, topology, Measured(status=status, reason=reason))
        if not runnable:
            continue
        share = None if spending is None else spending.part(len(names) - index)
        with _built(topology), launcher_of(topology, _session) as launcher:
            points = [_Point(point, topology, launcher, blocks, timeout_s) for point in by_point(runnable)]
            for found in _measured(points, processes, share):
                for case in found.cases:
                    yield rows_of_case(case, topology, found.found[case.hash])


def _measured(points: Sequence["_Point"], processes: int, spending: Spending | None) -> Iterator["_Point"]:
    """Each point when all that there is time for has been measured."""
    of_case = {point.cases[0].hash: point for point in points}

    def minimum() -> Iterator[Held]:
        for point in points:
            if spending is not None and spending.left_s <= 0:
                point.give_up("skipped", NOT_REACHED)
            start = monotonic()
            for process in range(processes):
                point.measure(process)
            yield Held(point.cases, (monotonic() - start) / processes, processes, point.width, point.forget)

    def again(chosen: Sequence[Held], process: int) -> None:
        for one in chosen:
            of_case[one.point[0].hash].measure(process)

    for one in spend(minimum(), spending, again, together=1):
        yield of_case[one.point[0].hash]


@contextmanager
def _built(topology: Topology) -> Iterator[None]:
    """A cluster that this machine refuses to emulate, now or again, is a sentence for its user."""
    from moebench.cluster.lab import LabError

    try:
        yield
    except LabError as error:
        raise CannotGoOn(f"topology {topology.name} can't be emulated here: {error}") from error


class _Point:
    """The cases of one point, until all have been measured in every start or have failed."""

    def __init__(
        self, cases: tuple[Case, ...], topology: Topology, launcher: Launcher, blocks: int, timeout_s: float | None
    ) -> None:
        self.cases, self.topology, self.launcher = cases, topology, launcher
        self.blocks, self.timeout_s = blocks, timeout_s
        self.found = {case.hash: Measured() for case in cases}
        self.losses = 0

    def measure(self, process: int) -> None:
        """Measure them in one start of the ranks, of that number."""
        self._start(process, self.cases)

    def width(self) -> float:
        """The widest interval of a median, as a share of it; 0 without numbers."""
        numbers = [own for own in self.found.values() if own.status == "passed" and own.samples]
        return max((interval_width(times_s(own)) for own in numbers), default=0.0)

    def forget(self, process: int) -> None:
        """Drop what one start has measured, which was stopped in its middle."""
        for own in self.found.values():
            own.samples.pop(process, None)

    def give_up(self, status: str, reason: str) -> None:
        """None of them is measured, for a reason."""
        for own in self.found.values():
            own.status, own.reason = status, reason

    def _start(self, process: int, cases: Sequence[Case]) -> None:
        """Measure those of `cases` that have not failed, together where that works."""
        while left := [case for case in cases if self.found[case.hash].status == "passed"]:
            counters, is_first = self.launcher.counters, process == 0
            request = Request(tuple(left), process, self.blocks, BUDGET_S, is_first, counters, self.timeout_s)
            try:
                reports = self.launcher.run(TARGET, (request,), LONGEST_S, max(request.allowed_s(), FIRST_STEP_S))
            except PlaceLost as error:
                self.losses += 1
                if self.losses > MOST_LOSSES:
                    self._fail(left, str(error))
            except RanksError as error:
                if not self._blamed(str(error), left):
                    for case in left:
                        self._start(process, [case])
                    return
            else:
                take([self.found[case.hash] for case in left], process, reports, self.topology)
                return

    def _fail(self, cases: Sequence[Case], report: str) -> None:
        for case in cases:
            measured = self.found[case.hash]
            measured.status, measured.reason, measured.report = "failed", blame(report).reason, report

    def _blamed(self, report: str, left: Sequence[Case]) -> bool:
        """Give a case the blame for a failed start; False where several may have it."""
        found = blame(report)
        guilty = [case for case in left if case.name == found.case] or left
        if len(guilty) > 1:
            return False
        measured = self.found[guilty[0].hash]
        measured.status, measured.reason, measured.report = found.status, found.reason, report
        return True
