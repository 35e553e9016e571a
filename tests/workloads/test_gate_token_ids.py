"""The token ids of a workload, and what `exact` and the imposed input mean for rules with a structure of their own."""

from dataclasses import replace

import pytest
import torch

from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.gates import hash, steps
from moebench.workloads.gates.context import GateContext
from moebench.workloads.gates.registry import GATES, gate, get_gate
from moebench.workloads.layer import LayerWorkload, RoutingSpec
from moebench.workloads.routing import imposed_input, logits_for
from moebench.workloads.token_ids import ids_of_experts, token_ids_for

WORKLOAD = LayerWorkload(gate("hash", vocabulary=512), 4, 64, 24, 8, 16)
DROPLESS = replace(COMMON, capacity_rule="unlimited")


def routed(workload, rank=0, conventions=DROPLESS):
    """The rule on the workload's imposed input, as a system runs it."""
    rule = get_gate(workload.gate.name)
    x_TD, gate_DE = imposed_input(workload, rank)
    logits_TE = steps.router_logits(x_TD, gate_DE, conventions)
    context = GateContext(token_ids_T=token_ids_for(workload, rank) if rule.needs_token_ids else None)
    return rule.route(logits_TE, workload.gate, conventions, workload.capacity_factor, context=context)


def test_token_ids_are_the_same_everywhere():
    """A seed and a rank fix them; another of either changes them."""
    first = token_ids_for(WORKLOAD, 0)
    assert first.dtype == torch.int64
    assert first.shape == (256,)
    assert torch.equal(first, token_ids_for(WORKLOAD, 0))
    assert not torch.equal(first, token_ids_for(WORKLOAD, 1))
    assert not torch.equal(first, token_ids_for(replace(WORKLOAD, routing=RoutingSpec(seed=1)), 0))
    assert token_ids_for(replace(WORKLOAD, batch_size=0), 0).shape == (0,)


def test_independent_ids_follow_the_frequencies():
    """Uniform by default; with exponent 1, id 0 is about 1 / H(512) of the tokens."""
    many = replace(WORKLOAD, batch_size=1000)
    counts = torch.bincount(token_ids_for(many, 0), minlength=512)
    assert ((counts - 125).abs() < 6 * 125**0.5).all()
    zipf = replace(many, gate=gate("hash", vocabulary=512, token_alpha=1.0))
    share = float((token_ids_for(zipf, 0) == 0).double().mean())
    assert share == pytest.approx(float(hash.frequencies(hash.Options(vocabulary=512, token_alpha=1.0))[0]), rel=0.05)


def test_a_balanced_table_is_the_more_even_one():
    """Frequent ids make a random table uneven; the balanced one is built for them."""
    loads = {}
    for kind in hash.MAPS:
        spec = gate("hash", map=kind, vocabulary=512, token_alpha=0.7)
        loads[kind] = routed(replace(WORKLOAD, gate=spec, batch_size=100)).counts_E.max()
    assert loads["balanced"] < 1.1 * 6400 / 16 < loads["random"]


@pytest.mark.parametrize("kind", ["exact", "zipf"])
def test_imposed_kinds_say_which_expert_is_wanted(kind):
    """The table sends each token to the expert with its largest imposed logit."""
    workload = replace(WORKLOAD, routing=RoutingSpec(kind, seed=5))
    for rank in range(3):
        wanted_T = logits_for(workload, rank).argmax(1)
        assert torch.equal(routed(workload, rank).experts_TK[:, 0], wanted_T)


@pytest.mark.parametrize(
    "spec",
    [gate("switch"), gate("gshard"), gate("topk", 3), gate("ktop1"), gate("ktop1", 4), gate("hash", vocabulary=512),
     gate("sam", 2, groups=4), gate("sam", 2), gate("dense-to-sparse", first_step=6000)],
    ids=lambda spec: spec.label,
)  # fmt: skip
@pytest.mark.parametrize("rank", [0, 3])
def test_exact_routing_is_exact_for_every_rule(spec, rank):
    """T/E tokens an expert of each choice, nothing dropped at capacity factor 1."""
    workload = replace(WORKLOAD, gate=spec, routing=RoutingSpec("exact"))
    routing = routed(workload, rank, COMMON)
    assert routing.counts_E.tolist() == [spec.top_k * 256 // 16] * 16
    assert routing.dropped == 0


def test_exact_routing_of_an_uneven_workload_differs_by_one_a_group():
    """23 tokens, 16 experts in prototypes and groups: as even as it gets over all ranks."""
    for spec in (gate("ktop1"), gate("sam", 2, groups=4)):
        workload = replace(WORKLOAD, gate=spec, batch_size=1, sequence=23, routing=RoutingSpec("exact"))
        counts = sum(routed(workload, rank).counts_E for rank in range(16))
        assert int(counts.max() - counts.min()) <= 23 * 2


@pytest.mark.parametrize("name", sorted(GATES))
@pytest.mark.parametrize("kind", ["iid", "exact", "zipf"])
def test_the_imposed_input_routes_as_the_imposed_logits(name, kind):
    """Through the linear router and directly, for every rule."""
    workload = replace(WORKLOAD, gate=gate(name), routing=RoutingSpec(kind))
    rule = get_gate(name)
    context = GateContext(token_ids_T=token_ids_for(workload, 1) if rule.needs_token_ids else None)
    direct = rule.route(logits_for(workload, 1), workload.gate, COMMON, 1.0, context=context)
    through = routed(workload, 1, COMMON)
    assert torch.equal(direct.experts_TK, through.experts_TK)
    torch.testing.assert_close(direct.weights_TK, through.weights_TK)


def test_other_rules_have_no_token_ids():
    """They route by logits alone."""
    with pytest.raises(InputError, match="gate switch does not route by token id"):
        token_ids_for(replace(WORKLOAD, gate=gate("switch")), 0)


def test_an_expert_that_no_id_leads_to_is_an_error():
    """Three ids for eight experts: zipf routing wants one that is out of reach."""
    workload = replace(WORKLOAD, gate=gate("hash", vocabulary=3), experts=8, routing=RoutingSpec("zipf"))
    with pytest.raises(InputError, match=r"expert \d is wanted and none of the 3 token ids leads to it"):
        token_ids_for(workload, 0)


def test_every_id_of_an_expert_is_drawn():
    """Uniformly, from those that lead to it."""
    table = torch.tensor([1, 0, 1, 1])
    found = ids_of_experts(torch.ones(3000, dtype=torch.int64), table, 2, torch.Generator().manual_seed(0))
    assert torch.bincount(found, minlength=4).tolist() == pytest.approx([1000, 0, 1000, 1000], abs=120)
