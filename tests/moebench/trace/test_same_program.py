"""The trace is the program: real CPU ranks under the same recorder execute exactly what the meta trace says.

Equal means equal Ops, in order: names, shapes, dtypes, kinds, streams, regions, phases, FLOPs, bytes, collectives and
waits.
Starting ranks takes longer than all of their steps, so each number of ranks is started once for every test.
"""

from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from moebench.checks.correctness import node_size
from moebench.ranks.run import run_ranks
from moebench.systems.registry import get, reference, systems
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates.registry import gate
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from tests.moebench.trace import rank_programs
from tests.moebench.trace.ragged import RAGGED

COMMON_GATES = (GateSpec("switch"), GateSpec("gshard", 2), GateSpec("topk", 1), GateSpec("topk", 3))
GATES = (
    *COMMON_GATES,
    gate("ktop1"),
    gate("hash", vocabulary=64),
    gate("sam", groups=4),
    gate("dense-to-sparse"),
    gate("dense-to-sparse", dense_steps=1),
    gate("dense-to-sparse", first_step=6000),
    gate("base"),
    gate("expert-choice"),
    gate("sigmoid", 2, groups=4, kept_groups=2, balance=1.0),
    gate("bpr", 2),
    gate("sinkhorn"),
)
DROPLESS = Conventions(capacity_rule="unlimited")
GUMBEL = Conventions(noise="gumbel")
WORLDS = (1, 2, 4)
NAMES = sorted(systems())
# One and two ranks are one node, where a hierarchical exchange is the flat one.
FLAT = [name for name in NAMES if getattr(get(name), "by", "flat") == "flat"]
NAMES_ON = {1: FLAT, 2: FLAT, 4: NAMES}
ON_RANKS = [(name, world) for world in WORLDS for name in NAMES_ON[world]]
EVERY_RULE = ("fastermoe", "fastmoe")  # ragged systems that take every gate
FOLLOWS_ROUTING = (*EVERY_RULE, "megatron", "megatron_allgather")  # whose shapes depend on it where nobody is dropped
PADDED = [name for name in NAMES if name not in FOLLOWS_ROUTING]
BASE = LayerWorkload(GATES[1], 2, 23, 24, 20, 8)
ZIPF = replace(BASE, gate=GATES[0], routing=RoutingSpec("zipf"))
RAGGED_ZIPF = replace(BASE, gate=GateSpec("topk", 2), routing=RoutingSpec("zipf"))
VARIANTS = {
    "gelu": replace(BASE, activation="gelu"),
    "swiglu": replace(BASE, activation="swiglu"),
    "constant input": replace(BASE, input_gradient=False),
    "bf16": replace(BASE, dtype="bf16"),
    "fp64": replace(BASE, dtype="fp64"),
    "no tokens": replace(BASE, batch_size=0),
    "one token": replace(BASE, batch_size=1, sequence=1),
    "capacity above tokens": replace(BASE, capacity_factor=20.0),
    "exact routing": replace(BASE, routing=RoutingSpec("exact")),
}


@pytest.fixture(autouse=True)
def _rounds_of_every_rank(monkeypatch):
    """Rounds are counted on two ranks, which stand for the others: here on each, so that each meets its own."""
    monkeypatch.setattr("moebench.trace.answers.ROUNDS_RANKS", max(WORLDS))


def _cases(world):
    """(system, workload, conventions) by test: what ranks of this number run."""
    cases = defaultdict(list)
    for name in NAMES_ON[world]:
        system = get(name)
        # Four ranks are two nodes, which is new to hierarchical exchanges; the rule of a gate is local.
        for spec in GATES if world < 4 or name not in FLAT else COMMON_GATES:
            workload, shipped = replace(BASE, gate=spec), system.as_shipped(spec)
            if system.supports(workload, COMMON) is None:
                cases["common", name].append((name, workload, COMMON))
            # Shapes that follow a random routing are another rank's only by chance.
            is_traced = not (shipped.is_random and name in FOLLOWS_ROUTING)
            if world == 2 and is_traced and system.supports(workload, shipped) is None:
                cases["as shipped", name].append((name, workload, shipped))
        for variant, workload in VARIANTS.items() if world == 2 else ():
            cases[variant, name].append((name, workload, COMMON))
        if system.supports(ZIPF, DROPLESS) is None:
            cases["dropless", name].append((name, ZIPF, DROPLESS))
        if world == 2:
            workloads = (replace(ZIPF, gate=spec) for spec in GATES[len(COMMON_GATES) :])
            others = [one for one in workloads if system.supports(one, DROPLESS) is None]
            cases["dropless gates", name] += [(name, one, DROPLESS) for one in others]
            noisy = [(name, replace(BASE, gate=spec), GUMBEL) for spec in GATES if spec.name == "dense-to-sparse"]
            cases["gumbel", name] += [case for case in noisy if system.supports(case[1], GUMBEL) is None]
    cases["ragged", RAGGED.name].append((RAGGED.name, RAGGED_ZIPF, DROPLESS))
    return cases


@cache
def _real(world):
    """Every case of `_cases` with the programs that the ranks executed."""
    cases = _cases(world)
    flat = [case for group in cases.values() for case in group]
    target, node = f"{rank_programs.__name__}:record_each", node_size(world)
    results = run_ranks(target, world, (flat,), timeout_s=240, ranks_per_node=node)
    by_case = dict(zip(flat, zip(*results, strict=True), strict=True))
    return {key: [(case, by_case[case]) for case in group] for key, group in cases.items()}


