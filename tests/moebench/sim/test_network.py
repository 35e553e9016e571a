import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebench.program import Collective
from moebench.sim.layout import NodeShare, node_shares
from moebench.sim.loads import loads
from moebench.sim.network import collective_time_s, link_bytes
from moebench.sim.uncertainty import draw, nominal
from tests.moebench.sim.sim_machines import all_to_all, hardware, topology, uncertain

ALGORITHMS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")
MIB = 2**20

shapes = st.tuples(st.integers(1, 6), st.integers(1, 8))
algorithms = st.sampled_from(ALGORITHMS)
sizes = st.integers(0, 2**30)


def seconds(collective, where, rows=None, sharing=1):
    return float(collective_time_s(collective, where, nominal(where.parameters()), rows, sharing)[0])


def collective(algorithm, ranks, size):
    return Collective(algorithm, "world", ranks, size)


def free_of_latency(nodes, gpus, **changes):
    zero = {"link__latency": 0.0, "nic__latency": 0.0}
    return topology(nodes, gpus, **{**zero, **changes})


def test_all_to_all_behind_one_nic_matches_the_closed_form():
    """8x8 GPUs, 256 MiB a rank, one 12.2 GB/s NIC a node: S (N-1)/N G/W = 154.02 ms (networks.md, 2.8)."""
    exchange = all_to_all(range(64), 256 * MIB // 64)
    assert seconds(exchange, free_of_latency(8, 8)) == pytest.approx(154.02e-3, rel=1e-4)


def test_one_node_is_bound_by_its_links():
    """B (P-1)/P over the link's bandwidth, plus one latency."""
    exchange = all_to_all(range(8), 32 * MIB)
    assert seconds(exchange, topology(1, 8)) == pytest.approx(7 * 32 * MIB / 9e9 + 10e-6)


def test_a_host_bridge_is_shared_by_the_node():
    """All in-node traffic of 8 GPUs passes the bridge."""
    exchange = all_to_all(range(8), 32 * MIB)
    where = topology(1, 8, bridge__bandwidth=20e9)
    assert seconds(exchange, where) == pytest.approx(8 * 7 * 32 * MIB / 20e9)


def test_a_fabric_that_carries_a_part_slows_all_nics():
    """fabric.share divides what all NICs may send at once."""
    exchange = all_to_all(range(64), MIB)
    whole, half = free_of_latency(8, 8), free_of_latency(8, 8, fabric__share=0.5)
    assert seconds(exchange, half) == pytest.approx(2 * seconds(exchange, whole))


def test_messages_cost_on_the_nic():
    """One per-message cost: 1 + n_half / m against the bytes alone, n_half = cost x bandwidth (networks.md, 2.10)."""
    chunk, cost = 256 * 1024, 27e-6
    exchange = all_to_all(range(64), chunk)
    ratio = seconds(exchange, free_of_latency(8, 8, nic__message=cost)) / seconds(exchange, free_of_latency(8, 8))
    assert ratio == pytest.approx(1 + cost * 12.2e9 / chunk)


@pytest.mark.parametrize(
    ("nodes", "chunk_mib", "leader_mib"),
    [(2, 16, 1024), (4, 8, 512), (8, 4, 256)],
)
def test_messages_of_flat_and_leader_exchanges(nodes, chunk_mib, leader_mib):
    """papers/hetumoe.md, sections 2 and 4.2, batch size 32 (B = 256 MiB): sizes and counts between nodes."""
    world, gpus, payload = nodes * 8, 8, 256 * MIB
    where = topology(nodes, gpus)
    flat = link_bytes(all_to_all(range(world), payload // world), where)["nic"]
    leaders = link_bytes(all_to_all(range(0, world, gpus), gpus * payload // nodes, group="leaders"), where)["nic"]
    assert payload // world == chunk_mib * MIB
    assert gpus * payload // nodes == leader_mib * MIB
    assert flat.total_messages == nodes * gpus**2 * (nodes - 1)
    assert leaders.total_messages == nodes * (nodes - 1)
    assert flat.total_bytes == leaders.total_bytes == nodes * gpus * payload * (nodes - 1) // nodes


def test_leader_gather_and_scatter_serialise_on_one_link():
    """Each rank sends all it has to the leader: (G-1) B over the leader's link (papers/hetumoe.md, 4.2)."""
    payload = 64 * MIB
    rows = [((0,), (payload, *[0] * 7)), (range(1, 8), (payload, *[0] * 7))]
    gather = all_to_all(range(8), send=rows[0][1])
    assert seconds(gather, topology(1, 8, link__latency=0.0), rows) == pytest.approx(7 * payload / 9e9)
    use = link_bytes(gather, topology(1, 8), rows)["link"]
    assert (use.total_bytes, use.total_messages, use.rank_bytes) == (7 * payload, 7, payload)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 8), (3, 1)])
def test_bytes_sent_equal_closed_forms(algorithm, nodes, gpus):
    """Sum of both tiers: all-to-all R(R-1)b; ring all-gather and reduce-scatter R(R-1)b; ring all-reduce 2(R-1)S;

    broadcast and reduce (R-1)S.
    """
    ranks, size = nodes * gpus, 64 * MIB
    use = link_bytes(collective(algorithm, range(ranks), size), topology(nodes, gpus, nic__latency=0.0))
    total = use["link"].total_bytes + use["nic"].total_bytes
    times = {"all_reduce": 2, "broadcast": 1, "reduce": 1}.get(algorithm, ranks)
    expected = times * (ranks - 1) * size
    assert total == pytest.approx(expected)
    assert (use["nic"].total_bytes > 0) == (nodes > 1)
    assert (use["link"].total_bytes > 0) == (gpus > 1)


def test_a_ring_crosses_each_nic_once():
    """All-gather of b: (R-1) b leave each node and enter the next, whatever the GPUs behind the NIC."""
    time = seconds(collective("all_gather", range(32), MIB), free_of_latency(4, 8, link__bandwidth=100e9))
    assert time == pytest.approx(31 * MIB / 12.2e9)


def test_all_reduce_takes_the_faster_of_ring_and_tree():
    """A tree wins where latency rules, a ring where bytes do."""
    where = topology(8, 8)
    small, large = (loads(collective("all_reduce", range(64), size), where) for size in (4096, 2**28))
    assert seconds(collective("all_reduce", range(64), 4096), where) < 14 * 15e-6 + 112 * 10e-6
    assert [load.nic_steps for load in small] == [14, 6]
    assert large[0].nic_bytes == pytest.approx(2 * 63 / 64 * 2**28)
    assert large[1].nic_bytes == 2 * 2**28


def test_broadcast_and_reduce_pass_everything_on_once():
    """NCCL: a pipelined chain through all ranks: S over the slowest hop, and a latency for each of the R - 1 hops."""
    for algorithm in ("broadcast", "reduce"):
        one = collective(algorithm, range(32), 64 * MIB)
        assert seconds(one, topology(4, 8)) == pytest.approx(64 * MIB / 9e9 + 28 * 10e-6 + 3 * 15e-6)
        assert seconds(one, topology(4, 8, link__bandwidth=90e9)) == pytest.approx(
            64 * MIB / 12.2e9 + 28 * 10e-6 + 3 * 15e-6
        )
        use = link_bytes(one, topology(4, 8))
        assert (use["link"].total_bytes, use["nic"].total_bytes) == (28 * 64 * MIB, 3 * 64 * MIB)
        assert (use["link"].total_messages, use["nic"].total_messages) == (28, 3)
        assert seconds(collective(algorithm, range(2), MIB), free_of_latency(1, 2)) == pytest.approx(MIB / 9e9)


def test_gloo_broadcasts_in_a_binomial_tree():
    """8 ranks on 2 nodes: 1, 2 and 4 messages; the first two steps inside, the last all from one node to the other."""
    where = topology(2, 4, hw=hardware("cpu"))
    (load,) = loads(collective("broadcast", range(8), MIB), where)
    assert (load.use["link"].total_messages, load.use["nic"].total_messages) == (3, 4)
    assert (load.link_bytes, load.nic_bytes) == (2 * MIB, 4 * MIB)
    assert (load.link_steps, load.nic_steps) == (2, 1)
    assert load.use["link"].rank_bytes == 2 * MIB
    assert load.use["nic"].rank_messages == 1
    five = loads(collective("broadcast", range(5), MIB), topology(1, 5, hw=hardware("cpu")))[0]
    assert five.use["link"].total_messages == 4
    assert five.link_steps == 3


def test_gloo_reduces_in_a_ring_and_gathers_the_parts():
    """(R-1) steps of S / R around, then S / R from every other rank to the root."""
    where = topology(2, 2, hw=hardware("cpu"))
    (load,) = loads(collective("reduce", range(4), MIB), where)
    assert load.use["link"].total_bytes + load.use["nic"].total_bytes == (4 * 3 + 3) * MIB / 4
    assert load.link_bytes == (3 + 1) * MIB / 4
    assert load.nic_bytes == (3 + 2) * MIB / 4


def test_groups_that_run_at_once_share_the_nics():
    """Eight groups of one rank a node load one NIC eightfold, and eight NICs not at all."""
    exchange = all_to_all(range(0, 64, 8), MIB)
    one = free_of_latency(8, 8)
    assert seconds(exchange, one, sharing=8) == pytest.approx(8 * seconds(exchange, one))
    rails = free_of_latency(8, 8, nics=8)
    assert seconds(exchange, rails, sharing=8) == pytest.approx(seconds(exchange, rails))


@given(algorithms, shapes, st.integers(0, 4))
def test_one_rank_costs_nothing(algorithm, shape, rank):
    """A group of one neither waits nor sends."""
    where = topology(*shape, collective__fixed=1e-3)
    alone = collective(algorithm, range(rank, rank + 1), 2**20)
    assert seconds(alone, where) == 0
    assert link_bytes(alone, where)["nic"].total_bytes == 0


@given(algorithms, shapes, sizes, sizes, st.integers(1, 8))
def test_more_bytes_are_never_faster(algorithm, shape, size, more, nics):
    """Time never falls with the payload."""
    where = topology(*shape, nics=min(nics, shape[1]), nic__message=1e-6, link__message=1e-7, collective__fixed=1e-6)
    ranks = range(shape[0] * shape[1])
    small, large = (seconds(collective(algorithm, ranks, s), where) for s in (size, size + more))
    assert large >= small * (1 - 1e-12)


@given(algorithms, shapes, sizes)
def test_a_shared_nic_is_never_faster_than_private_ones(algorithm, shape, size):
    """One NIC for all GPUs of a node against one each."""
    ranks = range(shape[0] * shape[1])
    shared = topology(*shape, nics=1, nic__message=1e-6)
    private = topology(*shape, nics=shape[1], nic__message=1e-6)
    one = collective(algorithm, ranks, size)
    assert seconds(one, shared) >= seconds(one, private) * (1 - 1e-12)


@given(shapes.filter(lambda s: s[0] * s[1] > 1), st.integers(0, 2**26), st.integers(1, 4))
def test_a_uniform_matrix_equals_the_even_exchange(shape, chunk, parts):
    """The matrix path gives the closed form's load, however the rows are grouped."""
    where = topology(*shape, nic__message=1e-6, bridge__bandwidth=30e9)
    world = shape[0] * shape[1]
    rows = [(range(i, world, parts), (chunk,) * world) for i in range(min(parts, world))]
    even, uneven = all_to_all(range(world), chunk), all_to_all(range(world), send=(chunk,) * world)
    assert loads(uneven, where, rows) == loads(even, where)
    assert loads(uneven, where) == loads(even, where)


@given(shapes.filter(lambda s: s[0] * s[1] > 1), st.data())
def test_an_uneven_exchange_conserves_bytes(shape, data):
    """What leaves the ranks on both tiers is the off-diagonal sum, and no rank's link carries less than its own."""
    nodes, gpus = shape
    world = nodes * gpus
    sends = [data.draw(st.lists(st.integers(0, 999), min_size=world, max_size=world)) for _ in range(world)]
    rows = [((rank,), tuple(row)) for rank, row in enumerate(sends)]
    use = link_bytes(all_to_all(range(world), send=sends[0]), topology(nodes, gpus), rows)
    matrix = np.array(sends) - np.diag(np.diag(sends))
    same = np.arange(world)[:, None] // gpus == np.arange(world)[None, :] // gpus
    assert use["link"].total_bytes == (matrix * same).sum()
    assert use["nic"].total_bytes == (matrix * ~same).sum()
    assert use["link"].total_messages + use["nic"].total_messages == (matrix > 0).sum()
    load = loads(all_to_all(range(world), send=sends[0]), topology(nodes, gpus), rows)[0]
    assert load.link_bytes == max((matrix * same).sum(axis=1).max(), (matrix * same).sum(axis=0).max())


def test_draws_are_priced_as_each_alone():
    """Vectorised over draws equals one draw at a time, where ring and tree swap too."""
    where = topology(4, 4, nic__latency=uncertain(15e-6, 1e-6, 500e-6), nic__bandwidth=uncertain(12e9, 1e9, 50e9))
    values = draw(where.parameters(), 50, 0)
    for algorithm in ALGORITHMS:
        one = collective(algorithm, range(16), 2**18)
        together = collective_time_s(one, where, values)
        alone = [collective_time_s(one, where, {n: v[i : i + 1] for n, v in values.items()})[0] for i in range(51)]
        assert np.array_equal(together, alone)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 5), st.integers(1, 9), st.integers(1, 20))
