"""Rails: what changes them passes the spines, and nothing is priced otherwise where there are none."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.program import Collective
from moebench.sim.cost import Machine
from moebench.sim.loads import loads
from moebench.sim.network import TIERS, collective_time_s, collective_timing
from moebench.sim.rails import even_crossing, has_rails, is_aligned, rails_of, uneven_crossing
from moebench.sim.uncertainty import nominal
from moebench.workloads.load import load_topology, with_overrides
from tests.moebench.sim.sim_machines import all_to_all, hardware, topology

MIB = 2**20
ALGORITHMS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")


def rails(nodes, gpus, nics=None, share=0.5, **changes):
    """A topology with a leaf for each NIC, without latencies unless asked for."""
    zero = {"link__latency": 0.0, "nic__latency": 0.0, "spine__share": share}
    return topology(nodes, gpus, gpus if nics is None else nics, **{**zero, **changes})


def seconds(collective, where, rows=None, sharing=1):
    """Nominal time."""
    return float(collective_time_s(collective, where, nominal(where.parameters()), rows, sharing)[0])


def crossing_by_definition(ranks, matrix, where):
    """Sum over pairs on other nodes and rails; and of the rail that sends or receives most."""
    rail = [rank % where.gpus_per_node * rails_of(where) // where.gpus_per_node for rank in ranks]
    sent, received = [0] * rails_of(where), [0] * rails_of(where)
    for (i, one), (j, other) in product(enumerate(ranks), repeat=2):
        if where.node_of(one) != where.node_of(other) and rail[i] != rail[j]:
            sent[rail[i]] += matrix[i][j]
            received[rail[j]] += matrix[i][j]
    return sum(sent), max(sent + received)


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.data())
def test_what_crosses_is_what_leaves_a_rail_for_another_node(nodes, gpus, nics, data):
    """Even and uneven exchanges among any ranks, any number of NICs: every pair by hand."""
    where = rails(nodes, gpus, nics)
    ranks = sorted(data.draw(st.sets(st.integers(0, nodes * gpus - 1), min_size=1)))
    matrix = data.draw(st.lists(st.lists(st.integers(0, 9), min_size=len(ranks), max_size=len(ranks)),
                                min_size=len(ranks), max_size=len(ranks)))  # fmt: skip
    found = uneven_crossing(ranks, [((rank,), row) for rank, row in zip(ranks, matrix)], where)
    assert (found.total, found.busiest) == crossing_by_definition(ranks, matrix, where)
    even = even_crossing(ranks, where)
    assert (even.total, even.busiest) == crossing_by_definition(ranks, [[1] * len(ranks)] * len(ranks), where)


def test_a_flat_exchange_passes_the_spines():
    """N nodes of G: of B bytes a rank (N - 1)(G - 1) / (N G) change rails, through a share of the NICs."""
    nodes, gpus, payload, share = 4, 8, 64 * MIB, 0.25
    where = rails(nodes, gpus, share=share)
    (load,) = loads(all_to_all(range(32), payload // 32), where)
    assert load.spine_bytes == 32 * payload * (nodes - 1) * (gpus - 1) / (nodes * gpus)
    expected = load.spine_bytes / (32 * 12.2e9 * share)
    assert seconds(all_to_all(range(32), payload // 32), where) == pytest.approx(expected)
    assert seconds(all_to_all(range(32), payload // 32), rails(nodes, gpus, share=1.0)) < expected / 3


def test_an_exchange_along_a_rail_does_not():
    """The ranks at one place of every node, even and uneven: the same time whatever the spines carry."""
    rail = range(3, 32, 8)
    rows = [((rank,), [rank * MIB] * 4) for rank in rail]
    for one, by in ((all_to_all(rail, MIB), None), (all_to_all(rail, send=[MIB] * 4), rows)):
        without = topology(4, 8, 8, link__latency=0.0, nic__latency=0.0)
        assert seconds(one, rails(4, 8, share=0.01), by) == seconds(one, without, by)
        assert all(load.spine_bytes == load.spine_steps == 0 for load in loads(one, rails(4, 8), by))


def test_the_two_dimensional_exchange_spares_the_spines():
    """Inside the nodes, then along the rails: sooner than flat by the spines' share, once they are what binds."""
    payload, where = 64 * MIB, rails(4, 8, share=0.25)
    flat = seconds(all_to_all(range(32), payload // 32), where)
    inside = seconds(all_to_all(range(8), payload // 8, group="node"), where)
    along = seconds(all_to_all(range(0, 32, 8), payload // 4, group="rail"), where, sharing=8)
    assert inside + along < flat
    assert flat / along == pytest.approx((7 / 8) / 0.25)  # (G - 1) / G of what leaves a node, through a quarter


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_without_rails_nothing_is_priced_otherwise(algorithm):
    """The tier stays empty, and spines as wide as the NICs take no longer than they do."""
    one = Collective(algorithm, "world", range(32), MIB)
    plain, wide = topology(4, 8, 8), topology(4, 8, 8, spine__share=1.0)
    timing = collective_timing(one, plain, Machine(plain.hardware, nominal(plain.parameters()), plain.ranks))
    assert set(timing.tiers_s) == set(TIERS)
    assert not timing.tiers_s["spine"].any()
    assert seconds(one, wide) == seconds(one, plain)
    assert not has_rails(plain)


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_rings_and_trees_change_rails_only_where_they_must(algorithm):
    """Groups with the same places on every node keep to their rails; of others all between nodes passes the spines."""
    where = rails(4, 8, share=0.01)
    aligned, crooked = range(1, 32, 4), [0, 9, 18, 27]
    assert (is_aligned(aligned, where), is_aligned(crooked, where)) == (True, False)
    assert all(load.spine_bytes == 0 for load in loads(Collective(algorithm, "world", aligned, MIB), where))
    found = loads(Collective(algorithm, "world", crooked, MIB), where)
    assert all(load.spine_bytes == load.fabric_bytes > 0 for load in found)
    assert seconds(Collective(algorithm, "world", crooked, MIB), where) > 5 * seconds(
        Collective(algorithm, "world", range(0, 32, 8), MIB), where
    )


def test_a_change_of_rail_takes_longer_on_the_way():
    """Its latency comes on top of the NIC's, once in an all-to-all and at every step of a crooked ring."""
    slow = {"spine__latency": 1e-3, "nic__latency": 1e-5}
    exchange = all_to_all(range(16), 1)
    assert seconds(exchange, rails(2, 8, **slow)) == pytest.approx(1e-3 + 1e-5, rel=1e-3)
    ring = Collective("all_gather", "world", [0, 9], 1)
    assert seconds(ring, rails(2, 8, **slow)) == pytest.approx(1e-3 + 1e-5, rel=1e-3)


def test_groups_with_nics_of_their_own_do_not_share_leaves():
    """Four groups of two places of every node at once: as one alone; eight groups on one NIC: one after another."""
    pair, where = [node * 8 + place for node in range(4) for place in (0, 1)], rails(4, 8, share=0.1)
    assert seconds(all_to_all(pair, MIB), where, sharing=4) == seconds(all_to_all(pair, MIB), where)
    assert seconds(all_to_all(pair, MIB), where, sharing=8) == pytest.approx(2 * seconds(all_to_all(pair, MIB), where))


def test_gloo_trees_count_each_message():
    """A broadcast on CPUs: what each step sends to another rail of another node."""
    where = rails(2, 2, hw=hardware(kind="cpu"))
    (load,) = loads(Collective("broadcast", "world", range(4), MIB), where)
    assert load.spine_bytes == 0  # 0 to 1, then 0 to 2 and 1 to 3: along the rails
    (load,) = loads(Collective("broadcast", "world", [0, 3], MIB), where)
    assert load.spine_bytes > 0


def test_the_rail_topology_is_the_plain_one_but_for_its_spines():
    """`a100-80-rails` beside `a100-80`; `--set` makes rails of any topology."""
    with_rails, plain = load_topology("4x8-a100-80-rails"), load_topology("4x8-a100-80")
    added = with_rails.parameters().keys() - plain.parameters().keys()
    assert added == {"spine.share", "spine.latency"}
    assert has_rails(with_overrides(plain, {"spine.share": "0.25"}))
