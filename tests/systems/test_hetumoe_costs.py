"""What a step of HetuMoE costs, from its traced programs: closed forms for every gate and exchange.

T tokens of a rank, E experts, K columns of choices, C slots, N = E C rows, D model, F feed-forward; R ranks, G a node.
B bytes of a payload: the rows of a rank, N D of 4 bytes.
"""

from functools import cache
from math import prod

import pytest

from moebench.program import FORWARD, Program
from moebench.systems.registry import get
from moebench.trace.answers import RoutingAnswers
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.layer import LayerWorkload
from tests.systems.strategies import label

R, G = 8, 4
T, D, F, E = 256, 512, 96, 16
SYSTEMS = ("hetumoe", "hetumoe_leader", "hetumoe_2d")
ONE = gate("base", weights="one")  # whose router gets no gradient
SOFT, DENSE, HARD = (gate("dense-to-sparse", **o) for o in ({}, {"dense_steps": 1}, {"first_step": 6000}))
READING = ("base", "sinkhorn")
SPECS = (*map(gate, GATES), gate("ktop1", 4), gate("sam", groups=3), ONE, DENSE, HARD)
every_system = pytest.mark.parametrize("name", SYSTEMS)
every_spec = pytest.mark.parametrize("spec", SPECS, ids=label)


