"""How Tutel chooses degree, exchange and parallelism; what parallelism moves; names of variants."""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.interface import problem
from moebench.systems.registry import get
from moebench.systems.tutel import choice
from moebench.systems.tutel.layer import Slots
from moebench.trace.errors import Unsupported
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.load import load_topology

SWITCH, GSHARD = GateSpec("switch"), GateSpec("gshard", 2)


def layer(batch, ranks, spec=SWITCH, **changes):
    return replace(LayerWorkload(spec, batch, 1024, 2048, 2048, max(16, ranks)), **changes)


@pytest.mark.parametrize(
    ("batch", "nodes", "per_node", "degree", "exchange"),
    [
        (8, 1, 8, 8, "flat"),  # 64 MiB: 8 chunks of 8 MiB, messages of 1 MiB
        (8, 8, 8, 4, "flat"),  # messages of 1 MiB, split in four
        (1, 1, 8, 2, "flat"),  # 8 MiB: no chunk below 4
        (1, 8, 8, 2, "2d"),  # messages of 128 KiB: along a rail they are 1 MiB
        (1, 16, 1, 2, "flat"),  # a rank a node: there is nothing to put together
        (64, 1, 1, 1, "flat"),  # alone
        (0, 2, 8, 1, "2d"),  # no tokens
    ],
)
def test_the_rule(batch, nodes, per_node, degree, exchange):
    """By the bytes of chunks and messages."""
    ranks = nodes * per_node
    plan = get("tutel").plan(layer(batch, ranks), described_group(ranks, ranks_per_node=per_node))
    assert (plan.degree, plan.exchange, plan.r) == (degree, exchange, 1)


def test_a_name_beats_the_rule():
    """Each option by itself; the rule sees the exchange that the name fixes."""
    work, group = layer(1, 64), described_group(64, ranks_per_node=8)
    assert get("tutel+degree=3").plan(work, group).exchange == "2d"
    assert get("tutel+exchange=flat").plan(work, group).degree == 1
    assert get("tutel+r=0").plan(work, group).r == 0


@pytest.mark.parametrize(("size", "batch"), [("1x8", 8), ("4x8", 8), ("8x8", 16)])
def test_the_rule_is_near_the_best(size, batch):
    """Within 2 % of the fastest degree and exchange, as simulated, on the node types of HetuMoE's suite."""
    (nodes, per_node), times = map(int, size.split("x")), {}
    ranks, work = nodes * per_node, layer(batch, nodes * per_node)
    variants = [f"tutel+degree={d}+exchange={e}" for d in choice.DEGREES for e in ("flat", "2d")[: 1 + (nodes > 1)]]
    for name in ("tutel", *variants):
        programs = trace_layer(get(name), work, ranks, COMMON, per_node)
        for gpu in ("titan-rtx", "rtx-2080-ti", "v100-pcie", "v100-sxm2"):
            where = load_topology(f"{size}-{gpu}")
            seconds = replay(programs, where, nominal(where.parameters())).step_time_s[0]
            times.setdefault(gpu, {})[name] = float(seconds)
    for of_machine in times.values():
        assert of_machine["tutel"] <= 1.02 * min(of_machine.values())


def traced(name, work, ranks):
    (program,) = trace_layer(get(name), work, ranks, COMMON)
    return [op.collective for op in program.ops if op.collective]


