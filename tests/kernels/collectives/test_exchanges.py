"""Hierarchical exchanges: on real ranks flat's rows bit for bit, other messages, the same operators as when traced."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives import start_wait as sw
from moebench.kernels.collectives.blocks import reorder_blocks, reorder_blocks_reference
from moebench.kernels.collectives.exchanges import EXCHANGES, exchange, plan_exchange
from moebench.kernels.collectives.group import Group, described_group
from moebench.kernels.collectives.outstanding import WaitError, check_finished
from moebench.kernels.region import region
from moebench.ranks.run import run_ranks
from moebench.trace.recorder import Recorder
from tests.kernels.collectives import exchanges_on_ranks as on_ranks
from tests.kernels.collectives.on_ranks import splits_matrix

F = "tests.kernels.collectives.exchanges_on_ranks:"
META = torch.device("meta")
ROW_BYTES = 256  # of on_ranks.messages


@pytest.fixture(autouse=True)
def _nothing_left():
    """No test leaves a collective behind."""
    yield
    check_finished()


@pytest.mark.parametrize(("world", "sizes"), [(4, (4, 2, 1)), (8, (4, 2))])
def test_even_exchanges_are_the_flat_one(world, sizes):
    """1x4, 2x2, 4x1, 2x4 and 4x2: outputs and gradients bit for bit, and back again."""
    run_ranks(F + "even_is_flat", world, (sizes,))


@pytest.mark.parametrize(("world", "sizes"), [(4, (4, 2, 1)), (8, (4, 2))])
def test_uneven_exchanges_are_the_flat_one(world, sizes):
    """Tables of splits with zeros, a silent rank (1), an empty rank (2); counts exchanged or given; and back again."""
    run_ranks(F + "uneven_is_flat", world, (sizes, (0, 1, 2)))


def test_rows_gather_on_the_first_rank_and_scatter_from_it():
    """Uneven rows, ranks without any, types that gloo refuses."""
    run_ranks(F + "gathered_and_scattered", 4)


def test_exchanges_under_way_beside_each_other():
    """Advanced in turns, waited for in any order that all ranks agree on."""
    run_ranks(F + "interleaved", 4, (2,))


def test_ranks_know_their_node_from_the_launcher():
    """LOCAL_WORLD_SIZE, as torchrun sets it, gives node, rail and leaders."""
    assert run_ranks(F + "layout", 4, ranks_per_node=2) == [
        ([0, 1], [0, 2], [0, 2], (2, 2)),
        ([0, 1], [1, 3], None, (2, 2)),
        ([2, 3], [0, 2], [0, 2], (2, 2)),
        ([2, 3], [1, 3], None, (2, 2)),
    ]


@pytest.mark.parametrize("size", [1440, 8])
def test_nodes_of_a_large_world(size, fake_world):
    """The fake group makes only what this rank is in; ranges stay ranges; both programs run, forward and backward."""
    for rank in (0, size - 3):
        with fake_world(size, rank) as world:
            group = replace(world, ranks_per_node=8)
            nodes = group.nodes
            assert nodes.node.ranks == range(rank // 8 * 8, rank // 8 * 8 + 8)
            assert nodes.rail.ranks == range(rank % 8, size, 8)
            assert (nodes.leaders is None) == bool(rank)
            for name in EXCHANGES:
                x = torch.ones(size, 2, requires_grad=True)
                y = exchange(x, group, name)
                y.backward(torch.ones_like(y))
                assert y.shape == x.grad.shape == x.shape
                assert torch.isfinite(y).all()


def sends(ops):
    """(peer, bytes) of every collective in recorded operators, in order, this rank's own part excluded."""
    found = []
    for op in ops:
        if op.collective is not None:
            c = op.collective
            sizes = c.send_bytes or [c.bytes_per_peer] * len(c.ranks)
            found += [(peer, size) for peer, size in zip(c.ranks, sizes) if size]
    return found


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_real_ranks_send_what_a_trace_says(seed):
    """Peer by peer, for even and uneven splits, silent and empty ranks: empty splits send nothing."""
    rows = None if seed is None else splits_matrix(4, seed)
    for name in EXCHANGES:
        real = run_ranks(F + "all_messages", 4, (name, 2, rows))
        for rank in range(4):
            group = described_group(4, rank, ranks_per_node=2)
            plan = plan_exchange(name, group, counts_RR=rows)
            with Recorder() as recorder, region("exchange"):
                plan.start(torch.empty(4 if rows is None else sum(rows[rank]), 64, device=META)).wait()
            traced = [(peer, size) for peer, size in sends(recorder.ops) if peer != rank]
            assert sorted(real[rank]) == sorted(traced), (name, rank)


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 4), (8, 2)])
def test_messages_of_real_ranks_are_those_of_the_formulas(world, per_node):
    """papers/hetumoe.md 4.2, baselines.md 3.3: B bytes a rank, here one row to each."""
    count, payload = world // per_node, world * ROW_BYTES
    for name in EXCHANGES:
        real = run_ranks(F + "all_messages", world, (name, per_node))
        inside = [[s for p, s in sent if p // per_node == rank // per_node] for rank, sent in enumerate(real)]
        outside = [[s for p, s in sent if p // per_node != rank // per_node] for rank, sent in enumerate(real)]
        leaders = range(0, world, per_node)
        for rank in range(world):
            expected = {
                "flat": ([payload // world] * (per_node - 1), [payload // world] * (world - per_node)),
                "2d": ([payload // per_node] * (per_node - 1), [payload // count] * (count - 1)),
                "leader": (
                    ([payload] * (per_node - 1), [per_node * payload // count] * (count - 1))
                    if rank in leaders
                    else ([payload], [])
                ),
            }[name]
            assert (inside[rank], outside[rank]) == expected, (name, rank)
        assert sum(map(sum, outside)) == world * payload * (count - 1) // count


@pytest.mark.parametrize("name", list(EXCHANGES))
def test_operators_and_reads_are_the_same_on_cpu_and_meta(name, monkeypatch):
    """Real ranks and described ones; only uneven hierarchical plans read on the host, a leader's on the leader."""
    real = run_ranks(F + "operators_and_reads", 4, (name, 2, 3))
    for rank in range(4):
        monkeypatch.setattr("moebench.kernels.host._answer", [answer_of(name, rank)])
        group = described_group(4, rank, ranks_per_node=2)
        assert on_ranks.operators_and_reads(group, name, 2, 3, "meta") == real[rank]
    reads = [[quantity for quantity, _ in found] for _, found in real]
    assert reads == {
        "flat": [[], [], [], []],
        "2d": [["relayed_rows"]] * 4,
        "leader": [["node_rows"], [], ["node_rows"], []],
    }[name]


def answer_of(name, rank):
    """What the reads of `rank` return for table 3 on two nodes of two."""
    rows = splits_matrix(4, 3)
    node = [rank // 2 * 2, rank // 2 * 2 + 1]
    relayed = [rows[r][peer] for r in node for peer in range(rank % 2, 4, 2)]
    of_node = [n for r in node for n in [*rows[r], *(row[r] for row in rows)]]
    return lambda quantity, _: {"relayed_rows": relayed, "node_rows": of_node}[quantity]


@pytest.mark.parametrize(
    ("shape", "axes"), [((2, 3), (1, 0)), ((2, 3, 2), (1, 2, 0)), ((3, 2, 2), (1, 0, 2)), ((1, 4), (1, 0))]
)
@pytest.mark.parametrize("trailing", [(), (3,), (2, 0)])
def test_blocks_move_as_in_the_reference(shape, axes, trailing):
    """Even and uneven blocks, empty ones, strided rows and gradients: values and gradients bit for bit."""
    count = torch.Size(shape).numel()
    tables = [None, [n % 3 for n in range(count)], [0] * count, [0] * (count - 1) + [2]]
    for rows in tables:
        total = 2 * count if rows is None else sum(rows)
        base = torch.randn(*trailing, total).permute(-1, *range(len(trailing)))
        weight = torch.randn(*trailing, total).permute(-1, *range(len(trailing)))
        found = []
        for function in (reorder_blocks, reorder_blocks_reference):
            x = base.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            y = function(x, shape, axes, rows)
            y.backward(weight)
            found.append((y.detach(), x.grad))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])


def test_blocks_in_place_already_are_not_copied():
    """The very memory comes back where the order is the same, evenly and unevenly."""
    x = torch.randn(6, 2)
    assert reorder_blocks(x, (1, 3), (1, 0)).data_ptr() == x.data_ptr()
    assert reorder_blocks(x, (2, 3), (1, 0), [0, 0, 6, 0, 0, 0]) is x


def test_an_exchange_is_waited_for_once():
    """As a single collective is."""
    flight = plan_exchange("2d", described_group(4, ranks_per_node=2)).start(torch.empty(4, 2, device=META))
    flight.wait()
    with pytest.raises(WaitError, match="before"):
        flight.wait()


def test_one_rank_exchanges_nothing():
    """Under every name, on nodes of unknown size."""
    x = torch.ones(4, 2)
    for name in EXCHANGES:
        assert exchange(x, described_group(1), name) is x
        assert exchange(x, described_group(1), name, [4], [4]) is x


def test_nodes_of_any_group():
    """Part of the nodes, some places of each: nodes count within the group."""
    some = Group("experts", (0, 2, 4, 6), 4, ranks_per_node=4).nodes
    assert (tuple(some.node.ranks), tuple(some.rail.ranks), some.leaders.ranks) == ((4, 6), (0, 4), (0, 4))
    assert Group("experts", range(8, 16), 9, ranks_per_node=4).nodes.rail.ranks == range(9, 16, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, g: plan_exchange("3d", g), "unknown exchange '3d'; choose one of flat, leader, 2d"),
        (lambda x, g: exchange(x[:7], g, "leader"), "7 rows are not a multiple of 4 ranks"),
        (lambda x, g: exchange(x.sum(), g, "2d"), "at least one dimension"),
        (lambda x, g: exchange(x, g, "2d", [8, 0, 0, 0]), "both"),
        (lambda x, g: exchange(x, g, "leader", [8, 0, 0], [8, 1, 1, 1]), "input_splits has 3 entries"),
        (lambda x, g: exchange(x, g, "leader", [9, -1, 0, 0], [9, 1, 1, 1]), "negative"),
        (lambda x, g: exchange(x, g, "2d", [8, 0, 0, 0], [7, 0, 0, 0]), "sends 8 rows to itself and expects 7"),
        (lambda x, g: plan_exchange("flat", g, [1] * 4, [1] * 4).start(x), "8 rows, and the splits send 4"),
        (lambda x, g: plan_exchange("2d", g, counts_RR=[[1] * 4] * 3), "4 rows of 4 entries"),
        (lambda x, g: plan_exchange("2d", g, [1] * 4, [1] * 4, counts_RR=[[1] * 4] * 4), "not both"),
        (lambda x, g: exchange(x, described_group(4), "2d"), "which ranks share a node.*LOCAL_WORLD_SIZE"),
        (lambda x, g: exchange(x, described_group(4, ranks_per_node=3), "leader"), "equally many"),
        (lambda x, g: Group("a", (0, 2, 1, 3), 0, ranks_per_node=2).nodes, "one after another"),
        (lambda x, g: sw.gather(x, g, [8, 1, 1]), "rows has 3 entries"),
        (lambda x, g: sw.gather(x, g, [7, 1, 1, 1]), "says 7 for this rank, which has 8"),
        (lambda x, g: sw.scatter(x, g, 2, [2, 2, 2, -2]), "negative"),
        (lambda x, g: sw.scatter(x, g, 1), "the first rank holds 8 rows, not 4"),
        (lambda x, g: sw.scatter(x, described_group(4, 1), 2), "another rank than the first holds 8 rows, not 0"),
    ],
)
def test_calls_without_meaning_are_refused(call, words):
    """Before anything is sent."""
    with pytest.raises(ValueError, match=words):
        call(torch.ones(8, 2, device=META), described_group(4, ranks_per_node=2))
