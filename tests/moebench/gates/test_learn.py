"""Every rule learns: a short real training on clustered data, where a token's cluster decides the right answer."""

import pytest
import torch

from moebench.gates.learn import consistency, train
from moebench.kernels.collectives.group import described_group
from moebench.systems.reference import REFERENCE
from moebench.workloads.clustered import ClusteredTask
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.gates import hash
from moebench.workloads.gates.registry import GATES, gate
from moebench.workloads.layer import LayerWorkload

CLUSTERS, TOKENS, D, EXPERTS, STEPS = 4, 192, 16, 8, 120
NOISY_D2S = Conventions(noise="gumbel")
CASES = [
    (gate("switch"), COMMON),
    (gate("gshard"), COMMON),
    (gate("gshard"), Conventions(noise="gumbel-second", normalisation="after-drop")),
    (gate("topk", 3), COMMON),
    (gate("ktop1"), COMMON),
    (gate("hash", vocabulary=64), COMMON),
    (gate("hash", vocabulary=64, map="balanced"), COMMON),
    (gate("sam", groups=2), COMMON),
    (gate("dense-to-sparse", dense_steps=20, decay_steps=50, hard_after=75), COMMON),
    (gate("dense-to-sparse", dense_steps=20, decay_steps=50, hard_after=75), NOISY_D2S),
    (gate("base"), COMMON),
    (gate("expert-choice"), COMMON),
    (gate("sigmoid", 2), COMMON),
    (gate("sigmoid", 2, groups=4, kept_groups=2), Conventions(normalisation="before-drop")),
    (gate("bpr"), COMMON),
    (gate("sinkhorn"), COMMON),
]


def clustered():
    return ClusteredTask(CLUSTERS, D)


def fresh_layer(spec, conventions, capacity_factor):
    workload = LayerWorkload(spec, 1, TOKENS, D, 32, EXPERTS, capacity_factor=capacity_factor)
    torch.manual_seed(0)
    return REFERENCE.build(workload, described_group(1), conventions, torch.device("cpu"), torch.float32)


def losses(layer, task):
    """Mean loss over the first and the last steps."""
    seen = []
    train(layer, task, STEPS, lambda moment: seen.append(moment.loss))
    return sum(seen[:5]) / 5, sum(seen[-10:]) / 10


@pytest.mark.parametrize(("spec", "conventions"), CASES, ids=lambda value: getattr(value, "label", "conventions"))
def test_a_rule_learns(spec, conventions):
    """The loss falls clearly, and a learned router comes to give the tokens of a cluster the same experts."""
    task = clustered()
    layer = fresh_layer(spec, conventions, capacity_factor=4.0)
    before = consistency(layer, task.batch(TOKENS), CLUSTERS)
    first, last = losses(layer, task)
    assert last < 0.4 * first, (first, last)
    assert layer.step == STEPS
    if GATES[spec.name].has_router:
        after = consistency(layer, task.batch(TOKENS), CLUSTERS)
        assert after > max(0.7, before + 0.05), (before, after)


def test_one_expert_alone_does_not_do_it():
    """The task needs experts: with all tokens on one of them the loss stays far above a mixture's."""
    alone, mixed = clustered(), clustered()
    spec = gate("hash", vocabulary=64)
    layer = fresh_layer(spec, COMMON, capacity_factor=16.0)
    getattr(layer.gate, hash.STATE).zero_()
    other = fresh_layer(gate("switch"), COMMON, capacity_factor=4.0)
    assert losses(layer, alone)[1] > 1.2 * losses(other, mixed)[1]


def test_a_table_by_cluster_serves_as_well_as_a_router():
    """Hash with an informed table: every cluster's ids on an expert of their own (Roller et al., section 3)."""
    layer = fresh_layer(gate("hash", vocabulary=64), COMMON, capacity_factor=4.0)
    getattr(layer.gate, hash.STATE).copy_(torch.arange(64) % CLUSTERS)
    informed = losses(layer, clustered())[1]
    random = losses(fresh_layer(gate("hash", vocabulary=64), COMMON, 4.0), clustered())[1]
    assert informed < 0.7 * random


def test_the_balance_loss_balances():
    """From a router that sends nearly all tokens to one expert, the loss alone brings the counts together."""
    data = clustered()
    for spec in (gate("switch"), gate("topk", 2), gate("ktop1"), gate("sam", groups=2)):
        layer = fresh_layer(spec, COMMON, capacity_factor=8.0)
        with torch.no_grad():
            layer.gate.weight_ED.copy_(0.1 * layer.gate.weight_ED)
            layer.gate.weight_ED[0] += data.centre_CD.sum(0)
        batch = data.batch(TOKENS)
        optimizer = torch.optim.Adam([layer.gate.weight_ED], lr=3e-2)
        spread = []
        for _ in range(60):
            routing = layer.route(batch.x_TD)
            spread.append(float(routing.counts_E.double().std()))
            optimizer.zero_grad()
            routing.aux.backward()
            optimizer.step()
        assert spread[-1] < 0.6 * spread[0], spec.label