@pytest.mark.parametrize("r", [0, 1, 2, 4])
def test_what_parallelism_moves(r):
    """2 experts on 8 ranks: tokens to r parts of each expert, weights gathered from 4 / r ranks, or from all."""
    work = LayerWorkload(GSHARD, 2, 32, 16, 24, 2)
    found = traced(f"tutel+degree=1+exchange=flat+r={r}", work, 8)
    capacity = 2 * 64 // 2
    tokens = [one.bytes_per_peer for one in found if one.algorithm == "all_to_all"]
    assert tokens == ([r * capacity * 16 * 4 // 4] * 4 if r else [])
    gathered = [one for one in found if one.algorithm in ("all_gather", "reduce_scatter")]
    ranks = 8 if r == 0 else 4 // r
    held = 16 * 24 // 4 * 4
    expected = [(name, ranks, held) for name in ("all_gather", "all_gather", "reduce_scatter", "reduce_scatter")]
    seen = [(one.algorithm, len(one.ranks), one.bytes_per_peer) for one in gathered]
    assert sorted(seen) == (sorted(expected) if ranks > 1 else [])
    payload = choice.payload_bytes(work)
    assert payload == 2 * capacity * 16 * 4
    assert choice.moved_bytes(work, 8, r) == 4 * r * payload * 7 / 8 + 2 * 2 * (ranks - 1) * held


@pytest.mark.parametrize(("tokens", "r"), [(1, 4), (16, 2), (40, 1), (2000, 0)])
def test_parallelism_moves_the_fewest_bytes(tokens, r):
    """Few tokens are sent to all parts of an expert; for many, weights travel."""
    work = LayerWorkload(SWITCH, 1, tokens, 16, 48, 2)
    moved = {one: choice.moved_bytes(work, 8, one) for one in choice.possible_r(4)}
    assert list(moved) == [0, 1, 2, 4]
    assert choice.parallelism(work, described_group(8)) == r == min(moved, key=moved.get)


def test_gathered_weights_are_gathered_once():
    """Also where a layer takes several chunks; each chunk sends its share."""
    work = LayerWorkload(SWITCH, 2, 64, 16, 24, 2)
    found = traced("tutel+degree=2+exchange=flat+r=1", work, 8)
    assert sum(one.algorithm == "all_gather" for one in found) == 2
    assert [one.bytes_per_peer for one in found if one.algorithm == "all_to_all"] == [64 // 4 // 2 * 16 * 4] * 8


@pytest.mark.parametrize(("chunks", "blocks"), [(1, 1), (4, 1), (1, 2), (3, 2)])
def test_slots_are_dealt_out_once(chunks, blocks):
    """Every slot below C has a place of its own in the buffer of its expert; what is dropped has none."""
    experts, capacity = 5, 11
    slots = Slots(experts, chunks, blocks, -(-12 // (chunks * blocks)))
    positions = torch.arange(-1, slots.capacity + 3).repeat(experts, 1)
    ids = torch.arange(experts)[:, None].expand_as(positions)
    buffer, slot = slots.place(ids, positions, capacity)
    is_kept = (buffer >= 0) & (buffer < slots.buffers) & (slot >= 0) & (slot < slots.each)
    assert torch.equal(is_kept, (positions >= 0) & (positions < capacity))
    places = (buffer * slots.each + slot)[is_kept]
    assert len(set(places.tolist())) == experts * capacity
    assert torch.equal(buffer[is_kept] // blocks % experts, ids[is_kept])


def test_ranks_that_share_an_expert_are_refused_by_others():
    """With the reason, before anything is built; an r that does not divide them too."""
    work = LayerWorkload(SWITCH, 1, 32, 16, 24, 2)
    assert problem(get("tutel"), work, COMMON, 8) is None
    assert "can't share an expert among ranks" in problem(get("hetumoe"), work, COMMON, 8)
    with pytest.raises(Unsupported, match="experts = 2 on ranks = 8: deepspeed can't share"):
        trace_layer(get("deepspeed"), work, 8, COMMON)
    with pytest.raises(InputError, match="r = 3: must be 0 or divide the 4 rank"):
        get("tutel+r=3").build(work, described_group(8), COMMON, torch.device("meta"), torch.float32)
    assert "must be 0 or divide the 1 rank" in problem(get("tutel+r=2"), layer(1, 8), COMMON, 8)
    assert "can't be split over the 4 ranks" in problem(get("tutel"), replace(work, d_ffn=22), COMMON, 8)
    assert "not divisible" in problem(get("tutel"), replace(work, experts=3), COMMON, 8)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tutel+degree=0", "degree of system tutel is a whole number from 1 to 32, not '0'"),
        ("tutel+degree=33", "from 1 to 32"),
        ("tutel+degree=04", "not '04'"),
        ("tutel+degree=two", "not 'two'"),
        ("tutel+r=-1", "from 0"),
        ("tutel+exchange=leader", "exchange of system tutel 'leader'.*2d, flat"),
    ],
)
def test_options_without_a_meaning(name, words):
    """The error says what there is."""
    with pytest.raises(InputError, match=words):
        get(name)
