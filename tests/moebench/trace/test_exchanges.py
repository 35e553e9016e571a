"""Exchanges as Programs: one for leaders and one for the others, priced by what their phases send."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import moebench.trace.layer as layer_module
from moebench.kernels.collectives.exchanges import EXCHANGES
from moebench.ranks.run import run_ranks
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.trace.alone import trace_exchange
from moebench.trace.answers import RoutingAnswers
from moebench.trace.layer import trace_layer
from moebench.trace.serialise import programs_from_json, programs_to_json
from moebench.workloads.conventions import Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from tests.moebench.sim.sim_machines import hardware, topology
from tests.moebench.trace import rank_programs
from tests.moebench.trace.ragged import Ragged

KIB, MIB = 2**10, 2**20
SIZES = [(2, 8), (4, 8), (8, 8), (16, 8), (1, 4), (2, 2), (2, 4), (4, 2), (4, 1)]
DROPLESS = Conventions(capacity_rule="unlimited")
WORKLOAD = LayerWorkload(GateSpec("topk", 2), 1, 12, 16, 8, 16, routing=RoutingSpec("zipf"))


def replayed(programs, where):
    return replay(programs, where, nominal(where.parameters()))


def expected_traffic(name, count, size, payload):
    """(bytes, messages) of all ranks inside nodes and between them, papers/hetumoe.md 4.2 and baselines.md 3.3."""
    ranks = count * size
    crossing = count * size * payload * (count - 1) // count  # the same for all
    return {
        "flat": (((size - 1) * payload, ranks * (size - 1)), (crossing, count * (count - 1) * size**2)),
        "leader": ((2 * count * (size - 1) * payload, 2 * count * (size - 1)), (crossing, count * (count - 1))),
        "2d": ((ranks * (size - 1) * payload // size, ranks * (size - 1)), (crossing, ranks * (count - 1))),
    }[name]


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("payload", [128 * KIB, 256 * MIB])
@pytest.mark.parametrize(("count", "size"), SIZES)
def test_bytes_and_messages_are_those_of_the_formulas(count, size, payload, with_gradient):
    """In the node and between nodes, of all ranks together; the gradient sends the same again."""
    where, times = topology(count, size), 1 + with_gradient
    for name in EXCHANGES:
        programs = trace_exchange(name, payload, count * size, size, with_gradient)
        use = replayed(programs, where).link_use
        inside, outside = expected_traffic(name, count, size, payload)
        assert (use["link"].total_bytes, use["link"].total_messages) == (times * inside[0], times * inside[1]), name
        assert (use["nic"].total_bytes, use["nic"].total_messages) == (times * outside[0], times * outside[1]), name


@pytest.mark.parametrize(("count", "size"), [(4, 8), (16, 8)])
def test_messages_of_a_rank_are_those_of_the_formulas(count, size):
    """Sizes and peers of each phase: flat B / R; leader B, G B / N, B; 2d B / G, B / N; with the true ranks."""
    payload, ranks = 256 * MIB, count * size
    node, leaders = range(size), range(0, ranks, size)
    phases = {
        name: [
            [(op.collective.ranks, op.collective.bytes_per_peer or max(op.collective.send_bytes, default=0))
             for op in program.ops if op.collective is not None]
            for program in trace_exchange(name, payload, ranks, size)
        ]
        for name in EXCHANGES
    }  # fmt: skip
    assert phases["flat"] == [[(range(ranks), payload // ranks)]]
    assert phases["2d"] == [[(node, payload // size), (leaders, payload // count)]]
    leading = [(node, payload), (leaders, size * payload // count), (node, payload)]
    assert phases["leader"] == [leading, [(node, payload), (node, 0)]]


@pytest.mark.parametrize(("count", "size"), [(4, 8), (2, 2)])
def test_only_leaders_run_another_program(count, size):
    """Even exchanges: flat and 2d are one program, leader two, of whom leaders are a range; also at 1,440 ranks."""
    ranks = count * size
    for name in ("flat", "2d"):
        (program,) = trace_exchange(name, 4 * ranks, ranks, size)
        assert program.stands_for == range(ranks)
    leader, other = trace_exchange("leader", 4 * ranks, ranks, size)
    assert leader.stands_for == range(0, ranks, size)
    assert list(other.stands_for) == [rank for rank in range(ranks) if rank % size]
    assert len(trace_exchange("leader", 4 * 1440, 1440, 8)[0].stands_for) == 180
    assert programs_from_json(programs_to_json([leader, other])) == (leader, other)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_a_leader_holds_two_buffers_of_its_node(with_gradient):
    """papers/hetumoe.md 4.2: beside what every rank holds, two of G B, and never a third."""
    payload, size = MIB, 8
    leader, other = trace_exchange("leader", payload, 4 * size, size, with_gradient)
    (flat,) = trace_exchange("flat", payload, 4 * size, size, with_gradient)
    assert other.peak_bytes == flat.peak_bytes == (3 if with_gradient else 2) * payload
    assert leader.peak_bytes == (2 if with_gradient else 1) * payload + 2 * size * payload


def test_time_of_a_leader_exchange_is_the_closed_form():
    """papers/hetumoe.md 4.2: gather and scatter through one link, four passes over G B, G B (N - 1) / N on the NIC."""
    count, size, payload = 4, 8, 64 * MIB
    issue = dict.fromkeys(("host__issue__view", "host__issue__operator", "host__issue__collective"), 0.0)
    gpu = hardware(gpu__kernel__fixed=0.0, **issue)
    where = topology(count, size, hw=gpu, link__latency=0.0, nic__latency=0.0)
    found = replayed(trace_exchange("leader", payload, count * size, size), where).step_time_s[0]
    link, memory, nic = 9e9, 600e9, 12.2e9
    passes = 4 * size * payload / memory
    assert found == pytest.approx(
        2 * (size - 1) * payload / link + passes + size * payload * (count - 1) / count / nic, rel=1e-6
    )


@pytest.mark.parametrize("name", list(EXCHANGES))
def test_uneven_layers_send_what_was_routed(name):
    """Rows between nodes do not depend on the exchange; the leader reads the counts of its node, 2d its rail's."""
    programs = trace_layer(Ragged(name), WORKLOAD, 4, DROPLESS, ranks_per_node=2)
    assert [list(program.stands_for) for program in programs] == [[0], [1], [2], [3]]
    reads = [[op.name for op in program.ops if op.kind == "host-read"] for program in programs]
    own = ["host::expert_counts", "host::received_counts"]
    more = {"flat": [[]] * 4, "2d": [["host::relayed_rows"]] * 4, "leader": [["host::node_rows"], []] * 2}[name]
    assert reads == [own + extra for extra in more]
    answers = RoutingAnswers(WORKLOAD, 4, DROPLESS)
    rows = np.array([answers.answer(rank, "expert_counts") for rank in range(4)]).reshape(4, 4, 4).sum(axis=2)
    # Dispatch, combine and their gradients; both ways in all, so each crosses with the rows of both directions.
    exchanged = 2 * (rows[:2, 2:].sum() + rows[2:, :2].sum()) * WORKLOAD.d_model * 4 * 2
    flat_counts = 4 * 2 * 4 * 8  # 4 int64 to each of 2 ranks of the other node
    reduced = [op.collective.bytes_per_peer for op in programs[0].ops if op.name == "moebench::all_reduce_start_"]
    summed = 2 * 2 * sum(reduced) * 3 // 4  # a ring of 4 crosses 2 nodes twice, 2 x 3 steps of a quarter
    use = replayed(programs, topology(2, 2, hw=hardware("cpu"))).link_use["nic"]
    assert use.total_bytes == exchanged + flat_counts + summed


