"""FastMoE: what it moves, computes and reads, from papers/baselines.md sections 4 and 9; its gates by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from moebench.checks import verdict as check_verdict
from moebench.checks.correctness import Status, check, instances
from moebench.kernels.collectives.group import described_group
from moebench.program import BACKWARD, FORWARD
from moebench.ranks.run import run_ranks
from moebench.systems.reference import reference_layer
from moebench.systems.registry import get
from moebench.trace.answers import RoutingAnswers
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from tests.systems import fastmoe_on_ranks
from tests.systems.strategies import CPU, build, step, weights, workload

NAMES = ("fastmoe", "fastermoe", "fastermoe+group=2", "fastermoe+group=3")
TOP2 = GateSpec("topk", 2)
DROPLESS = Conventions(capacity_rule="unlimited")
FP64 = replace(COMMON, gate_dtype="fp64")
EVERY = (
    *(gate(name, vocabulary=64) if name == "hash" else gate(name) for name in sorted(GATES)),
    *(gate("topk", 3), gate("ktop1", 3), gate("sam", groups=3), gate("bpr", 2)),
    *(gate("dense-to-sparse", dense_steps=1), gate("dense-to-sparse", first_step=6000)),
)
FEW = (gate("gshard"), gate("topk", 3), gate("bpr", 2))
T, D, F, E, RANKS = 48, 24, 20, 8, 4
WORK = LayerWorkload(TOP2, 1, T, D, F, E)
READS = ["kept_rows", "received_kept_rows", "kept_counts", "received_kept_counts", "received_kept_by_expert"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_CACHE", str(tmp_path / "cache"))


def traced(name="fastmoe", work=WORK, conventions=COMMON, ranks=RANKS):
    return trace_layer(get(name), work, ranks, conventions)


def rows_of(work, conventions, ranks=RANKS):
    """Kept rows [source, rank, local expert]."""
    answers = RoutingAnswers(work, ranks, conventions)
    rows = [answers.answer(rank, "kept_counts") for rank in range(ranks)]
    return np.array(rows).reshape(ranks, ranks, work.experts // ranks)


def exchanges(program, phase=None):
    """The uneven ones, in order."""
    return [
        op.collective
        for op in program.ops
        if op.name == "moebench::all_to_all_into_start" and phase in (None, op.phase)
    ]


@pytest.mark.parametrize("conventions", [COMMON, DROPLESS], ids=["capacity", "dropless"])
@pytest.mark.parametrize("kind", ["iid", "zipf"])
def test_rows_travel_once_each_way_and_none_is_padded(kind, conventions):
    """For each local expert an exchange of exact sizes: N D b bytes there, as many back, and both for the gradients."""
    work = replace(WORK, routing=RoutingSpec(kind))
    rows = rows_of(work, conventions)
    local = E // RANKS
    for program in traced(work=work, conventions=conventions):
        for rank in program.stands_for:
            there = [tuple(4 * D * n for n in rows[rank, :, index]) for index in range(local)]
            back = [tuple(4 * D * n for n in rows[:, rank, index]) for index in range(local)]
            forward = exchanges(program, FORWARD)
            assert [c.send_bytes for c in forward] == there + back
            assert [c.receive_bytes for c in forward] == back + there
            assert [c.send_bytes for c in exchanges(program, BACKWARD)] == there + back
            received = int(rows[:, rank].sum())
            experts = sum(op.flops for op in program.ops if op.region == "experts")
            assert experts == 12 * received * D * F


def test_balanced_rows_cross_as_the_table_says():
    """papers/baselines.md 1: k S M b (W - 1) / W leave a rank when balanced, against E C M b (W - 1) / W padded."""
    (program,) = traced(work=replace(WORK, routing=RoutingSpec("exact")))
    for half in (exchanges(program, FORWARD)[:2], exchanges(program, FORWARD)[2:]):
        away = sum(sum(c.send_bytes) - c.send_bytes[0] for c in half)
        assert away == 2 * T * D * 4 * (RANKS - 1) // RANKS


@pytest.mark.parametrize("ranks", [1, 4])
def test_counts_are_exchanged_and_read_five_times(ranks):
    """8 E bytes of int64 to all ranks; two totals and three copies stop the host, whatever the ranks."""
    for program in traced(ranks=ranks):
        counts = [op.collective for op in program.ops if op.name == "moebench::all_to_all_start"]
        assert [c.bytes_per_peer for c in counts] == ([8 * E // ranks] if ranks > 1 else [])
        assert [op.name for op in program.ops if op.kind == "host-read"] == [f"host::{name}" for name in READS]
        assert len(exchanges(program)) == (4 * E // ranks if ranks > 1 else 0)


@pytest.mark.parametrize("with_gradient", [True, False])
def test_dispatch_and_combine_move_rows_by_index(with_gradient):
    """Gather N rows; backward zeros T rows and adds N. Combine: zeros T K rows, copies N, multiplies 2 T K D FLOPs."""
    work = replace(WORK, input_gradient=with_gradient)
    rows = rows_of(work, COMMON)
    for program in traced(work=work):
        sent = int(rows[program.rank].sum())
        by_name = {}
        for op in program.ops:
            by_name.setdefault((op.region, op.phase, op.name.removeprefix("aten::")), []).append(op)

        def only(*key, by_name=by_name):
            (op,) = by_name[key]
            return op

        row = 4 * D
        gathered = [op for op in by_name["dispatch", FORWARD, "index_select"] if op.dtype == "fp32"]
        assert [(op.bytes_read, op.bytes_written) for op in gathered] == [(sent * (row + 8), sent * row)]
        copied = only("combine", FORWARD, "index_copy_")
        assert (copied.bytes_read, copied.bytes_written) == (sent * (row + 8), sent * row)
        assert only("combine", FORWARD, "new_zeros").bytes_written == T * 2 * row
        assert only("combine", FORWARD, "bmm").flops == 2 * T * 2 * D
        assert sum(op.flops for op in by_name["combine", BACKWARD, "bmm"]) == 4 * T * 2 * D
        assert only("combine", BACKWARD, "index_select").bytes_written == sent * row
        added = by_name.get(("dispatch", BACKWARD, "index_add_"), [])
        assert [op.bytes_written for op in added] == ([sent * row] if with_gradient else [])
        # A router's product each way, and nothing else multiplies.
        assert only("gate", FORWARD, "mm").flops == 2 * T * E * D


@pytest.mark.parametrize("held", [1, 2, 4])
def test_experts_take_slices_and_are_joined(held):
    """Each local expert's rows are a slice, outputs a copy; a slice's gradient is zeros for all rows and its part."""
    work = replace(WORK, experts=held * RANKS)
    for program in traced(work=work):
        received = int(rows_of(work, COMMON)[:, program.rank].sum())
        inside = [op for op in program.ops if op.region == "experts"]
        (joined,) = [op for op in inside if op.name == "aten::cat"]
        assert joined.bytes_written == received * 4 * D
        slices = [op for op in inside if op.name == "aten::slice_backward"]
        assert len(slices) == held
        products = [op for op in inside if op.kind == "product" and op.phase == FORWARD]
        assert len(products) == 2 * held


def test_the_naive_gate_is_a_softmax_over_the_chosen_logits():
    """As shipped, top-k: weights p_k / sum p_k, no drop, no loss; with one choice the weight is 1, the gradient 0."""
    system = get("fastmoe")
    values = weights()
    values.gate_DE.mul_(3)
    x, upstream = torch.randn(24, 16, dtype=torch.float64), torch.randn(24, 16, dtype=torch.float64)
    shipped = replace(system.as_shipped(TOP2), gate_dtype="fp64")
    assert (shipped.is_dropless, shipped.normalisation, shipped.auxiliary) == (True, "before-drop", 0.0)
    y, aux, _, router, *_ = step(build(system, workload(TOP2), shipped, values), x, upstream)
    top_TK, experts_TK = (x @ values.gate_DE).topk(2, dim=1)
    expected = torch.zeros_like(x)
    for choice in range(2):
        for token in range(24):
            expert = int(experts_TK[token, choice])
            hidden = torch.relu(x[token] @ values.w1_LDF[expert])
            expected[token] += top_TK.softmax(1)[token, choice] * (hidden @ values.w2_LFD[expert])
    torch.testing.assert_close(y, expected)
    assert aux == 0
    assert router.abs().sum() > 0
    one = step(build(system, workload(GateSpec("topk", 1)), shipped, values), x, upstream)
    assert (one[3] == 0).all()


def test_the_gshard_gate_uses_a_second_expert_with_twice_its_weight():
    """As shipped: C = ceil(T) k // E, token-major, raw weights of the pair; the second route survives as 2 w says."""
    system, spec = get("fastmoe"), GateSpec("gshard", 2)
    shipped = system.as_shipped(spec)
    assert (shipped.capacity_rule, shipped.choice_order, shipped.noise) == (
        "floor-of-product", "token-major", "random-second",
    )  # fmt: skip
    assert shipped.capacity(10, 4, 2, 1.2) == 6
    values = weights()
    values.gate_DE.zero_()
    values.gate_DE[:8] = torch.eye(8)
    layer = build(system, workload(spec, capacity_factor=60.0), replace(shipped, gate_dtype="fp64"), values)
    x = torch.zeros(4000, 16, dtype=torch.float64)
    x[:, 0], x[:, 1] = 2.0, 0.9
    y = layer(x)[0]
    weight = float(torch.tensor([2.0, 0.9]).softmax(0)[1])
    alone = layer.eval()(x)[0][0]
    assert 0 < 2 * weight < 1
    share = float(((y - alone).abs().sum(1) < 1e-9).double().mean())
    assert share == pytest.approx(2 * weight, abs=0.03)


