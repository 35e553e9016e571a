"""The fit of exchanges, on times that a known machine would give."""

import pytest

from moebench.calibrate_ranks import RankCalibration, probes, topology_toml, write_machine
from moebench.cluster.exchanges import ALL_REDUCE, IN_NODE, IN_NODE_ALL_REDUCE, NOTHING
from moebench.cluster.lab import NicCounters
from moebench.cluster.link_fit import Place, fit_links, timed
from moebench.cluster.probes import Exchange, Seen
from moebench.local.fit import fit
from moebench.workloads.load import load_topology
from tests.moebench.local.test_fit import messages

MESSAGE_S, STREAM, ISSUE_S, LATENCY_S, FIXED_S = 40e-6, 1e9, 20e-6, 100e-6, 150e-6
WIRE_MESSAGE, HEADERS, HOLES = 450, 1.047, 0.9
BARRIER_BYTES = 5000
WOBBLE = (1.0, 1.01, 0.99, 1.0, 1.02, 0.98)


def reports(place, exchanges):
    """What ranks would see: one sample after another, every rank alike."""
    found = [[] for _ in range(place.ranks)]
    clock = 0.0
    for wobble in WOBBLE:
        for index, exchange in enumerate(exchanges):
            span, cpu, wire = machine(place, exchange)
            nics = tuple(NicCounters(sent_bytes=round((BARRIER_BYTES + 3 * wire) / place.nodes))
                         for _ in range(place.nodes))  # fmt: skip
            for rank, seen in enumerate(found):
                end = clock + 3 * span * wobble
                seen.append(Seen(index, 3, clock, end, 3 * cpu / place.ranks * wobble, nics if rank == 0 else ()))
            clock = end + 1.0
    return found


def machine(place, exchange):
    """Seconds, processor seconds of all ranks, and bytes on the wire of one exchange."""
    if exchange.kind == NOTHING:
        return 1e-6, 0.0, 0.0
    inside = exchange.kind in (IN_NODE, IN_NODE_ALL_REDUCE)
    group, crowding = (place.ranks_per_node if inside else place.ranks), max(1.0, place.ranks / place.cores)
    crossing = 0 if inside else place.ranks * (place.ranks - place.ranks_per_node)
    if exchange.kind in (ALL_REDUCE, IN_NODE_ALL_REDUCE):
        steps = 2 * (group - 1)
        cores = steps * MESSAGE_S
        return (ISSUE_S + cores) * crowding + FIXED_S + steps * LATENCY_S, place.ranks * (ISSUE_S + cores), 0.0
    sent = (group - 1) * exchange.bytes_per_peer
    cores = (group - 1) * MESSAGE_S + sent / STREAM
    wire = crossing * (exchange.bytes_per_peer * HEADERS + WIRE_MESSAGE)
    on_nic = wire / place.nodes / (place.nic_bytes_per_s * HOLES)
    longest = max(cores * crowding, on_nic + LATENCY_S, LATENCY_S)
    return ISSUE_S * crowding + FIXED_S + longest, place.ranks * (ISSUE_S + cores), wire


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 1), (2, 2), (4, 4)])
def test_a_known_machine_is_found_again(nodes, per_node):
    """Processor time, wire, rates and latencies of the machine behind the times, each within its stated range."""
    place = Place(nodes, per_node, 2, 25e6)
    exchanges = probes(place)
    found = fit_links(timed(exchanges, reports(place, exchanges)), place, ISSUE_S)
    expected = {"host.message": MESSAGE_S, "nic.message_bytes": WIRE_MESSAGE, "nic.payload_share": 1 / HEADERS}
    for name, value in expected.items():
        assert found[name].value == pytest.approx(value, rel=0.03), name
    assert found["host.stream"].low <= STREAM <= found["host.stream"].high
    assert found["fabric.share"].value == pytest.approx(HOLES, rel=0.03)
    assert all(r.low <= r.value <= r.high for r in found.values())


def test_barriers_are_taken_off_the_wire():
    """A sample without an exchange tells what the barriers around every sample send."""
    place = Place(2, 1, 2, 25e6)
    exchanges = probes(place)
    nothing, tiny, *_ = timed(exchanges, reports(place, exchanges))
    assert nothing.wire_bytes == pytest.approx([0] * len(WOBBLE), abs=1)
    assert tiny.wire_bytes == pytest.approx([2 * (64 * HEADERS + WIRE_MESSAGE)] * len(tiny.calls), abs=2)


@pytest.mark.parametrize("place", [Place(2, 2, 2, 25e6), Place(1, 2, 2, 25e6), Place(1, 4, 2, None)])
def test_the_files_are_a_topology_that_sim_takes(place, tmp_path):
    """Emulated clusters, one node alone, and loopback: written, read again, complete."""
    exchanges = probes(place)
    shaped = place if place.nic_bytes_per_s else Place(place.nodes, place.ranks_per_node, place.cores, 1e9)
    found = timed(exchanges, reports(shaped, exchanges))
    work = fit(messages())
    calibration = RankCalibration(work, fit_links(found, place, ISSUE_S), found, place, 1.0)
    path, _ = write_machine(calibration, tmp_path / "emulated.toml")
    topology = load_topology(str(path))
    assert (topology.nodes, topology.gpus_per_node) == (place.nodes, place.ranks_per_node)
    assert topology.link_parameters["host.cores"].value == 2
    assert topology.hardware.kind == "cpu"
    assert "datasheet" in topology_toml(calibration)


def test_the_smallest_and_larger_sizes_are_calibrated_with():
    """Every kind that is fitted has a size of which latency is all, and flat exchanges two more."""
    kinds = [e.kind for e in dict.fromkeys(probes(Place(2, 2, 2, 25e6)))]
    assert kinds.count("flat") == 3
    assert Exchange(NOTHING, 4) in probes(Place(1, 2, 2, None))
    assert IN_NODE not in [e.kind for e in probes(Place(2, 1, 2, 25e6))]
