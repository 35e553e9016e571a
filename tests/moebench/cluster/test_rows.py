"""From what each rank saw to rows."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.cluster.host import Host
from moebench.cluster.lab import NicCounters
from moebench.cluster.rows import Measured, is_cpu_bound, merge, rows_of_case, take
from moebench.cluster.worker import Report, Sample
from moebench.results.rows import CPU_BOUND
from moebench.workloads.load import load_topology
from tests.moebench.cluster.engine_functions import some_cases

[CASE] = some_cases(2, systems=("reference",))
NETWORK = load_topology("2x1-titan-rtx")  # its NIC carries 12 GB/s


def report(*samples, clock="a", cores=2):
    return Report(Host(clock, cores, "cpu"), samples)


def sample(start_s, end_s, cpu_s=0.1, machine_s=0.2, nics=(), place=0):
    return Sample(0, 0, place, 4, start_s, end_s, cpu_s, machine_s, nics)


def merged(samples, clocks="aa"):
    return merge(samples, [report(s, clock=clock) for s, clock in zip(samples, clocks)], NETWORK)


times = st.floats(0, 10).map(lambda value: round(value, 6))


@given(st.lists(st.tuples(times, st.floats(0.001, 5)), min_size=2, max_size=6))
def test_a_step_lasts_from_first_in_to_last_out(windows):
    """On one clock; never shorter than any rank's own time."""
    seen = [sample(start, start + length) for start, length in windows]
    found = merged(seen, "a" * len(seen))
    span_s = max(s.end_s for s in seen) - min(s.start_s for s in seen)
    assert found.time_s == pytest.approx(span_s / 4)
    assert found.time_s >= max(found.detail["ranks_s"]) * (1 - 1e-5)


def test_clocks_of_several_hosts_are_not_compared():
    """Then the slowest rank's own time counts, and the spread stands beside it."""
    found = merged([sample(100.0, 100.8), sample(5.0, 5.4)], "ab")
    assert found.time_s == pytest.approx(0.2)
    assert found.detail["ranks_s"] == [pytest.approx(0.2), pytest.approx(0.1)]
    assert found.detail["spread_s"] == pytest.approx(0.1)


def test_shares_of_cores_and_wire():
    """Ranks of a host share its cores; the busiest direction of the busiest NIC counts."""
    nics = (NicCounters(sent_bytes=3 * 10**9, received_bytes=10**9), NicCounters(sent_bytes=10**9))
    found = merged([sample(0.0, 0.5, 0.3, 0.9, nics), sample(0.0, 0.5, 0.1, 0.8)])
    assert found.cpu_share == pytest.approx(0.4)
    assert found.machine_share == pytest.approx(0.9)
    assert found.wire_share == pytest.approx(0.5)
    assert found.detail["nics"][0]["sent_bytes"] == 3 * 10**9


def test_the_busiest_host_counts():
    """One host of two at its limit is at its limit."""
    found = merged([sample(0.0, 1.0, 1.8, 1.9), sample(0.0, 1.0, 0.1, 0.1)], "ab")
    assert found.cpu_share == pytest.approx(0.9)
    assert found.wire_share is None


@pytest.mark.parametrize(
    ("cores", "wire", "bound"), [(0.5, 0.1, False), (0.7, 0.1, True), (0.7, 0.9, False), (0.7, None, True)]
)
def test_what_is_bound_by_processors(cores, wire, bound):
    """Busy cores, unless the wire is nearly full all the same."""
    assert is_cpu_bound(cores, wire) == bound


def measured(cpu_s=0.1, count=6):
    """A case with samples of two starts."""
    found = Measured()
    for process in range(2):
        seen = [sample(float(i), i + 0.4 + 0.01 * i, cpu_s, cpu_s, place=i) for i in range(count)]
        take([found], process, [report(*seen), report(*seen)], NETWORK)
    return found


def test_every_sample_and_a_summary():
    """Each with its start's number and every rank's time; the summary has the interval."""
    rows = rows_of_case(CASE, NETWORK, measured())
    samples, [summary] = [r for r in rows if r.sample is not None], [r for r in rows if r.sample is None]
    assert [r.sample for r in samples] == list(range(12))
    assert [r.detail["process"] for r in samples] == [0] * 6 + [1] * 6
    assert all(len(r.detail["ranks_s"]) == 2 for r in samples)
    assert summary.low <= summary.value <= summary.high
    assert summary.detail["count"] == 12
    assert "mark" not in summary.detail


def test_a_cpu_bound_case_is_marked_and_judged_by_nobody():
    """The summary carries the mark, and what claims are judged by leaves it out."""
    from moebench.claims.evidence import Evidence

    rows = rows_of_case(CASE, NETWORK, measured(cpu_s=0.5))
    [summary] = [r for r in rows if r.sample is None]
    assert (summary.status, summary.detail["mark"]) == ("passed", CPU_BOUND)
    assert "nothing judges by this number" in summary.reason
    assert not Evidence(rows).steps.of_engine("cluster")
    assert Evidence(rows_of_case(CASE, NETWORK, measured())).steps.of_engine("cluster")


def test_a_gpu_is_never_cpu_bound():
    """There a busy host is the program's own doing, and sim knows the host."""
    found = measured(cpu_s=0.5)
    found.device = "NVIDIA H100 80GB HBM3"
    assert all("mark" not in r.detail for r in rows_of_case(CASE, NETWORK, found) if r.sample is None)


def test_a_failure_keeps_the_ranks_own_report():
    """One row without a number: the reason in a line, the whole report beside it."""
    failed = replace(Measured(), status="failed", reason="rank 1: RuntimeError: no", report="rank 1 raised:\nTraceback")
    [row] = rows_of_case(CASE, NETWORK, failed)
    assert (row.value, row.status, row.reason) == (None, "failed", "rank 1: RuntimeError: no")
    assert "Traceback" in row.detail["report"]