def test_answers_about_a_node_are_those_of_its_ranks():
    """[G, N] along the rail of the rank that asks, and [G, 2, R] of all that its node sends and receives."""
    answers = RoutingAnswers(WORKLOAD, 8, DROPLESS, ranks_per_node=4)
    rows = np.array([answers.answer(rank, "expert_counts") for rank in range(8)]).reshape(8, 8, 2).sum(axis=2)
    assert answers.answer(6, "relayed_rows") == tuple(rows[4:8, [2, 6]].ravel())
    assert answers.answer(5, "node_rows") == tuple(np.stack([rows[4:8], rows.T[4:8]], axis=1).ravel())


def test_grouped_ranks_keep_leaders_apart(monkeypatch):
    """Above the limit of distinct programs, no group holds leaders and others."""
    monkeypatch.setattr(layer_module, "MOST_DISTINCT_PROGRAMS", 5)
    workload = replace(WORKLOAD, experts=32)
    programs = trace_layer(Ragged("leader"), workload, 16, DROPLESS, ranks_per_node=4)
    assert sorted(rank for program in programs for rank in program.stands_for) == list(range(16))
    assert len(programs) <= 5
    for program in programs:
        assert len({rank % 4 == 0 for rank in program.stands_for}) == 1
        assert program.rank in program.stands_for
    assert replayed(programs, topology(4, 4)).step_time_s[0] > 0


@cache
def _real():
    """By rank: programs of a ragged layer under each exchange, and results of it where a rank is empty."""
    cases = [(Ragged(name), WORKLOAD, DROPLESS) for name in EXCHANGES]
    target, tokens = f"{rank_programs.__name__}:record_and_compute_each", (12, 0, 5, 30)
    return run_ranks(target, 4, (cases, list(EXCHANGES), tokens), ranks_per_node=2)


def test_layers_compute_the_same_by_every_exchange():
    """Outputs and gradients on four ranks, bit for bit; an empty rank among them."""
    for _, (flat, *others) in _real():
        for found in others:
            for name, tensor in found.items():
                assert torch.equal(tensor, flat[name]), name


@pytest.mark.parametrize(("place", "name"), list(enumerate(EXCHANGES)))
def test_real_ranks_execute_the_traced_program(place, name):
    """Op by op, with every collective's bytes, on the ranks that a program stands for; peak memory too."""
    for program in trace_layer(Ragged(name), WORKLOAD, 4, DROPLESS, ranks_per_node=2):
        for rank in program.stands_for:
            real = _real()[rank][0][place]
            assert program.ops == real.ops
            assert program.peak_bytes == real.peak_bytes
