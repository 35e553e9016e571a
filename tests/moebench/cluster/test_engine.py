"""The engine: who is started with whom, and what a failing case leaves to the others."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, plan
from moebench.cluster import engine
from moebench.cluster.blame import CaseFailed
from moebench.cluster.host import Host
from moebench.cluster.lab import LabError
from moebench.cluster.worker import Report, Sample
from moebench.ranks.run import PlaceLost, RanksError
from moebench.stopping import CannotGoOn
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology, with_overrides
from tests.moebench.cluster.engine_functions import BRIEFLY, some_cases, this_machine
from tests.moebench.cluster.support import problem

HERE = this_machine(2)
SUITE = load_suite("smoke")


class FakeRanks:
    """A launcher whose ranks need no time; those that `fails(case)` names fail with the report that it returns."""

    counters = None

    def __init__(self, fails=lambda case: None):
        self.fails = fails
        self.starts = []

    def run(self, target, args, timeout_s, silence_s):
        [request] = args
        assert silence_s == 120.0
        self.starts.append((request.process, [case.system for case in request.cases], request.detail))
        for case in request.cases:
            report = self.fails(case)
            if isinstance(report, Exception):
                raise report
            if report is not None:
                raise RanksError(f"measure on 2 ranks failed\n\n{report}")
        samples = tuple(
            Sample(case, 0, place, 3, float(place), place + 0.3, 0.1, 0.1)
            for place, case in enumerate([*range(len(request.cases))] * 2)
        )
        return [Report(Host("clock", 2, "cpu"), samples)] * 2


@pytest.fixture
def ranks(monkeypatch):
    """Ranks that can be told to fail."""
    fake = FakeRanks()

    @contextmanager
    def launcher_of(topology, session):
        yield fake

    monkeypatch.setattr(engine, "launcher_of", launcher_of)
    return fake


def lab_topology(rate=25e6, buffer=1 << 19):
    """An emulated cluster of NICs of some bytes/s and ports of some bytes."""
    links = load_topology("1x1-titan-rtx").link_parameters
    known = {"nic.bandwidth": rate, "switch.buffer": buffer}
    some = {name: replace(links["nic.bandwidth"], value=float(value)) for name, value in known.items()}
    return replace(HERE, name="1x2-emulated", link_parameters=links | some)


def outcome(cases, topology=HERE, **options):
    """Status and reason of each case by system."""
    rows = list(engine.run_cases(cases, {topology.name: topology}, SUITE, **options))
    assert sorted(of_case[0].case_hash for of_case in rows) == sorted(case.hash for case in cases)
    return {of_case[0].system: (of_case[-1].status, of_case[-1].reason) for of_case in rows}


def test_cases_of_a_point_start_together(ranks):
    """Interleaved in each of two starts; only the first looks into the operators."""
    cases = some_cases(2)
    assert set(outcome(cases).values()) == {("passed", "")}
    names = [case.system for case in cases]
    assert ranks.starts == [(0, names, True), (1, names, False)]


def test_a_failing_case_leaves_the_others_together(ranks):
    """It is named in the report, and is not started again; the others lose nothing."""
    cases = some_cases(2)
    bad = cases[1]

    def fails(case):
        named = CaseFailed("out-of-memory", bad.name, "not enough")
        return f"rank 1 raised:\nTraceback\nCaseFailed: {named}" if case == bad else None

    ranks.fails = fails
    found = outcome(cases)
    assert found.pop(bad.system) == ("out-of-memory", "rank 1: not enough")
    assert set(found.values()) == {("passed", "")}
    assert [len(systems) for _, systems, _ in ranks.starts] == [4, 3, 3]


def test_without_a_name_each_case_is_tried_alone(ranks):
    """Ranks that hang do not say in which case; it is found by starting each by itself."""
    cases = some_cases(2)
    bad = cases[2]
    ranks.fails = lambda case: "ranks 0, 1 were not done after 9 s" if case == bad else None
    found = outcome(cases)
    assert found.pop(bad.system) == ("failed", "ranks 0, 1 were not done after 9 s")
    assert set(found.values()) == {("passed", "")}
    assert [len(systems) for _, systems, _ in ranks.starts] == [4, 1, 1, 1, 1, 3]


def test_ranks_that_hang_say_in_which_case(ranks):
    """Then nobody else is started again for it."""
    cases = some_cases(2)
    bad = cases[2]
    reason = f"ranks 0, 1 were stuck in {bad.name}: no sign of life for 20 s"
    ranks.fails = lambda case: f"{reason}\n\nrank 0 stood at:\n..." if case == bad else None
    found = outcome(cases)
    assert found.pop(bad.system) == ("failed", reason)
    assert set(found.values()) == {("passed", "")}
    assert [len(systems) for _, systems, _ in ranks.starts] == [4, 3, 3]


def test_a_lost_place_is_no_cases_fault(ranks):
    """Once: all start again on a new one. A place that is lost time and again ends the point, not the run."""
    cases, lost = some_cases(2), [PlaceLost("the cluster is gone")]
    ranks.fails = lambda case: lost.pop() if lost else None
    assert set(outcome(cases).values()) == {("passed", "")}
    assert [len(systems) for _, systems, _ in ranks.starts] == [4, 4, 4]
    ranks.fails = lambda case: PlaceLost("the cluster is gone")
    assert set(outcome(cases).values()) == {("failed", "the cluster is gone")}


def test_a_cluster_that_can_no_more_be_emulated_stops_the_run(monkeypatch):
    """A sentence for the user, and no traceback; what was done before is kept."""

    @contextmanager
    def launcher_of(topology, session):
        raise LabError("tc: no")
        yield

    monkeypatch.setattr(engine, "launcher_of", launcher_of)
    with pytest.raises(CannotGoOn, match=r"1x2-this-machine can't be emulated here: tc: no"):
        outcome(some_cases(2))


def test_an_unsupported_case_starts_no_rank(ranks):
    """Known before: the reason is the system's, or the workload's own."""
    [case] = some_cases(2, systems=("reference",))
    odd = replace(case, workload=replace(case.workload, experts=5))
    assert outcome([odd]) == {"reference": ("unsupported", "experts = 5 is not divisible by ranks = 2")}
    assert not ranks.starts


def test_a_cluster_that_is_not_here_is_refused():
    """Before anything is written; the error says how to start ranks there, or here."""
    cases = [replace(case, topology="2x4-titan-rtx") for case in some_cases(2)]
    with pytest.raises(InputError, match=r"moebench launch .*--topology 2x4-titan-rtx.*--emulate 2x4"):
        engine.check(cases, {"2x4-titan-rtx": load_topology("2x4-titan-rtx")})


def test_an_emulated_cluster_that_this_machine_refuses(monkeypatch):
    """What is missing and what to do, as the lab says it."""
    monkeypatch.setattr("moebench.cluster.lab.lab_problem", lambda: "no namespaces: run as root, or --unshaped")
    emulated = lab_topology()
    cases = [replace(case, topology=emulated.name) for case in some_cases(2)]
    with pytest.raises(InputError, match="run as root"):
        engine.check(cases, {emulated.name: emulated})


@pytest.mark.parametrize(
    ("rate", "buffer", "told"),
    [(100, 1 << 19, "held to 8kbit to 1000gbit"), (1e15, 1 << 19, "held to"), (1e8, 1024, "holds 2.96kb to 1024mb")],
)
def test_rates_that_no_lab_has_are_refused(rate, buffer, told):
    """Before anything is written, also where they come from --set or from a file."""
    emulated = lab_topology(rate, buffer)
    cases = [replace(case, topology=emulated.name) for case in some_cases(2)]
    with pytest.raises(InputError, match=f"1x2-emulated: .*{told}"):
        engine.check(cases, {emulated.name: emulated})


@pytest.fixture
def short_samples(monkeypatch):
    """Real ranks take samples of few steps."""
    monkeypatch.setattr(engine, "TARGET", BRIEFLY)


@pytest.mark.slow
def test_real_ranks(short_samples):
    """Every system on two ranks of this machine: samples of both starts, counts that a trace predicts exactly."""
    from moebench.sim.engine import run_cases as simulate

    cases = some_cases(2)
    found = list(engine.run_cases(cases, {HERE.name: HERE}, SUITE, processes=2, blocks=1, timeout_s=120))
    predicted = {
        of_case[0].case_hash: _exact(of_case) for of_case in simulate(cases, {HERE.name: HERE}, SUITE)
    }
    for of_case in found:
        assert {row.status for row in of_case} == {"passed"}, of_case[0].reason
        processes = [row.detail["process"] for row in of_case if row.sample is not None]
        assert processes == [0, 0, 1, 1]
        assert _exact(of_case) == predicted[of_case[0].case_hash]


@pytest.mark.slow
def test_every_system_on_emulated_nodes(calibrated, short_samples):
    """2x2 ranks, with a NIC a node where this machine can emulate it: its bytes are those counted, with headers."""
    is_shaped = problem() is None
    name = f"2x2-{'emulated' if is_shaped else 'unshaped'}"
    rate = {"nic.bandwidth": "200 Mb/s"} if is_shaped else {}
    topology = with_overrides(load_topology(name), rate)
    chosen = Filters(topologies=(name,), gates=("gshard",), batch_sizes=(2,), overrides=rate)
    cases = plan(SUITE, chosen, "auto")
    assert {case.engine for case in cases} == {"cluster"}
    found = list(engine.run_cases(cases, {name: topology}, SUITE, processes=1, blocks=1, timeout_s=120))
    assert len(found) == 4
    for rows in found:
        assert {row.status for row in rows} == {"passed"}, rows[0].reason
        payload = next(r.value for r in rows if r.metric == "link_bytes" and r.detail["tier"] == "nic")
        assert payload > 0
        for sample in (row for row in rows if row.sample is not None):
            assert ("nics" in sample.detail) == is_shaped
            sent = [nic["sent_bytes"] for nic in sample.detail.get("nics", ())]
            # Of both ranks of a node; headers, gloo's notices and two barriers come on top.
            assert all(1 < total / (2 * payload * sample.detail["steps"]) < 2 for total in sent), sent


def _exact(rows):
    """Counts and bytes of a case by metric and detail."""
    timed = ("step_time", "region_time", "exposed_communication", "host_bound", "busy_time")
    return {(r.metric, tuple(r.detail.items())): r.value for r in rows if r.metric not in timed}