def test_node_shares_equal_counting(nodes, gpus, first, step, count):
    """The constant-time path for ranges gives what counting gives."""
    where = topology(nodes, gpus)
    ranks = range(first, first + step * count, step)
    listed = node_shares(list(ranks), where)
    assert sum(s.members * s.nodes for s in listed) == count
    assert node_shares(ranks, where) == listed


def test_cores_that_all_ranks_share_pass_on_every_message_and_byte():
    """4 ranks on 2 cores: 12 messages and chunks, half of all ranks' processor time; on a core of its own, its own."""
    exchange, chunk = all_to_all(range(4), MIB), MIB
    costs = {"host__message": 1e-4, "host__stream": 1e9, "link__latency": 0.0}
    shared = topology(1, 4, host__cores=2, **costs)
    assert seconds(exchange, shared) == pytest.approx(12 * (1e-4 + chunk / 1e9) / 2)
    private = topology(1, 4, **costs)
    assert seconds(exchange, private) == pytest.approx(3 * (1e-4 + chunk / 1e9))
    assert seconds(exchange, topology(1, 4, host__cores=64, **costs)) == pytest.approx(seconds(exchange, private))
    values = nominal(shared.parameters())
    pairs = collective_time_s(all_to_all(range(2), MIB, group="pairs"), shared, values, groups=2)
    assert pairs[0] == pytest.approx(2 * 2 * (1e-4 + chunk / 1e9) / 2)