def test_what_it_lacks_is_said():
    """Random and probabilistic drops, weights after the drop, jitter, weights inside the experts, a bf16 gate."""
    system = get("fastmoe")
    for change, words in (
        ({"drop_order": "random"}, "drop_order arrival, not random"),
        ({"normalisation": "after-drop"}, "normalisation none or before-drop, not after-drop"),
        ({"noise": "input-jitter"}, "noise none or random-second or gumbel, not input-jitter"),
        ({"weight_site": "before-second-product"}, "weight_site output, not before-second-product"),
        ({"gate_dtype": "bf16"}, "gate_dtype fp32 or fp64, not bf16"),
    ):
        assert words in system.supports(workload(TOP2), replace(COMMON, **change))
    assert system.supports(workload(TOP2), DROPLESS) is None


def every_instance(system, specs):
    """Each rule with capacity, without, and as shipped, in float64; evaluated where it differs, random ones probed."""
    found = []
    for spec in specs:
        for rules in (COMMON, DROPLESS, system.as_shipped(spec)):
            fp64 = [one for one in instances(system, spec, "fp64", rules, 4, "relu") if one.workload.dtype == "fp64"]
            found += [one for one in fp64 if one.is_probe or one.conventions.gate_dtype == "fp64"]
    return tuple(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("name", "specs"),
    [("fastmoe", EVERY), ("fastermoe", EVERY), ("fastermoe+group=2", FEW), ("fastermoe+group=3", FEW)],
)
def test_every_rule_passes_on_four_ranks(name, specs):
    """Outputs, losses and gradients of two steps, an empty rank and uneven tokens among them."""
    wanted = every_instance(get(name), specs)
    assert {one.workload.gate for one in wanted} == set(specs)
    assert any(0 in one.tokens for one in wanted)
    assert specs is FEW or any(not one.training for one in wanted)
    seen = run_ranks("moebench.checks.instance:run_rank", 4, (name, wanted), timeout_s=240)
    for place, one in enumerate(wanted):
        found = check_verdict.problem(one, [of_rank[place] for of_rank in seen])
        assert found is None, f"{one.workload.gate.label}, {one.conventions}, {one.workload.dtype}: {found}"


