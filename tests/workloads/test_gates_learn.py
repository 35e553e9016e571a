"""Every rule learns: a short real training on clustered data, where a token's cluster decides the right answer.

The layer is the reference system's, one process, plain torch autograd and Adam. Each cluster has a direction in the
input, a few token ids of its own, and a linear map that its tokens should undergo; one expert alone can't serve two.
"""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from moebench.kernels.collectives.group import described_group
from moebench.systems.reference import REFERENCE, ReferenceLayer
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


@dataclass
class Batch:
    """Inputs [T, D], targets [T, D], the cluster and the token id of every token."""

    x_TD: Tensor
    target_TD: Tensor
    cluster_T: Tensor
    token_ids_T: Tensor


@dataclass
class Data:
    """What makes a cluster."""

    centre_CD: Tensor
    map_CDD: Tensor
    random: torch.Generator

    def batch(self) -> Batch:
        cluster_T = torch.randint(CLUSTERS, (TOKENS,), generator=self.random)
        x_TD = 3 * self.centre_CD[cluster_T] + 0.5 * torch.randn(TOKENS, D, generator=self.random)
        target_TD = torch.einsum("td,tde->te", x_TD, self.map_CDD[cluster_T])
        ids_T = cluster_T + CLUSTERS * torch.randint(64 // CLUSTERS, (TOKENS,), generator=self.random)
        return Batch(x_TD, target_TD, cluster_T, ids_T)


def clustered(seed=0):
    random = torch.Generator().manual_seed(seed)
    centre_CD = torch.linalg.qr(torch.randn(D, CLUSTERS, generator=random)).Q.t()
    return Data(centre_CD, torch.randn(CLUSTERS, D, D, generator=random) / D**0.5, random)


def fresh_layer(spec, conventions, capacity_factor):
    workload = LayerWorkload(spec, 1, TOKENS, D, 32, EXPERTS, capacity_factor=capacity_factor)
    torch.manual_seed(0)
    return REFERENCE.build(workload, described_group(1), conventions, torch.device("cpu"), torch.float32)


def loss_of(layer: ReferenceLayer, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean squared error of x + layer(x), as in a residual block, and the auxiliary loss."""
    if layer.token_ids_T is not None:
        layer.token_ids_T = batch.token_ids_T
    y_TD, aux = layer(batch.x_TD)
    return (y_TD - batch.target_TD).square().mean(), aux


def train(layer, data):
    """Mean loss over the first and the last steps."""
    optimizer, losses = torch.optim.Adam(layer.parameters(), lr=1e-2), []
    for step in range(STEPS):
        layer.step = step
        loss, aux = loss_of(layer, data.batch())
        optimizer.zero_grad()
        (loss + 0.01 * aux).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[:5]) / 5, sum(losses[-10:]) / 10


def consistency(layer, batch):
    """Share of the routes, in evaluation, to the K experts that their cluster uses most; by chance about K/E.

    Rules that in training give all experts equally many tokens, so that a cluster has E / CLUSTERS, are asked there.
    """
    most, is_even = layer.workload.gate.top_k, layer.workload.gate.name in ("base", "sinkhorn")
    layer.train(is_even)
    if is_even:
        most = max(most, EXPERTS // CLUSTERS)
    if layer.token_ids_T is not None:
        layer.token_ids_T = batch.token_ids_T
    with torch.no_grad():
        experts_TK = layer.route(batch.x_TD).experts_TK
    favourite = routes = 0
    for cluster in range(CLUSTERS):
        used = Counter(expert for expert in experts_TK[batch.cluster_T == cluster].reshape(-1).tolist() if expert >= 0)
        favourite += sum(times for _, times in used.most_common(most))
        routes += used.total()
    return favourite / routes


@pytest.mark.parametrize(("spec", "conventions"), CASES, ids=lambda value: getattr(value, "label", "conventions"))
def test_a_rule_learns(spec, conventions):
    """The loss falls clearly, and a learned router comes to give the tokens of a cluster the same experts."""
    data = clustered()
    layer = fresh_layer(spec, conventions, capacity_factor=4.0)
    before = consistency(layer, data.batch())
    first, last = train(layer.train(), data)
    assert last < 0.4 * first, (first, last)
    if GATES[spec.name].has_router:
        after = consistency(layer, data.batch())
        assert after > max(0.7, before + 0.05), (before, after)


def test_one_expert_alone_does_not_do_it():
    """The task needs experts: with all tokens on one of them the loss stays far above a mixture's."""
    alone, mixed = clustered(), clustered()
    spec = gate("hash", vocabulary=64)
    layer = fresh_layer(spec, COMMON, capacity_factor=16.0)
    getattr(layer.gate, hash.STATE).zero_()
    other = fresh_layer(gate("switch"), COMMON, capacity_factor=4.0)
    assert train(layer, alone)[1] > 1.2 * train(other, mixed)[1]


def test_a_table_by_cluster_serves_as_well_as_a_router():
    """Hash with an informed table: every cluster's ids on an expert of their own (Roller et al., section 3)."""
    layer = fresh_layer(gate("hash", vocabulary=64), COMMON, capacity_factor=4.0)
    getattr(layer.gate, hash.STATE).copy_(torch.arange(64) % CLUSTERS)
    informed = train(layer, clustered())[1]
    random = train(fresh_layer(gate("hash", vocabulary=64), COMMON, 4.0), clustered())[1]
    assert informed < 0.7 * random


def test_the_balance_loss_balances():
    """From a router that sends nearly all tokens to one expert, the loss alone brings the counts together."""
    data = clustered()
    for spec in (gate("switch"), gate("topk", 2), gate("ktop1"), gate("sam", groups=2)):
        layer = fresh_layer(spec, COMMON, capacity_factor=8.0)
        with torch.no_grad():
            layer.gate.weight_ED.copy_(0.1 * layer.gate.weight_ED)
            layer.gate.weight_ED[0] += data.centre_CD.sum(0)
        batch = data.batch()
        optimizer = torch.optim.Adam([layer.gate.weight_ED], lr=3e-2)
        spread = []
        for _ in range(60):
            routing = layer.route(batch.x_TD)
            spread.append(float(routing.counts_E.double().std()))
            optimizer.zero_grad()
            routing.aux.backward()
            optimizer.step()
        assert spread[-1] < 0.6 * spread[0], spec.label
