"""How fast a replay is: 1,000 draws of a 100-operator program, and a symmetric step on 8 and on 1,440 ranks.

Run with `pytest benchmarks/bench_replay.py --benchmark-enable`; aims: at most 30 ms, and no slower on 1,440 ranks.
"""

import pytest

from moebench.kernels.cost import Product
from moebench.program import COMMUNICATION, COMPUTE, Collective, Op, Program
from moebench.sim.replay import replay
from moebench.sim.uncertainty import draw
from moebench.workloads.load import load_topology

SAMPLES = 1000


def program(ranks, rounds=20):
    """Five operators a round: a product, an element-wise one, a view, an exchange and its wait."""
    ops = []
    product, shapes = Product(2048, 2048, 2048), ((1,),)
    for _ in range(rounds):
        at = len(ops)
        exchange = Collective("all_to_all", "world", range(ranks), 2**20)
        parts = (
            ("aten::mm", "product", COMPUTE, product.flops, 3 * 2**24, (product,), None, ()),
            ("aten::mul", "pointwise", COMPUTE, 0, 10**8, (), None, ()),
            ("aten::view", "view", COMPUTE, 0, 0, (), None, ()),
            ("moebench::all_to_all_start", "collective", COMMUNICATION, 0, 0, (), exchange, ()),
            ("moebench::wait", "wait", COMPUTE, 0, 0, (), None, (at + 3,)),
        )
        for i, (name, kind, stream, flops, moved, products, collective, waits_on) in enumerate(parts):
            ops.append(
                Op(
                    at + i, name, kind, stream, "experts", "forward", shapes, "fp32",
                    flops, moved, 0, products, collective, waits_on,
                )
            )  # fmt: skip
    return Program(tuple(ops), 0, ranks, range(ranks), 0, 0)


@pytest.mark.parametrize("size", ["1x8", "16x8"])
def test_1000_draws_of_100_operators(benchmark, size):
    """Fifteen kinds of uncertainty, every draw at once."""
    topology = load_topology(f"{size}-titan-rtx")
    values = draw(topology.parameters(), SAMPLES, 0)
    step = program(topology.ranks)
    assert len(step.ops) == 100
    found = benchmark(replay, [step], topology, values)
    assert found.step_time_s.shape == (SAMPLES + 1,)


@pytest.mark.parametrize("ranks", [8, 1440])
def test_a_symmetric_step_by_ranks(benchmark, ranks):
    """The same program, nominal only, on one node and on 180."""
    topology = load_topology(f"{ranks // 8}x8-a100-80")
    values = draw(topology.parameters(), 0, 0)
    benchmark(replay, [program(ranks)], topology, values)


def test_256_draws_of_64_distinct_ranks(benchmark):
    """Uneven routing: 64 programs of 60 operators meet in 12 exchanges."""
    topology = load_topology("8x8-a100-80")
    values = draw(topology.parameters(), 256, 0)
    programs = [_uneven(program(64, 12), rank) for rank in range(64)]
    benchmark.pedantic(replay, (programs, topology, values), rounds=3)


def _uneven(whole, rank):
    from dataclasses import replace

    sends = tuple((rank * 7 + peer * 3) % 11 * 2**16 for peer in range(64))
    ops = tuple(
        replace(op, collective=replace(op.collective, bytes_per_peer=None, send_bytes=sends)) if op.collective else op
        for op in whole.ops
    )
    return replace(whole, ops=ops, rank=rank, stands_for=range(rank, rank + 1))