@pytest.mark.parametrize("name", ["fastmoe", "fastermoe"])
def test_the_correctness_gate_lets_it_through(name):
    """On 2 x 2 ranks, common and as shipped."""
    assert check(name, TOP2) == check(name, TOP2, "bf16", "as-shipped") == Status("passed")


@pytest.mark.parametrize("conventions", [FP64, replace(DROPLESS, gate_dtype="fp64")], ids=["capacity", "dropless"])
@pytest.mark.parametrize("name", NAMES)
def test_all_tokens_to_one_expert(name, conventions):
    """Everyone's first choice lives on rank 0; ranks with 24, 0, 5 and 24 tokens, two steps, all gradients."""
    tokens, spec = (24, 0, 5, 24), TOP2
    if not conventions.is_dropless:
        tokens = (24, 21, 22, 24)  # equal capacity, as the others need it
    target = f"{fastmoe_on_ranks.__name__}:two_steps_with_all_to_one"
    seen = run_ranks(target, 4, (name, spec, conventions, tokens))
    experts = fastmoe_on_ranks.HELD * 4
    values, work = fastmoe_on_ranks.weights_of(experts), LayerWorkload(spec, 1, 24, 16, 12, experts, dtype="fp64")
    tensors = [values.gate_DE, values.w1_LDF, values.w2_LFD]
    inputs = [fastmoe_on_ranks.everyone_wants(experts, 2, count, rank) for rank, count in enumerate(tokens)]
    for number in range(2):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        xs = [x_TD.clone().requires_grad_() for x_TD, _ in inputs]
        results = reference_layer(xs, type(values)(*leaves), work, conventions)
        outputs = [y for y, _, _ in results] + [aux for _, aux, _ in results if aux.requires_grad]
        shares = [upstream / 4 for _, upstream in inputs] + [torch.tensor(0.25, dtype=torch.float64)] * 4
        torch.autograd.backward(outputs, shares[: len(outputs)])
        for rank, own in enumerate(seen):
            held = slice(2 * rank, 2 * rank + 2)
            right = (results[rank][0].detach(), xs[rank].grad, *(leaf.grad for leaf in leaves))
            right = (*right[:3], right[3][held], right[4][held])
            for ours, theirs in zip(own[number], right, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)
        tensors = [tensor - 0.05 * leaf.grad for tensor, leaf in zip(tensors, leaves, strict=True)]