def _at(op, traced, rank, node):
    """An op of a traced rank as another one runs it: among the ranks of its own node, or of its own place on all."""
    away = {"node": rank // node * node - traced // node * node, "rail": rank % node - traced % node}
    shift = away.get(op.collective.group, 0) if op.collective else 0
    if not shift:
        return op
    own = op.collective.ranks
    ranks = range(own[0] + shift, own[-1] + shift + 1, own.step)
    return replace(op, collective=replace(op.collective, ranks=ranks))


def _assert_same(key, world):
    """Every rank's real program against the traced one that stands for it, op by op; the latter, case by case."""
    traced = []
    for (name, workload, conventions), real in _real(world)[key]:
        system = RAGGED if name == RAGGED.name else get(name)
        programs = trace_layer(system, workload, world, conventions, node_size(world))
        assert sorted(rank for program in programs for rank in program.stands_for) == list(range(world))
        for program in programs:
            for rank in program.stands_for:
                for ours, theirs in zip(program.ops, real[rank].ops):
                    assert _at(ours, program.rank, rank, node_size(world)) == theirs
                assert len(program.ops) == len(real[rank].ops)
                assert program.persistent_bytes == real[rank].persistent_bytes
                assert program.peak_bytes == real[rank].peak_bytes
        traced.append(programs)
    return traced


@pytest.mark.parametrize(("name", "world"), ON_RANKS)
def test_real_ranks_execute_the_traced_program(name, world):
    """Every system and gate under common Conventions, with drops."""
    assert len(_assert_same(("common", name), world)) >= 3


@pytest.mark.parametrize("name", FLAT)
def test_real_ranks_execute_the_traced_program_as_shipped(name):
    """The same under each system's own Conventions, noise and random drops among them."""
    assert len(_assert_same(("as shipped", name), 2)) >= 3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FLAT)
def test_variants_of_the_layer_are_traced_as_they_run(name, variant):
    """Activations, dtypes, a constant input, no tokens, one token, more capacity than tokens."""
    assert _assert_same((variant, name), 2)


@pytest.mark.parametrize(
    ("name", "world"),
    [(name, world) for name, world in ON_RANKS if name in PADDED and get(name).supports(ZIPF, DROPLESS) is None],
)
def test_dropless_capacity_is_read_as_real_ranks_read_it(name, world):
    """Under Zipf routing the capacity is the largest count anywhere, a host read: one program for all ranks."""
    ((program,),) = _assert_same(("dropless", name), world)
    assert [op.name for op in program.ops if op.kind == "host-read"] == ["host::max_expert_count"]
    assert program.stands_for == range(world)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", FOLLOWS_ROUTING)
def test_ragged_rows_are_traced_as_they_run(name, world):
    """Under Zipf routing without capacity: a program for every rank; with every rule that the system has."""
    (programs,) = _assert_same(("dropless", name), world)
    assert len(programs) == world
    if world == 2:
        least = len(GATES) - len(COMMON_GATES) if name in EVERY_RULE else 1
        assert len(_assert_same(("dropless gates", name), 2)) >= least


@pytest.mark.parametrize("kind", ["dropless gates", "gumbel"])
def test_gates_whose_counts_depend_on_the_data_are_traced_as_they_run(kind):
    """The reference with every rule that is not one of the first three, dropless, and with noise."""
    key = kind, reference().name
    for (_, workload, _), programs in zip(_cases(2)[key], _assert_same(key, 2), strict=True):
        # Ranks may take different numbers of rounds, and are then different programs.
        assert len(programs) == 1 or workload.gate.name in ("base", "sinkhorn")


@pytest.mark.parametrize("world", WORLDS)
def test_uneven_exchange_moves_what_real_ranks_move(world):
    """A ragged layer: each rank has a program of its own, with the bytes to and from each peer."""
    (programs,) = _assert_same(("ragged", RAGGED.name), world)
    assert len(programs) == world
    exchanges = [[op.collective for op in p.ops if op.collective and op.collective.send_bytes] for p in programs]
    assert all(len(of_rank) == (4 if world > 1 else 0) for of_rank in exchanges)
    for nth in zip(*exchanges):
        for rank, sender in enumerate(nth):
            assert sender.send_bytes == tuple(receiver.receive_bytes[rank] for receiver in nth)
        assert len({size for sender in nth for size in sender.send_bytes}) > 1


@pytest.mark.parametrize(("name", "world"), ON_RANKS)
def test_every_start_is_waited_for_once_and_every_operator_has_a_region(name, world):
    """Starts stand on the communication stream, waits on compute; each wait names its own start."""
    for _, real in _real(world)["common", name]:
        ops = real[0].ops
        starts = [op.index for op in ops if op.kind == "collective"]
        waits = [op.waits_on for op in ops if op.kind == "wait"]
        assert sorted(waits) == [(start,) for start in starts]
        assert bool(starts) == (world > 1)
        assert {op.stream for op in ops if op.kind == "collective"} <= {"communication"}
        assert {op.stream for op in ops if op.kind != "collective"} == {"compute"}
        assert all(op.region for op in ops)
        assert [op.index for op in ops] == list(range(len(ops)))
