"""The emulated cluster: what its ranks compute, what its NICs count and how fast they are, who did not answer."""

import os
import re
import signal
import threading
import time
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from moebench.cluster.lab import Lab, LabError, NicCounters, holder, lab_problem, namespaces, silence
from moebench.ranks.run import PlaceLost, RanksError, run_ranks
from tests.moebench.cluster.support import F, eventually, is_alive, needs_lab

MIB = 1 << 20
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lab():
    """2 nodes of 2 ranks at 200 Mbit/s, for tests that leave it whole."""
    needs_lab()
    with Lab(2, 2, 200e6) as built:
        yield built


def wire_ratio(counters, payload_bytes):
    """Bytes on the wire over bytes of payload, of every NIC, each way."""
    return [value / payload_bytes for nic in counters for value in (nic.sent_bytes, nic.received_bytes)]


def test_collectives_give_what_they_give_on_loopback(lab):
    """Every collective on 2x2 ranks over the NICs, bit for bit."""
    emulated, plain = lab.run(F + "every_collective", (7,)), run_ranks(F + "every_collective", 4, (7,))
    for ours, theirs in zip(emulated, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_ranks_know_their_place(lab):
    """Ranks fill node after node, and find the variables that torchrun sets."""
    assert lab.run(F + "place") == [[rank, rank, 4, rank % 2, 2, rank // 2, 2] for rank in range(4)]
    assert [lab.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]


@pytest.mark.parametrize("rate", [20e6, 200e6])
def test_nics_count_the_bytes_on_the_wire(rate):
    """Payload and its headers, both ways, whichever shaper holds the rate."""
    needs_lab()
    payload = MIB
    with Lab(2, 2, rate) as lab:
        counters = lab.run(F + "traffic", (lab.network, 3 * payload, False))[0][2]
    # 2 ranks of each node send to 2 of the other; 40 bytes TCP/IP with options and 14 Ethernet on 1,448 of payload
    assert all(1.03 < ratio < 1.1 for ratio in wire_ratio(counters, 4 * payload))
    assert all(nic.sent_packets > 4 * payload / 1448 for nic in counters)
    assert [nic.switch_drops for nic in counters] == [0, 0]


def test_traffic_within_a_node_is_not_counted(lab):
    """Ranks of a node exchange megabytes, the NICs see only the barriers around it."""
    counters = lab.run(F + "traffic", (lab.network, 8 * MIB, True))[0][2]
    assert all(nic.sent_bytes < 50_000 and nic.received_bytes < 50_000 for nic in counters)


def test_one_node_sends_nothing():
    """A whole run on one node, rendezvous included, leaves its NIC at zero."""
    needs_lab()
    with Lab(1, 2, 1e9) as lab:
        lab.run(F + "every_collective", (1,))
        [nic] = lab.counters()
        assert replace(nic, retransmissions=0) == NicCounters()  # a busy machine's loopback may send again


@pytest.mark.parametrize("rate", [20e6, 200e6])
def test_the_rate_is_held(rate):
    """An exchange on 2x1 takes at least its payload over the rate, first in to last out."""
    needs_lab()
    payload = MIB
    with Lab(2, 1, rate) as lab:
        seen = lab.run(F + "traffic", (lab.network, payload, False))
    assert max(end for _, end, _ in seen) - min(start for start, _, _ in seen) >= payload * 8 / rate


def test_a_shallow_switch_loses_packets_and_says_so():
    """Many senders into one small buffer: drops and retransmissions are counted, and everything arrives."""
    needs_lab()
    with Lab(3, 2, 50e6, switch_buffer_bytes=16 << 10) as lab:
        counters = lab.run(F + "traffic", (lab.network, 5 * MIB // 4, False))[0][2]
    assert sum(nic.switch_drops for nic in counters) > 0
    assert sum(nic.retransmissions for nic in counters) > 0


def test_three_ranks():
    """A number of nodes that is no power of two: results and bytes."""
    needs_lab()
    with Lab(3, 1, 200e6) as lab:
        emulated, plain = lab.run(F + "every_collective", (3,)), run_ranks(F + "every_collective", 3, (3,))
        counters = lab.run(F + "traffic", (lab.network, 2 * MIB, False))[0][2]
    assert all(torch.equal(a, b) for ours, theirs in zip(emulated, plain) for a, b in zip(ours, theirs))
    assert all(1.03 < ratio < 1.1 for ratio in wire_ratio(counters, 2 * MIB))


def test_everything_also_works_in_a_user_namespace(monkeypatch):
    """The form for ordinary users: ranks enter it, and read the counters from inside."""
    needs_lab()
    monkeypatch.setattr(holder, "FORMS", holder.FORMS[1:])
    if (reason := lab_problem()) is not None:
        pytest.skip(reason)
    with Lab(2, 1, 200e6) as lab:
        assert lab.network.user_namespace() is not None
        counters = lab.run(F + "traffic", (lab.network, MIB, False))[0][2]
        assert all(1.03 < ratio < 1.1 for ratio in wire_ratio(counters, MIB))
        first, second = lab.run(F + "counted_by_each", (lab.network,))
        assert [nic.sent_bytes > MIB for nic in first + second] == [True] * 4


def test_counters_go_up_and_are_the_same_at_both_ends(lab):
    """What one node sends the other receives, unless the switch dropped it."""
    seen = [lab.counters()]
    for _ in range(2):
        lab.run(F + "place")
        seen.append(lab.counters())
    assert all(after[0].sent_bytes > before[0].sent_bytes for before, after in pairwise(seen))
    lost = sum(nic.switch_drops for nic in seen[-1])

    def are_even():
        one, other = lab.counters()
        return (one.sent_bytes, one.sent_packets) == (other.received_bytes, other.received_packets)

    assert lost or eventually(are_even)  # the last packets may be under way


def test_a_rank_that_dies_is_named(lab):
    """As on loopback; a peer that names the address learns whose it is."""
    with pytest.raises(RanksError, match="rank 3 was killed by SIGKILL") as error:
        lab.run(F + "loses_connection")
    named = re.findall(r"10\.77\.0\.\d\]?:\d+( \(node \d: ranks \d, \d\))?", str(error.value))
    assert all(named)
    assert lab.run(F + "place")[3][0] == 3  # and the lab works on


def test_a_rank_that_was_stopped_is_named(lab):
    """At the timeout: who did not answer, and where the others waited."""
    with pytest.raises(RanksError, match="rank 1 was stopped by a signal, and did not answer") as error:
        lab.run(F + "stops", (1,), timeout_s=8)
    assert "ranks 0, 1, 2, 3 were not done after 8 s" in str(error.value)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nic", r"ranks 2, 3 \(node 1, 10.77.0.2\) did not answer: its NIC \(eth0\) is down"),
        ("port", r"ranks 2, 3 \(node 1, 10.77.0.2\) did not answer: the switch's port to it \(p1\) is down"),
        ("route", r"ranks 2, 3 \(node 1, 10.77.0.2\) did not answer node 0: data were sent again"),
    ],
)
def test_a_fault_in_mid_collective_names_who_did_not_answer(fault, words):
    """Within the timeout, whether a cable is pulled at either end or packets just don't arrive."""
    needs_lab()
    with Lab(2, 2, 100e6) as lab:
        lab.run(F + "place")  # the rank server is there: the time below is the collective's
        start = lab.counters()[0].sent_bytes

        def cut():
            if not eventually(lambda: lab.counters()[0].sent_bytes > start + MIB):
                return
            if fault == "nic":
                lab.set_nic(1, False)
            elif fault == "port":
                lab.network.on_switch("ip", "link", "set", "p1", "down")
            else:
                wrong = f"lladdr 02:77:ff:ff:ff:ff dev {namespaces.NIC} nud permanent"
                lab.network.on_node(0, "ip", "neigh", "replace", namespaces.address(1), *wrong.split())

        cutter = threading.Thread(target=cut)
        cutter.start()
        with pytest.raises(RanksError, match=words) as error:
            lab.run(F + "exchanges_for_ever", (MIB,), timeout_s=10)
        cutter.join()
        assert "ranks 0, 1, 2, 3 were not done after 10 s" in str(error.value)
        assert fault == "route" or "ranks 0, 1 (node 0" not in str(error.value)
        assert isinstance(error.value, PlaceLost) == (fault != "route")
        if fault == "port":
            lab.restore()
            assert lab.run(F + "place")[3][0] == 3
        if fault == "nic":
            lab.set_nic(1, True)
            assert silence.cut_nodes(lab.network) == {}
            assert "cubic" in lab.network.on_node(1, "ip", "route")
            assert lab.run(F + "place")[3][0] == 3


def test_a_lab_that_is_whole_accuses_nobody(lab):
    """A rank's own mistake is told as such."""
    assert silence.silent_nodes(lab.network, 2) == []
    with pytest.raises(RanksError) as error:
        lab.run("tests.moebench.rank_functions:raises", (2,))
    assert [line for line in str(error.value).splitlines() if line][1] == "rank 2 raised:"


def test_a_lab_whose_holder_was_killed_is_built_anew():
    """The ranks are told at once, not when the time is up; nobody is blamed, and the next run finds a new lab."""
    needs_lab()
    with Lab(2, 1, 100e6) as lab:
        lab.run(F + "place")
        held, started = lab.network.holder, time.monotonic()
        threading.Timer(1.0, os.kill, (held, signal.SIGKILL)).start()
        with pytest.raises(PlaceLost, match=rf"^the emulated cluster is gone: .*\({held}\) was killed by SIGKILL$"):
            lab.run(F + "exchanges_for_ever", (MIB,), timeout_s=600)
        assert time.monotonic() - started < 100
        lab.restore()
        assert lab.network.holder != held
        assert lab.run(F + "place")[1][0] == 1
        still = lab.network.holder
        lab.restore()
        assert lab.network.holder == still


def test_addresses_lead_to_ranks(lab):
    """Both in the lab's own map and in a text with addresses, others left alone."""
    assert [list(lab.ranks_at(f"10.77.0.{end}")) for end in (1, 2, 3)] == [[0, 1], [2, 3], []]
    text = "reset by peer [10.77.0.2]:4711, 10.77.0.1:80, [10.77.0.20]:1, 110.77.0.1:2"
    assert silence.with_ranks(text, 2, 2) == (
        "reset by peer [10.77.0.2]:4711 (node 1: ranks 2, 3), 10.77.0.1:80 (node 0: ranks 0, 1), "
        "[10.77.0.20]:1, 110.77.0.1:2"
    )


def test_a_lab_that_is_closed_says_so():
    """Neither before nor after its block is there anything to run on; closing twice is harmless."""
    needs_lab()
    lab = Lab(1, 1, 1e9)
    with pytest.raises(LabError, match="not built"):
        lab.counters()
    with lab:
        process = lab.network.holder
        network = lab.network
        with pytest.raises(LabError, match="already built"):
            lab.__enter__()
    assert not is_alive(process)
    lab.close()
    with pytest.raises(LabError, match="not built"):
        lab.run(F + "place")
    with pytest.raises(LabError, match="is gone"):
        network.on_node(0, "true")