def test_ties_go_to_the_lowest_expert():
    """Equal logits everywhere: experts 0 and 1, as in the reference, whose counts answer a trace."""
    from moebench.systems.fastmoe_gate import route

    for normalisation in ("none", "before-drop"):
        rules = replace(DROPLESS, normalisation=normalisation)
        routes = route(torch.zeros(5, 8), workload(TOP2, tokens=5), rules, GateContext())
        assert routes.counts_E.tolist() == [5, 5, 0, 0, 0, 0, 0, 0]
        torch.testing.assert_close(routes.weights_TK, torch.full((5, 2), 0.125 if normalisation == "none" else 0.5))


def test_unused_memory_is_never_read():
    """Fresh memory full of NaN: nothing of it in the output or a gradient, also where an expert is empty."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        for spec in (GateSpec("switch"), TOP2):
            layer = get("fastmoe").build(workload(spec), described_group(1), FP64, CPU, torch.float64)
            values = weights()
            values.gate_DE[:, 5:] = -30 * values.gate_DE[:, 5:].abs()
            layer.load_weights(values)
            x = torch.rand(24, 16, dtype=torch.float64)
            for found in step(layer, x, torch.randn(24, 16, dtype=torch.float64)):
                assert found is None or torch.isfinite(found).all()
    finally:
        torch.set_deterministic_debug_mode(before)
