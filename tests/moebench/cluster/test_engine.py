"""The engine: who is started with whom, and what a failing case leaves to the others."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from moebench.cluster import engine
from moebench.cluster.blame import CaseFailed
from moebench.cluster.host import Host
from moebench.cluster.worker import Report, Sample
from moebench.plan import Filters, plan
from moebench.ranks import RanksError
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology, with_overrides
from tests.moebench.cluster.engine_functions import some_cases, this_machine
from tests.moebench.cluster.support import problem

HERE = this_machine(2)
SUITE = load_suite("smoke")


class FakeRanks:
    """A launcher whose ranks need no time; those that `fails(case)` names fail with the report that it returns."""

    counters = None

    def __init__(self, fails=lambda case: None):
        self.fails = fails
        self.starts = []

    def run(self, target, args, timeout_s):
        [request] = args
        self.starts.append((request.process, [case.system for case in request.cases], request.detail))
        for case in request.cases:
            report = self.fails(case)
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
    emulated = replace(HERE, name="1x2-emulated")
    cases = [replace(case, topology=emulated.name) for case in some_cases(2)]
    with pytest.raises(InputError, match="run as root"):
        engine.check(cases, {emulated.name: emulated})


@pytest.mark.slow
def test_real_ranks(tmp_path):
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
def test_every_system_on_emulated_nodes(calibrated):
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
