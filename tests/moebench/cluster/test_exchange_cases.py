"""Cases of exchanges on real ranks of this machine, which pretend to sit on two nodes."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, Machines, plan
from moebench.cluster import engine
from moebench.workloads.load import load_topology
from tests.moebench.cluster.engine_functions import BRIEFLY
from tests.moebench.suites import of_kind

SUITE = of_kind("hetu", "exchange")


def here():
    """2x2 ranks on loopback."""
    described = load_topology("2x2-titan-rtx")
    return replace(described, name="2x2-unshaped", hardware=replace(described.hardware, name="here", kind="cpu"))


@pytest.fixture(scope="module")
def measured():
    """Rows of every exchange of a small and of a large payload, by exchange."""
    topology = here()
    cases = plan(SUITE, Filters(topologies=(topology.name,)), "cluster", Machines(load=lambda name: topology))
    cases = [case for case in cases if case.workload.payload_bytes in (2**14, 2**30)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "TARGET", BRIEFLY)
        rows = list(engine.run_cases(cases, {topology.name: topology}, SUITE, processes=1, blocks=1))
    return {(own[0].payload_bytes, own[0].system): own for own in rows}


def test_every_exchange_is_timed(measured):
    """Samples, their summary under the metric of exchanges, and a bandwidth."""
    for name in ("flat", "leader", "2d"):
        rows = measured[2**14, name]
        [summary] = [row for row in rows if row.metric == "collective_time" and row.sample is None]
        assert summary.status == "passed"
        assert summary.value > 0
        [rate] = [row for row in rows if row.metric == "algorithmic_bandwidth"]
        assert rate.value == pytest.approx(2**14 / summary.value)
        assert [row for row in rows if row.metric == "collective_time" and row.sample is not None]


def test_ranks_really_send_what_the_trace_says(measured):
    """Messages and bytes of a node, from the operators that the ranks ran."""
    for name, messages in (("flat", 4), ("leader", 1), ("2d", 2)):
        values = {row.metric: row.value for row in measured[2**14, name] if not row.detail}
        assert values["nic_messages"] == messages
        assert values["nic_bytes"] == 2 * 2**14 / 2


def test_what_is_large_is_left_to_gpus(measured):
    """Skipped with the reason, before any rank is started."""
    [row] = measured[2**30, "flat"]
    assert (row.status, row.metric) == ("skipped", "collective_time")
    assert "on CPUs the limit is 16 MiB" in row.reason
