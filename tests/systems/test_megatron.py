"""Megatron-Core: what a layer costs, in closed forms, and what its settings mean."""

import gc
import weakref
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from moebench.checks.correctness import node_size
from moebench.checks.instance import instance
from moebench.checks.verdict import problem
from moebench.kernels.collectives.group import described_group
from moebench.program import BACKWARD, COMPUTE, FORWARD
from moebench.ranks.run import run_ranks
from moebench.systems.megatron.layer import Setting
from moebench.systems.megatron.layout import LAYOUTS
from moebench.systems.megatron.routes import Routes, drop
from moebench.systems.registry import get
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.errors import InputError
from moebench.workloads.gates.registry import gate
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from tests.systems import megatron_on_ranks
from tests.systems.strategies import assert_same, build, right, step, weights, workload

NAMES = ("megatron", "megatron_allgather")
FUSED = tuple(f"{name}+layout=fused" for name in NAMES)
RAGGED = ("megatron+pads=false", "megatron+layout=fused+pads=false")
DROPLESS = Conventions(capacity_rule="unlimited")
FP64 = replace(COMMON, gate_dtype="fp64")
TOP2 = GateSpec("topk", 2)
T, E, D, F, K, RANKS = 64, 8, 24, 40, 2, 4
LOCAL, CAPACITY = E // RANKS, 16
LAYER = LayerWorkload(TOP2, 2, T // 2, D, F, E, dtype="bf16", routing=RoutingSpec("zipf"))
every_name = pytest.mark.parametrize("name", NAMES)
every_layout = pytest.mark.parametrize("name", [*NAMES, *FUSED, *RAGGED])


def programs(name, conventions, **changes):
    return trace_layer(get(name), replace(LAYER, **changes), RANKS, conventions)


def flops(program, region):
    return sum(op.flops for op in program.ops if op.region == region)


def collectives(program, phase):
    """(algorithm, bytes) of the layer's collectives; of an uneven one those that this rank sends."""
    found = [op.collective for op in program.ops if op.collective and op.phase == phase and op.region == "exchange"]
    return [(c.algorithm, c.bytes_per_peer if c.bytes_per_peer is not None else sum(c.send_bytes)) for c in found]


def expert_rows(program):
    """Rows of this rank's experts, from the first grouped product."""
    return next(op.shapes[0][0] for op in program.ops if op.name == "moebench::grouped_gemm")


@every_layout
@pytest.mark.parametrize("conventions", [COMMON, DROPLESS], ids=["capacity", "dropless"])
@pytest.mark.parametrize(("input_gradient", "products"), [(True, 3), (False, 2)])
@pytest.mark.parametrize(("activation", "matrices"), [("relu", 2), ("swiglu", 3)])
def test_flops_are_those_of_router_and_rows(name, conventions, input_gradient, products, activation, matrices):
    """n products of all rows, each with two more in the backward; nothing in dispatch and combine.

    Rows and weights travel apart, so that a layer whose input needs no gradient takes none for its experts' input.
    """
    for program in programs(name, conventions, input_gradient=input_gradient, activation=activation):
        rows = expert_rows(program)
        first = matrices - 1  # products that read the layer's input
        experts = 2 * rows * D * F * (3 * matrices - (0 if input_gradient else first))
        assert flops(program, "experts") == experts
        assert flops(program, "gate") == 2 * T * E * D * products
        assert flops(program, "dispatch") == flops(program, "combine") == 0


def test_a_capacity_fixes_the_rows():
    """All-to-all: R L C = E C rows of each rank, padded; all-gather: no more than those that found a slot."""
    (program,) = programs("megatron", COMMON)
    assert program.stands_for == range(RANKS)
    assert expert_rows(program) == E * CAPACITY
    ragged = programs("megatron_allgather", COMMON)
    rows = {rank: expert_rows(p) for p in ragged for rank in p.stands_for}
    assert all(0 < count <= E * CAPACITY for count in rows.values())
    assert sum(rows.values()) < RANKS * T * K


@every_name
def test_without_a_capacity_every_route_is_one_row(name):
    """No padding: the ranks' rows are the K T R routes."""
    rows = {rank: expert_rows(p) for p in programs(name, DROPLESS) for rank in p.stands_for}
    assert sum(rows.values()) == RANKS * T * K
    assert len(set(rows.values())) == RANKS


@pytest.mark.parametrize("layout", ["", "+layout=fused"])
def test_bytes_of_the_padded_all_to_all(layout):
    """Rows of b bytes and weights of 4 there, rows back, and the same backward; nothing read."""
    (program,) = programs(f"megatron{layout}", COMMON)
    rows = E * CAPACITY // RANKS  # to each rank
    there, back = [("all_to_all", rows * D * 2), ("all_to_all", rows * 4)], [("all_to_all", rows * D * 2)]
    assert collectives(program, FORWARD) == there + back
    assert collectives(program, BACKWARD) == back + there[::-1]
    assert not [op for op in program.ops if op.kind == "host-read"]


def test_bytes_of_the_ragged_all_to_all():
    """Counts of 8 E bytes gathered, K T rows and weights there, rows back; backward without the counts; one read."""
    for program in programs("megatron", DROPLESS):
        received = expert_rows(program)
        rows, weights_ = ("all_to_all", K * T * D * 2), ("all_to_all", K * T * 4)
        back = ("all_to_all", received * D * 2)
        assert collectives(program, FORWARD) == [("all_gather", 8 * E), rows, weights_, back]
        assert collectives(program, BACKWARD) == [rows, ("all_to_all", received * 4), back]
        reads = [op for op in program.ops if op.kind == "host-read"]
        assert len(reads) == 1
        copies = [program.ops[index] for index in reads[0].waits_on]
        assert [op.name for op in copies] == ["host::copy_expert_counts", "host::copy_received_counts"]
        assert sum(op.bytes_read for op in copies) == 8 * E + 8 * RANKS * LOCAL


@pytest.mark.parametrize("conventions", [COMMON, DROPLESS], ids=["capacity", "dropless"])
def test_bytes_of_the_all_gather(conventions):
    """T E of map, 4 T E of weights, T D b of rows gathered, 4 T D summed back; backward the reverse; one read."""
    for program in programs("megatron_allgather", conventions):
        there = [("all_gather", T * E), ("all_gather", 4 * T * E), ("all_gather", T * D * 2)]
        assert collectives(program, FORWARD) == [*there, ("reduce_scatter", T * D * 4)]
        back = [("all_gather", T * D * 4), ("reduce_scatter", T * D * 2), ("reduce_scatter", 4 * T * E)]
        assert collectives(program, BACKWARD) == back
        assert [op.name for op in program.ops if op.kind == "host-read"] == ["host::received_kept_by_expert"]


@pytest.mark.parametrize("name", RAGGED)
def test_without_padding_a_capacity_sends_what_found_a_slot(name):
    """Fewer rows than routes; the host waits for the counts before rows are permuted, there being no other way."""
    ragged, padded = programs(name, COMMON), programs("megatron", COMMON)
    rows = {rank: expert_rows(p) for p in ragged for rank in p.stands_for}
    assert len(set(rows.values())) > 1
    assert sum(rows.values()) < RANKS * T * K
    assert max(rows.values()) <= E * CAPACITY == expert_rows(padded[0])
    for program in ragged:
        sent = collectives(program, FORWARD)[1]
        assert sent[1] < K * T * D * 2
        reads = [op for op in program.ops if op.kind == "host-read"]
        copies = [program.ops[index].name for index in reads[0].waits_on]
        assert (len(reads), copies) == (1, ["host::copy_kept_counts", "host::copy_received_kept_counts"])
        permuted = next(op for op in program.ops if op.shapes and op.shapes[0] == (T, D) and op.region == "dispatch")
        assert reads[0].index < permuted.index


def test_an_input_without_gradient_saves_the_rows_way_back():
    """The weights' gradient still travels."""
    (program,) = programs("megatron", COMMON, input_gradient=False)
    rows = E * CAPACITY // RANKS
    assert collectives(program, BACKWARD) == [("all_to_all", rows * D * 2), ("all_to_all", rows * 4)]


def test_the_device_permutes_while_counts_travel_to_the_host():
    """Copies start behind the counts, then rows are permuted, then the host waits, then rows are sent."""
    program = programs("megatron", DROPLESS)[0]
    names = [op.name for op in program.ops]
    copy, event = names.index("host::copy_received_counts"), names.index("host::event")
    exchanged = names.index("moebench::all_to_all_start")
    assert {"aten::sort", "aten::index_select"} <= set(names[copy:event])
    assert names.index("moebench::all_gather_start") < copy
    assert event < exchanged


def test_what_a_permutation_moves():
    """Sort: E T keys, K T rows gathered, added to zeros; fused: one kernel each way that writes each token once."""
    sort, fused = (programs(name, DROPLESS)[0] for name in ("megatron", "megatron+layout=fused"))
    keys = next(op for op in sort.ops if op.name == "aten::sort")
    assert keys.shapes[0] == (E * T,)
    gathered = [op for op in sort.ops if op.name == "aten::index_select" and op.shapes[0] == (T, D)]
    assert [op.shapes[-1] for op in gathered] == [(K * T, D)]
    summed = next(op for op in sort.ops if op.name == "aten::scatter_add_")
    assert summed.bytes_written == K * T * D * 2
    assert summed.bytes_read >= 2 * K * T * D * 2
    (combined,) = [op for op in fused.ops if op.name == "moebench::unpermute" and op.phase == FORWARD]
    assert combined.bytes_written == T * D * 2
    assert combined.bytes_read == K * T * D * 2 + 8 * K * T
    assert not [op for op in fused.ops if op.name == "aten::sort"]
    plain = [op for op in fused.ops if op.name.startswith("aten::") and op.kind in ("gather", "scatter")]
    assert not [op for op in plain if (T, D) in op.shapes]


def test_several_local_experts_cost_a_copy_of_rows_and_weights_each_way():
    """Chunks by source rank become chunks by expert; with one expert a rank nothing is moved."""
    for experts, copies in ((E, [4, 2]), (RANKS, [0, 0])):
        program = trace_layer(get("megatron"), replace(LAYER, experts=experts), RANKS, DROPLESS)[0]
        cats = [op for op in program.ops if op.name == "aten::cat" and op.region in ("dispatch", "combine")]
        found = [sum(op.shapes[-1][-1] == width for op in cats) for width in (D,)]
        assert found == copies[:1]
        assert len(cats) == sum(copies)


@every_layout
@pytest.mark.parametrize("tokens", [24, 0, 1, 7])
@pytest.mark.parametrize(
    "conventions",
    [
        FP64,
        replace(FP64, capacity_rule="unlimited"),
        replace(FP64, capacity_rule="unlimited", normalisation="before-drop"),
        replace(FP64, drop_order="probability", choice_order="token-major"),
        replace(FP64, min_capacity=30),
    ],
    ids=["common", "dropless", "post-softmax", "probs", "more-slots-than-tokens"],
)
@pytest.mark.parametrize("activation", ["relu", "swiglu"])
def test_both_layouts_equal_the_reference(name, conventions, tokens, activation):
    """Outputs, loss and all gradients."""
    work, values = workload(GateSpec("topk", 3), activation=activation), weights(swiglu=activation == "swiglu")
    x, upstream = torch.randn(tokens, 16, dtype=torch.float64), torch.randn(tokens, 16, dtype=torch.float64)
    layer = build(get(name), work, conventions, values)
    assert_same(step(layer, x, upstream), right(work, conventions, values, x, upstream))


@pytest.mark.parametrize(("name", "ranks"), [*product(NAMES, (1, 2, 4)), *product([*FUSED, *RAGGED], (2,))])
def test_further_rules_and_layouts_pass_the_gate(name, ranks):
    """Sigmoid with bias and groups, Sinkhorn; the fused layout with and without a capacity."""
    dropless = replace(FP64, capacity_rule="unlimited")
    grouped = gate("sigmoid", 4, groups=4, kept_groups=2, balance=0.5, scale=2.5)
    pairs = [(gate("sigmoid", 3), FP64), (grouped, replace(dropless, normalisation="before-drop"))]
    pairs += [(gate("sinkhorn", k), dropless) for k in (1, 2)]
    pairs += [(TOP2, FP64), (TOP2, dropless), (GateSpec("switch"), dropless)]
    wanted = [instance(spec, "fp64", conventions, ranks) for spec, conventions in pairs]
    wanted += [instance(gate("sinkhorn"), "fp64", dropless, ranks, training=False)]
    wanted += [instance(TOP2, dtype, get(name).as_shipped(TOP2), ranks, "swiglu") for dtype in ("fp32", "bf16")]
    target = "moebench.checks.instance:run_rank"
    seen = run_ranks(target, ranks, (name, tuple(wanted)), timeout_s=120, ranks_per_node=node_size(ranks))
    for place, one in enumerate(wanted):
        assert problem(one, [of_rank[place] for of_rank in seen]) is None, one.workload.gate.label


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_lie_by_expert_then_rank_then_token(layout):
    """On two ranks with two experts each, whatever the dispatcher; weights go with their rows."""
    assert run_ranks(f"{megatron_on_ranks.__name__}:rows_are_sorted", 2, (layout,)) == [None, None]


def test_a_bias_moves_tokens_but_not_weights():
    """Experts with a bias of 10 get everything; their weights are still the scores."""
    spec = gate("sigmoid", 2)
    work, values = workload(spec), weights()
    layer = build(get("megatron"), work, replace(FP64, capacity_rule="unlimited"), values)
    layer.gate.bias_E[torch.tensor([3, 6])] = 10.0
    routes, capacity, aux = layer.route(torch.randn(24, 16, dtype=torch.float64))
    assert capacity is None
    assert float(aux) == 0
    assert routes.map_TE.sum(0).tolist() == [0, 0, 0, 24, 0, 0, 24, 0]
    assert ((routes.weights_TE > 0) == routes.map_TE).all()
    assert (routes.weights_TE < 1).all()


@pytest.mark.parametrize("pads", [True, False])
def test_dropping_keeps_the_first_choices(pads):
    """Of four tokens that want expert 0, the two that arrive first in the queue stay; padding rows weigh nothing."""
    experts_TK = torch.tensor([[1, 0], [0, 1], [0, 2], [1, 0]])
    weights_TE = torch.zeros(4, 3).scatter(1, experts_TK, 0.5)
    routes = Routes(weights_TE > 0, weights_TE, experts_TK)
    by_choice = drop(routes, 2, COMMON, pads)
    assert (by_choice.weights_TE[:, 0] > 0).tolist() == [False, True, True, False]
    by_token = drop(routes, 2, replace(COMMON, choice_order="token-major"), pads)
    assert (by_token.weights_TE[:, 0] > 0).tolist() == [True, True, False, False]
    kept = by_choice.map_TE.sum(0).tolist()
    assert kept == ([2, 2, 2] if pads else [2, 2, 1])


@pytest.mark.parametrize("name", NAMES)
def test_what_megatron_refuses_is_said(name):
    """Each with its reason."""
    system = get(name)

    def reason(spec, **changes):
        return system.supports(workload(spec), replace(COMMON, **changes))

    assert "has no gate sam" in reason(gate("sam", groups=4))
    assert "over one choice" in reason(GateSpec("switch"), normalisation="before-drop")
    assert "after-drop" in reason(TOP2, normalisation="after-drop")
    assert "by normalised weight" in reason(TOP2, normalisation="before-drop", drop_order="probability")
    assert "without a capacity" in reason(gate("sinkhorn"))
    assert "a single choice" in reason(gate("sigmoid", 1), normalisation="before-drop")
    assert reason(gate("sigmoid", 2), normalisation="before-drop") is None
    assert "does not normalise" in reason(gate("sinkhorn"), capacity_rule="unlimited", normalisation="before-drop")
    assert "top_k // kept_groups = 1" in reason(gate("sigmoid", 2, groups=4, kept_groups=2))
    assert reason(gate("sigmoid", 2, groups=4, kept_groups=2, group_scores=1)) is None
    assert "random" in reason(TOP2, drop_order="random")
    assert reason(TOP2, weight_site="before-second-product") is None
    assert "weight_site" in reason(TOP2, weight_site="before-first-product")


def test_variants():
    """`+layout=fused` is another system of that name; `+layout=sort` the same; others are refused."""
    fused = get("megatron+layout=fused")
    assert (fused.name, fused.setting) == ("megatron+layout=fused", Setting(layout="fused"))
    assert get("megatron+layout=sort") is get("megatron")
    ragged = get("megatron+pads=false+layout=fused")
    assert (ragged.name, ragged.setting) == ("megatron+layout=fused+pads=false", Setting(layout="fused", pads=False))
    assert get("megatron+pads=true") is get("megatron")
    with pytest.raises(InputError, match="unknown option of system megatron_allgather 'pads'; choose one of: layout"):
        get("megatron_allgather+pads=false")
    with pytest.raises(InputError, match="unknown pads 'no'; choose one of: false, true"):
        get("megatron+pads=no")
    with pytest.raises(InputError, match="unknown option of system megatron 'fusion'; choose one of: layout, pads"):
        get("megatron+fusion=on")
    with pytest.raises(InputError, match=r"unknown layout 'fuse' \(did you mean fused\?\)"):
        get("megatron+layout=fuse")
    for field in ("dispatcher", "balance"):
        with pytest.raises(InputError, match=f"unknown {field} 'flex'"):
            Setting(**{field: "flex"})


@every_name
def test_a_step_takes_no_mask_of_slots(name):
    """Nothing of T E C elements, and no product but those of router and experts."""
    layer = get(name).build(LAYER, described_group(1), COMMON, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        y, aux = layer(torch.randn(T, D, requires_grad=True))
        torch.autograd.backward((y, aux), (torch.ones_like(y), torch.ones_like(aux)))
    rows = E * CAPACITY if name == "megatron" else int(layer.route(torch.randn(T, D))[0].map_TE.sum())
    assert counter.get_total_flops() <= 6 * T * E * D + 12 * max(rows, E * CAPACITY) * D * F
    for program in programs(name, COMMON):
        largest = max(torch.Size(shape).numel() for op in program.ops for shape in op.shapes)
        assert largest < T * E * CAPACITY
        assert {op.stream for op in program.ops if op.kind != "collective"} == {COMPUTE}


@pytest.mark.parametrize("conventions", [COMMON, DROPLESS], ids=["capacity", "dropless"])
@every_name
def test_a_layer_is_freed_with_its_last_reference(name, conventions):
    """No cycle keeps its weights until Python looks for cycles."""
    layer = get(name).build(LAYER, described_group(1), conventions, torch.device("cpu"), torch.float32)
    seen = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert seen() is None
    finally:
        gc.enable()