def test_headers_and_notices_take_their_share_of_the_wire():
    """Payload over its share, and a number of bytes for each message."""
    exchange = all_to_all(range(2), MIB)
    where = free_of_latency(2, 1, nic__payload_share=0.95, nic__message_bytes=450)
    assert seconds(exchange, where) == pytest.approx((MIB / 0.95 + 450) / 12.2e9)


def test_the_library_takes_the_faster_protocol():
    """Two lines: the one with less latency below their crossing, the one with more bandwidth above."""
    where = topology(1, 2, link__eager__latency=2e-6, link__eager__bandwidth=1e9)
    small, large = (all_to_all(range(2), size) for size in (64, 64 * MIB))
    assert seconds(small, where) == pytest.approx(2e-6 + 64 / 1e9)
    assert seconds(large, where) == pytest.approx(10e-6 + 64 * MIB / 9e9)
    times = [seconds(all_to_all(range(2), size), where) for size in range(0, 1 << 16, 1024)]
    assert times == sorted(times)


def test_gloo_sums_in_a_ring():
    """On CPUs there is no tree to choose."""
    where = topology(2, 2, hw=hardware("cpu"))
    assert [load.in_sequence for load in loads(collective("all_reduce", range(4), 64), where)] == [True]


def test_node_shares_of_partly_filled_nodes():
    """Ten ranks on nodes of four: two full nodes and one with two."""
    assert node_shares(range(10), topology(3, 4)) == (NodeShare(2, 1), NodeShare(4, 2))


def test_wrong_rows_are_refused():
    """A row must name every peer, and every rank needs a row."""
    with pytest.raises(ValueError, match="sends to 3 peers in a group of 4"):
        loads(all_to_all(range(4), send=(1, 2, 3)), topology(1, 4))
    with pytest.raises(ValueError, match="no row stands for rank 3"):
        loads(all_to_all(range(4), send=(1, 2, 3, 4)), topology(1, 4), [((0, 1, 2), (1, 2, 3, 4))])
    with pytest.raises(ValueError, match="unknown collective"):
        loads(collective("multicast", range(4), 1), topology(1, 4))
