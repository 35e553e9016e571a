"""What follows from the time of an exchange: bandwidth, what nodes send, and the time on other machines."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.cases.plan import Filters, plan
from moebench.results.rows import row_of
from moebench.rows.exchanges import MOST_FACTOR, NICS, STEPS, derived, grid
from moebench.sim.engine import run_cases
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.trace.alone import programs_of
from moebench.workloads.load import load_topology, with_overrides
from moebench.workloads.machine import Parameter
from tests.moebench.suites import of_kind

SUITE = replace(of_kind("hetu", "exchange"), samples=8)


def simulated(topology, payload_bytes, **changes):
    """Rows of all exchanges of a payload, by exchange."""
    place = load_topology(topology)
    cases = [c for c in plan(SUITE, Filters(topologies=(topology,))) if c.workload.payload_bytes == payload_bytes]
    cases = [replace(case, **changes) for case in cases]
    rows = run_cases(cases, {topology: place}, SUITE)
    return {of_case[0].system: of_case for of_case in rows}, {case.system: case for case in cases}, place


def only(rows, metric, **detail):
    [found] = [row for row in rows if row.metric == metric and detail.items() <= row.detail.items()]
    return found


@pytest.mark.parametrize("topology", ["2x8-titan-rtx", "4x8-titan-rtx", "16x8-titan-rtx", "8x4-rtx-2080-ti"])
def test_a_node_sends_what_the_formulas_say(topology):
    """G^2 (N - 1), N - 1 and G (N - 1) messages; the same bytes over its NICs by every exchange."""
    rows, _, place = simulated(topology, 2**20)
    nodes, gpus, payload = place.nodes, place.gpus_per_node, 2**20
    messages = {"flat": gpus**2 * (nodes - 1), "leader": nodes - 1, "2d": gpus * (nodes - 1)}
    inside = {"flat": gpus * (gpus - 1) / (nodes * gpus), "leader": 2 * (gpus - 1), "2d": gpus - 1}
    for name, own in rows.items():
        assert only(own, "nic_messages").value == messages[name]
        assert only(own, "nic_bytes").value == gpus * payload * (nodes - 1) / nodes
        assert only(own, "inside_bytes").value == pytest.approx(inside[name] * payload)


def test_bandwidth_is_the_payload_over_the_time():
    """With the ends of the interval turned round."""
    rows, _, _ = simulated("4x8-titan-rtx", 2**24)
    for own in rows.values():
        time, rate = only(own, "collective_time"), only(own, "algorithmic_bandwidth")
        assert rate.value == pytest.approx(2**24 / time.value)
        assert (rate.low, rate.high) == (pytest.approx(2**24 / time.high), pytest.approx(2**24 / time.low))


@pytest.mark.parametrize("name", ["flat", "leader", "2d"])
def test_other_machines_are_replays_with_one_number_changed(name):
    """Each value of each parameter of the links, its own in the middle, gives the time that --set gives."""
    rows, cases, place = simulated("2x8-titan-rtx", 2**18)
    found = {row.detail["parameter"]: row.detail for row in rows[name] if row.metric == "time_if"}
    assert set(found) == {*place.link_parameters, NICS}
    own_s = only(rows[name], "collective_time").value
    for parameter in ("nic.message", "link.bandwidth", "collective.fixed"):
        detail = found[parameter]
        assert len(detail["values"]) == STEPS
        assert detail["values"][STEPS // 2] == pytest.approx(place.link_parameters[parameter].value)
        assert detail["times_s"][STEPS // 2] == pytest.approx(own_s, rel=1e-4)
        unit = place.link_parameters[parameter].unit
        scaled = detail["values"][3] / place.link_parameters[parameter].scale
        there = with_overrides(place, {parameter: f"{scaled} {unit}"})
        [expected] = replay(programs_of(cases[name], there), there, nominal(there.parameters())).step_time_s
        assert detail["times_s"][3] == pytest.approx(expected, rel=1e-4)
    assert found[NICS]["values"] == [1, 2, 4, 8]
    assert found[NICS]["times_s"][0] == pytest.approx(own_s, rel=1e-4)


@pytest.mark.parametrize("name", ["flat", "leader"])
def test_the_plane_is_replays_with_both_changed(name):
    """Faster links and bridges inside, dearer messages between nodes: the time that --set gives; first as it is."""
    rows, cases, place = simulated("2x8-titan-rtx", 2**18)
    detail = only(rows[name], "time_if_both").detail
    times_s = np.array(detail["times_s"]).reshape(len(detail["faster"]), len(detail["message_s"]))
    own = detail["message_s"].index(5e-6)
    assert detail["faster"][0] == 1
    assert times_s[0, own] == pytest.approx(only(rows[name], "collective_time").value, rel=1e-4)
    changes = {"link.bandwidth": f"{4.24 * 4} GB/s", "bridge.bandwidth": "160 GB/s", "nic.message": "40 us"}
    there = with_overrides(place, changes)
    [expected] = replay(programs_of(cases[name], there), there, nominal(there.parameters())).step_time_s
    faster, dearer = (list(np.round(detail[key], 9)) for key in ("faster", "message_s"))
    assert times_s[faster.index(4), dearer.index(40e-6)] == pytest.approx(expected, rel=1e-4)


def test_other_machines_than_the_default_are_varied_in_one_thing():
    """The share of the wire that the fabric carries, and nothing else."""
    rows, _, _ = simulated("2x8-titan-rtx", 2**18, is_default=False)
    for own in rows.values():
        assert [row.detail["parameter"] for row in own if row.metric.startswith("time_if")] == ["fabric.share"]


def test_a_measured_time_gives_a_bandwidth_and_nothing_else():
    """No replay of ranks that really ran; samples have no row of their own."""
    _, cases, place = simulated("2x8-titan-rtx", 2**18)
    case = replace(cases["flat"], engine="cluster")
    summary = row_of(case, "cpu", "collective_time", "s", 0.5)
    [rate] = derived(case, place, [summary, row_of(case, "cpu", "collective_time", "s", 9.0, sample=0)])
    assert (rate.metric, rate.value) == ("algorithmic_bandwidth", 2**19)
    assert derived(case, place, [row_of(case, "cpu", "collective_time", "s", None, status="failed")]) == []


def test_a_grid_stays_within_what_a_parameter_may_be():
    """A thousand times either way; a share ends at 1."""
    share = grid("fabric.share", Parameter(0.8, 0.3, 1.0, "1", 1.0, "assumed", "test"))
    assert share[-1] == 1.0
    assert share[0] == pytest.approx(0.8 / MOST_FACTOR)
    assert (np.diff(share) > 0).all()
    rate = grid("nic.bandwidth", Parameter(12e9, 11e9, 12e9, "GB/s", 1e9, "derived", "test"))
    assert rate[-1] / rate[0] == pytest.approx(MOST_FACTOR**2)