def workload(spec, tokens=T):
    return LayerWorkload(spec, 2, tokens // 2, D, F, E)


@cache
def programs(name, spec, tokens=T) -> tuple[Program, ...]:
    return trace_layer(get(name), workload(spec, tokens), R, COMMON, G)


def capacity(spec, tokens=T):
    """C from the rule: its own, or K ceil(T / E)."""
    return tokens if spec in (SOFT, DENSE) else spec.top_k * -(-tokens // E)


def columns(spec):
    """Choices of a token, made or not."""
    return E if spec.name == "expert-choice" or spec in (SOFT, DENSE) else spec.top_k


def ops_in(program, region, phase=None):
    return [op for op in program.ops if op.region == region and phase in (None, op.phase)]


@every_system
@every_spec
def test_flops(name, spec):
    """Experts 12 N D F, the router 6 T D E where there is one that learns, and no product anywhere else."""
    rows = E * capacity(spec)
    router = (2 if spec == ONE else 6) * T * D * E * GATES[spec.name].has_router
    for program in programs(name, spec):
        assert sum(op.flops for op in ops_in(program, "experts")) == 12 * rows * D * F
        assert sum(op.flops for op in ops_in(program, "gate")) == router
        assert sum(op.flops for op in program.ops) == 12 * rows * D * F + router


@every_system
@every_spec
def test_bytes_of_the_layout_transforms(name, spec):
    """kernels/README.md: tokens once, rows once, and what says where they go; weights where the rule has them."""
    k, n, token, is_weighted = columns(spec), E * capacity(spec), 4 * D, spec.name != "hash"
    is_weighted &= spec != ONE
    kept = min(T * k, n)
    permuted = min(T, n) * token + 8 * T * k + n + n * token + n + kept
    gathered = kept * token + 8 * T * k + T * token
    weights = 4 * T * k if is_weighted else 0
    # Back through weights: their gradients, for which the rows are read once more.
    weighted_back = kept * (token + 4) + weights if is_weighted else 0
    for program in programs(name, spec):
        assert _bytes(program, "dispatch", "permute") == permuted
        assert _bytes(program, "dispatch", "unpermute") == gathered
        assert _bytes(program, "combine", "unpermute") == gathered + weights
        back = "unpermute_backward" if is_weighted else "permute"
        assert _bytes(program, "combine", back) == permuted + weighted_back
        moving = [op for region in ("dispatch", "combine") for op in ops_in(program, region) if op.bytes]
        assert len(moving) == 4


def _bytes(program, region, operator):
    (op,) = [op for op in ops_in(program, region) if op.name == f"moebench::{operator}"]
    return op.bytes


@every_spec
def test_calls_and_bytes_of_the_exchanges(spec):
    """Four exchanges of B a step; leaders gather, exchange and scatter, 2d goes inside the node and along the rail."""
    payload = E * capacity(spec) * D * 4
    node, rail = range(G), range(0, R, G)
    expected = {
        "hetumoe": [[(range(R), payload // R)] * 4],
        "hetumoe_leader": [
            [(node, payload), (rail, G * payload // 2), (node, payload)] * 4,
            [(node, payload), (node, 0)] * 4,
        ],
        "hetumoe_2d": [[(node, payload // G), (rail, payload // 2)] * 4],
    }
    for name, by_kind in expected.items():
        found = programs(name, spec)
        calls = [_calls(found[0]), *([_calls(_of_rank(found, 1))] if name == "hetumoe_leader" else [])]
        assert calls == [sorted(one, key=str) for one in by_kind], name


def _calls(program):
    """(ranks, most bytes to one of them) of every collective in the exchanges."""
    collectives = [op.collective for op in ops_in(program, "exchange") if op.collective]
    # A rank of a node is told by the first one's ranks: leaders gather what others send.
    found = [(c.ranks, c.bytes_per_peer or max(c.send_bytes, default=0)) for c in collectives]
    received = [max(c.receive_bytes, default=0) for c in collectives]
    most = [(ranks, max(sent, got if sent else 0)) for (ranks, sent), got in zip(found, received, strict=True)]
    return sorted(most, key=str)


def _of_rank(found, rank):
    return next(program for program in found if rank in program.stands_for)


@every_system
@every_spec
def test_host_reads_and_the_gradient_of_the_router(name, spec):
    """None, but one a round and, for the auction, one for its check; one all-reduce of the router's gradient."""
    answers = RoutingAnswers(workload(spec), R, COMMON, G)
    for program in programs(name, spec):
        reads = [op.name for op in program.ops if op.kind == "host-read"]
        rounds = answers.answer(program.rank, "rounds")[0] if spec.name in READING else 0
        assert reads == ["host::rounds"] * (rounds + (spec.name == "base"))
        sums = [op.collective.bytes_per_peer for op in program.ops if op.collective and op.region == "grad-sync"]
        assert sums == ([4 * E * D] if GATES[spec.name].has_router else [])


@every_system
@every_spec
def test_ranks_that_run_the_same_program_share_it(name, spec):
    """One for all; two where leaders differ; as many as rounds differ where the host reads them."""
    found = programs(name, spec)
    assert sorted(rank for program in found for rank in program.stands_for) == list(range(R))
    if spec.name not in READING:
        assert len(found) == (2 if name == "hetumoe_leader" else 1)
        assert list(found[0].stands_for) == (list(range(0, R, G)) if len(found) == 2 else list(range(R)))


@every_spec
def test_no_tensor_of_a_gate_is_larger_than_the_logits(spec):
    """Input and router apart: in particular none of T x E x C or T x E x T, forward or backward."""
    (program, *_) = programs("hetumoe", spec)
    tables = {gate("hash"): 32768}
    sizes = {prod(shape) for op in ops_in(program, "gate") for shape in op.shapes} - {T * D, D * E, tables.get(spec)}
    assert max(sizes) <= T * E


@pytest.mark.parametrize("spec", [gate("switch"), gate("gshard"), gate("topk", 4), gate("hash")], ids=label)
def test_the_gate_is_two_kernels_and_little_else(spec):
    """Forward: softmax and top-k once, slots once, four operators for rows; hash looks up instead."""
    (program, *_) = programs("hetumoe", spec)
    names = [op.name for op in ops_in(program, "gate", FORWARD)]
    fused = [name for name in names if name.startswith("moebench::")]
    assert fused == [*([] if spec.name == "hash" else ["moebench::topk_gate"]), "moebench::assign_slots"]


@pytest.mark.parametrize("spec", [one for one in SPECS if one.name not in READING], ids=label)
def test_peak_memory(spec):
    """Narrow experts: 4 B and the hidden rows beside what stays; 2d B more, a leader 3 B and 2 G B."""
    tokens = 8 * T  # so that activations outweigh the gradients of weights
    rows = E * capacity(spec, tokens)
    payload, hidden = rows * D * 4, rows * F * 4
    buffers = {"hetumoe": (4,), "hetumoe_2d": (5,), "hetumoe_leader": (3 + 2 * G, 4)}
    for name, of_programs in buffers.items():
        for program, payloads in zip(programs(name, spec, tokens), of_programs, strict=True):
            rest = program.peak_bytes - program.persistent_bytes - payloads * payload - hidden
            assert 0 <= rest <= 5 * tokens * E * 4, name
