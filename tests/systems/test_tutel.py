"""Tutel against closed forms: FLOPs, bytes, collectives, host reads, padded rows, and how chunks overlap.

T tokens, E experts, W ranks, G of a node, N nodes, K choices, C slots, D model, F feed-forward, d chunks.
"""

from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.program import FORWARD
from moebench.sim.replay import replay
from moebench.sim.uncertainty import nominal
from moebench.systems.registry import get
from moebench.systems.tutel.critical import extract_critical
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates.context import TRAINING
from moebench.workloads.gates.registry import GATES, gate, get_gate
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from moebench.workloads.load import load_topology
from tests.systems.strategies import CPU, weights, workload

SWITCH, GSHARD, TOPK = GateSpec("switch"), GateSpec("gshard", 2), GateSpec("topk", 3)
T, E, D, F, W, G = 60, 8, 24, 40, 4, 2
DROPLESS = Conventions(capacity_rule="unlimited")


def layer(spec=SWITCH, **changes):
    return replace(LayerWorkload(spec, 2, T // 2, D, F, E), **changes)


def traced(name, work=None, conventions=COMMON, ranks=W):
    (program,) = trace_layer(get(name), work or layer(), ranks, conventions, G)
    return program


def exchanges(program):
    """(group, bytes to each peer) of every all-to-all."""
    found = [op.collective for op in program.ops if op.collective and op.collective.algorithm == "all_to_all"]
    return [(collective.group, collective.bytes_per_peer) for collective in found]


def flops(program):
    found = {}
    for op in program.ops:
        found[op.region] = found.get(op.region, 0) + op.flops
    return {region: count for region, count in found.items() if count}


def slots(spec, degree):
    """C = K ceil(T / E), padded to a multiple of the degree."""
    return -(-spec.top_k * 8 // degree) * degree


@pytest.mark.parametrize("spec", [SWITCH, TOPK], ids=lambda spec: spec.label)
@pytest.mark.parametrize("degree", [1, 2, 3, 8])
def test_flat_exchanges(spec, degree):
    """Four exchanges a chunk, E C / d D elements each, evenly; nothing is read on the host."""
    program = traced(f"tutel+degree={degree}+exchange=flat", layer(spec))
    each = E // W * slots(spec, degree) // degree * D * 4
    assert exchanges(program) == [("world", each)] * 4 * degree
    assert not [op for op in program.ops if op.kind == "host-read"]
    others = [op.collective for op in program.ops if op.collective and op.collective.algorithm != "all_to_all"]
    assert [(one.algorithm, one.bytes_per_peer) for one in others] == [("all_reduce", E * D * 4)]


@pytest.mark.parametrize("degree", [1, 4])
def test_two_dimensional_exchanges(degree):
    """Two collectives each: B / G to the ranks of the node, B / N along the rail; two copies of B in between."""
    program = traced(f"tutel+degree={degree}+exchange=2d")
    payload = E * slots(SWITCH, degree) * D * 4 // degree
    found = exchanges(program)
    assert sorted(found) == sorted([("node", payload // G), ("rail", payload // (W // G))] * 4 * degree)
    copied = [op.bytes for op in program.ops if op.region == "exchange" and op.name == "aten::clone"]
    assert copied == [2 * payload] * 8 * degree


@pytest.mark.parametrize("input_gradient", [True, False])
@pytest.mark.parametrize("degree", [1, 3])
@pytest.mark.parametrize(("activation", "products"), [("relu", 2), ("swiglu", 3)])
def test_flops(degree, input_gradient, activation, products):
    """Products of the experts over all slots, padding included, and of the router: no other."""
    work = layer(GSHARD, input_gradient=input_gradient, activation=activation)
    rows, both = E * slots(GSHARD, degree), 3 if input_gradient else 2
    expected = {"experts": 2 * products * 3 * rows * D * F, "gate": 2 * T * E * D * both}
    if not input_gradient:  # the products that take x have no gradient for it
        expected["experts"] -= 2 * (products - 1) * rows * D * F
    assert flops(traced(f"tutel+degree={degree}+exchange=flat", work)) == expected


@pytest.mark.parametrize("spec", [SWITCH, TOPK], ids=lambda spec: spec.label)
def test_bytes_of_encode_and_decode(spec):
    """O(K T D + E C D): k rows copied a choice, all slots cleared, an output a choice and their sums."""
    ops = traced("tutel+degree=1+exchange=flat", layer(spec)).ops
    row, top_k, cleared = D * 4, spec.top_k, E * slots(spec, 1)
    kept = min(T * top_k, cleared)
    ids, token_sums = 16 * T * top_k, 2 * (top_k - 1) * T
    scatter, gather = ids + (3 * kept + cleared) * row, ids + (kept + token_sums + (2 * top_k - 1) * T) * row
    weighted, dots = 4 * kept, ids + 2 * kept * row + 4 * T * top_k
    by_region = {name: sum(op.bytes for op in ops if op.region == name) for name in ("dispatch", "combine")}
    assert by_region == {"dispatch": scatter + gather, "combine": scatter + gather + 2 * weighted + dots}


@pytest.mark.parametrize("spec", [SWITCH, TOPK], ids=lambda spec: spec.label)
def test_a_mask_and_a_running_sum_a_choice(spec):
    """No tensor of T E C elements; K masks in int64, each summed along the tokens by one kernel."""
    ops = traced("tutel+degree=1+exchange=flat", layer(spec)).ops
    names = [op.name for op in ops if op.region == "gate" and op.phase == FORWARD]
    assert names.count("moebench::tutel_column_scan") == spec.top_k
    assert names.count("aten::zeros") == spec.top_k
    assert max(op.bytes for op in ops if op.region == "gate") <= 3 * 8 * T * max(E * 2, D)


def test_dropless_reads_the_largest_count_once():
    """One small all-reduce and one host read; the buffer is padded to the degree."""
    work = layer(routing=RoutingSpec("zipf"))
    program = traced("tutel+degree=4+exchange=flat", work, DROPLESS)
    assert [op.name for op in program.ops if op.kind == "host-read"] == ["host::max_expert_count"]
    small = [op.collective for op in program.ops if op.collective and op.collective.algorithm == "all_reduce"]
    assert [one.bytes_per_peer for one in small] == [8 * W, E * D * 4]
    sizes = {size for _, size in exchanges(program)}
    assert len(sizes) == 1
    assert sizes.pop() % (E // W * D * 4) == 0


def test_order_of_a_pipeline():
    """All chunks are sent off, then each is awaited, computed and sent back; the backward mirrors that."""
    ops = traced("tutel+degree=3+exchange=flat").ops
    short = {"moebench::all_to_all_start": "s", "moebench::wait": "w", "aten::bmm": "c"}
    for phase in ("forward", "backward"):
        order = [short.get(op.name, "") for op in ops if op.phase == phase and op.region in ("exchange", "experts")]
        text = "".join(order).replace("cccc", "c").replace("cc", "c")
        assert text == "sss" + "wcs" * 3 + "www"
    starts = [op.index for op in ops if op.name == "moebench::all_to_all_start"]
    waits = [op.waits_on[0] for op in ops if op.name == "moebench::wait" and op.region == "exchange"]
    assert waits[:6] == starts[:6]
    assert waits[6:] == starts[6:]


@pytest.mark.parametrize(("exchange", "size"), [("flat", "1x8"), ("flat", "4x8"), ("2d", "4x8")])
def test_chunks_hide_exchanges(exchange, size):
    """On a described machine, four chunks leave less communication exposed than one, by what the experts can hide."""
    where = load_topology(f"{size}-titan-rtx")
    work = LayerWorkload(SWITCH, 8, 1024, 2048, 2048, 32)
    exposed, busy = [], []
    for degree in (1, 4):
        name = f"tutel+degree={degree}+exchange={exchange}"
        programs = trace_layer(get(name), work, where.ranks, COMMON, where.gpus_per_node)
        seen = replay(programs, where, nominal(where.parameters()))
        exposed.append(float(seen.exposed_communication_s[0]))
        busy.append(float(sum(t[0] for (region, _), t in seen.region_time_s.items() if region == "experts")))
    assert exposed[1] < exposed[0] - 0.5 * min(busy[0], exposed[0])


@pytest.mark.parametrize("spec", [SWITCH, GSHARD, TOPK], ids=lambda spec: spec.label)
def test_chunks_and_exchanges_change_nothing(spec):
    """One rank: padded or not, weights before or after a ReLU expert without bias, the output is the same."""
    x = torch.randn(24, 16, dtype=torch.float64)
    after = replace(COMMON, gate_dtype="fp64")
    outputs = []
    for name in ("tutel", "tutel+degree=4", "tutel+degree=5+exchange=2d"):
        for conventions in (after, replace(after, weight_site="before-first-product")):
            built = get(name).build(workload(spec), described_group(1), conventions, CPU, x.dtype)
            built.load_weights(weights())
            outputs.append(built(x)[0])
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0])


def critical_of(name, spec, tokens, experts, factor=1.0, conventions=None, logits=None):
    work = LayerWorkload(spec, 1, tokens, 16, 16, experts, capacity_factor=factor)
    conventions = conventions or get(name).as_shipped(spec)
    logits = torch.randn(tokens, experts) if logits is None else logits
    return extract_critical(logits, work, conventions, described_group(1), TRAINING)


@pytest.mark.parametrize(
    ("spec", "degree", "factor", "capacity"),
    [(SWITCH, 1, 1.0, 3), (GSHARD, 1, 1.0, 6), (GSHARD, 1, 1.5, 8), (GSHARD, 4, 1.0, 8), (SWITCH, 1, 0.3, 0)],
)
def test_capacity_as_shipped(spec, degree, factor, capacity):
    """K int(cf ceil(T / E)) up to a multiple of the degree, as run for T = 10, E = 4; it can be 0."""
    assert critical_of(f"tutel+degree={degree}", spec, 10, 4, factor).capacity == capacity


@pytest.mark.parametrize("rule", ["k-times-floor", "floor-of-product"])
def test_a_capacity_of_zero_drops_everything(rule):
    """Tokens come back as zeros, and every parameter has a gradient."""
    name = "tutel+degree=2"
    work = workload(SWITCH, tokens=6, capacity_factor=0.3)
    conventions = replace(get(name).as_shipped(SWITCH), capacity_rule=rule)
    built = get(name).build(work, described_group(1), conventions, CPU, torch.float64)
    x = torch.randn(6, 16, dtype=torch.float64, requires_grad=True)
    y, aux = built(x)
    torch.autograd.backward((y, aux), (torch.ones_like(y), torch.ones_like(aux)))
    assert not y.any()
    assert all(parameter.grad is not None for parameter in built.parameters())


def test_a_half_dropped_token_keeps_its_weight():
    """Weights are divided by their sum before the drops: what is left of a token weighs less than 1."""
    logits = torch.tensor([[5.0, 4.0, 0.0, 0.0]]).repeat(12, 1)
    found = critical_of("tutel", GSHARD, 12, 4, logits=logits)
    torch.testing.assert_close(found.weights_TK.sum(1), torch.ones(12))
    assert found.capacity == 6
    assert (found.positions_TK == torch.arange(12)[:, None]).all()


def test_prioritised_tokens_without_drops():
    """The capacity of a dropless layer is that of the counts, whatever the order (the package takes a wrong row)."""
    spec = gate("bpr", 1, importance="largest")
    logits = torch.randn(10, 4)
    logits[:4, 2] += 9
    found = critical_of("tutel", spec, 10, 4, conventions=DROPLESS, logits=logits)
    assert found.capacity == int(torch.bincount(logits.argmax(1), minlength=4).max())
    most_sure = logits.softmax(1).max(1).values
    for expert in range(4):
        here = (found.experts_TK[:, 0] == expert).nonzero()[:, 0]
        queue = here[found.positions_TK[here, 0].argsort()]
        assert (most_sure[queue].diff() <= 0).all()


@pytest.mark.parametrize("name", sorted(GATES))
def test_gates_and_conventions(name):
    """Every gate runs under the common conventions; as shipped only those that come with the package."""
    system, spec = get("tutel"), gate(name)
    work = LayerWorkload(spec, 1, 64, 64, 16, 16)
    assert get_gate(name).problem(spec, COMMON, 16) is None
    assert system.supports(work, COMMON) is None
    has = name in ("switch", "gshard", "topk", "bpr")
    reason = system.supports(work, system.as_shipped(spec))
    assert (reason is None) == has
    assert has or f"the package has no gate {spec.label}" in reason
    assert "after-drop" in system.supports(work, replace(COMMON, normalisation="after-drop")) or name == "hash"


def test_what_it_lacks_is_said():
    """Noise, other drops, normalised single weights, and importance by sum as shipped."""
    system = get("tutel+degree=2")
    for spec, change, words in (
        (GSHARD, {"noise": "gumbel-second"}, "noise none"),
        (SWITCH, {"drop_order": "probability"}, "drop_order arrival"),
        (SWITCH, {"normalisation": "before-drop"}, "normalisation none"),
        (GSHARD, {"choice_order": "token-major"}, "choice_order choice-major"),
    ):
        assert words in system.supports(workload(spec), replace(COMMON, **change))
    assert system.supports(workload(SWITCH), replace(COMMON, choice_order="token-major")) is None
    largest, by_sum = gate("bpr", 2, importance="largest"), gate("bpr", 2)
    assert system.supports(workload(largest), system.as_shipped(largest)) is None
    assert "no gate bpr-2" in system.supports(workload(by_sum), system.as_shipped(by_sum))
