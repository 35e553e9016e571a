"""The correctness gate on every routing rule: the reference passes, layers with one fault do not."""

from dataclasses import replace

import pytest
import torch

from moebench.checks import random_rules as check_random
from moebench.checks import verdict as check_verdict
from moebench.checks.correctness import Status, Trial, check_all, instances, trial
from moebench.checks.instance import data, instance, observe
from moebench.kernels.collectives.group import described_group
from moebench.systems.reference import REFERENCE, ReferenceLayer
from moebench.workloads.conventions import COMMON
from moebench.workloads.gates import dense_to_sparse, hash, ktop1, noise
from moebench.workloads.gates.registry import GATES, gate
from tests.moebench.checks.test_correctness import _Broken

FP64 = replace(COMMON, gate_dtype="fp64")
HASH, KTOP1, SAM = gate("hash", vocabulary=64), gate("ktop1"), gate("sam", groups=3)
# Without an empty expert: SAM's last group has none more than a token takes, Sinkhorn evens out.
FULL = (gate("sam"), SAM, gate("sinkhorn"))
SOFT, DENSE = gate("dense-to-sparse"), gate("dense-to-sparse", dense_steps=1)
HARD = gate("dense-to-sparse", first_step=6000)
EVERY = (*map(gate, sorted(GATES)), HASH, gate("ktop1", 3), SAM, gate("sam", groups=2), DENSE, HARD)
GUMBEL = replace(COMMON, noise="gumbel")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBENCH_CACHE", str(tmp_path / "cache"))


def label(value):
    return value.label


def verdict(system, one):
    return check_verdict.problem(one, [observe(system, one, described_group(1))])


def test_the_reference_passes():
    """On 4 ranks as 2 x 2, in the case's dtype and in float64, in evaluation where that differs."""
    found = check_all([trial("reference", spec) for spec in EVERY])
    assert [spec.label for spec, status in zip(EVERY, found, strict=True) if status != Status("passed")] == []


@pytest.mark.parametrize("spec", EVERY, ids=label)
@pytest.mark.parametrize("change", [{"capacity_rule": "unlimited"}, {"drop_order": "random"}], ids=str)
def test_the_reference_passes_without_capacity_and_with_random_drops(spec, change):
    """One rank, every convention that the rule takes."""
    conventions = replace(COMMON, **change)
    if REFERENCE.supports(instance(spec, "fp32", COMMON, 1).workload, conventions) is None:
        for one in instances(REFERENCE, spec, "fp32", conventions, 1, "relu"):
            if not one.is_probe or drops(one):
                assert verdict(REFERENCE, one) is None


def drops(one):
    """Whether there is anything to drop at random."""
    return any(routing.dropped for routing in check_random.quiet_routings(one, data(one)))


@pytest.mark.parametrize("spec", EVERY, ids=label)
def test_the_instance_drops_and_leaves_an_expert_empty(spec):
    """For each rule whose slots follow the capacity rule; Dense-to-Sparse is one of them once it is hard."""
    one = instance(spec, "fp64", FP64, 4)
    routings = check_random.quiet_routings(one, data(one))
    assert len({routing.capacity for routing in routings}) == 1
    if not GATES[spec.name].fixes_capacity or spec == HARD:
        assert any(routing.dropped for routing in routings)
        assert (sum(routing.counts_E for routing in routings) == 0).any() == (spec not in FULL)


def test_evaluation_is_checked_where_it_differs():
    """Dense-to-Sparse is top-1 there, whatever the step."""
    found = instances(REFERENCE, SOFT, "fp32", COMMON, 4, "relu")
    assert [one.training for one in found] == [True, True, False]
    assert all(one.training for one in instances(REFERENCE, SAM, "fp32", COMMON, 4, "relu"))


class _HashesThePosition(ReferenceLayer):
    def route(self, x_TD):
        self.token_ids_T = torch.arange(len(x_TD))
        return super().route(x_TD)


class _RoutesAsTopk(ReferenceLayer):
    def route(self, x_TD):
        plain = replace(self.workload, gate=gate("topk", self.workload.gate.top_k))
        routing = GATES["topk"].route(self.gate(x_TD), plain.gate, self.conventions, plain.capacity_factor)
        return replace(routing, aux=super().route(x_TD).aux)


class _NoAlignment(ReferenceLayer):
    def route(self, x_TD):
        routing = super().route(x_TD)
        return replace(routing, aux=routing.aux_terms["balance"])


class _OneTemperature(ReferenceLayer):
    def route(self, x_TD):
        self.step = 5000
        return super().route(x_TD)


class _TrainsInEvaluation(ReferenceLayer):
    def route(self, x_TD):
        return super(_TrainsInEvaluation, self.train(True)).route(x_TD)


class _ForgetsTheThreshold(ReferenceLayer):
    def route(self, x_TD):
        self.workload = replace(self.workload, gate=gate("dense-to-sparse", threshold=0.0))
        return super().route(x_TD)


class _NeverAdvances(ReferenceLayer):
    def advance(self, stands_still=False):
        pass


@pytest.mark.parametrize(
    ("layer", "spec", "word"),
    [
        (_HashesThePosition, HASH, "output"),
        (_RoutesAsTopk, KTOP1, "output"),
        (_RoutesAsTopk, SAM, "output"),
        (_NoAlignment, SAM, "auxiliary loss"),
        (_OneTemperature, SOFT, "output"),
        (_ForgetsTheThreshold, SOFT, "output"),
        (_OneTemperature, DENSE, "output"),
        (_NeverAdvances, gate("sigmoid", 2), "bias_E of rank 0 in step 1"),
        (_NeverAdvances, DENSE, "output of rank 0 in step 2"),
    ],
)
def test_a_wrong_gate_is_stopped(layer, spec, word):
    """Another rule, another schedule, a loss left out, a state that never moves."""
    one = instance(spec, "fp64", FP64, 1)
    assert word in (verdict(_Broken(layer), one) or "")
    assert verdict(REFERENCE, one) is None


def test_a_layer_that_trains_in_evaluation_is_stopped():
    """The evaluation instance sees it, the others do not."""
    found = [verdict(_Broken(_TrainsInEvaluation), one) for one in instances(REFERENCE, SOFT, "fp64", FP64, 1, "relu")]
    assert [one is None for one in found] == [True, False]


def test_gumbel_noise_passes_by_its_invariants():
    """In every phase, on one rank and on four; the dense one has no noise."""
    phases = (SOFT, HARD, DENSE, gate("dense-to-sparse", weights="softmax"))
    for spec in phases:
        assert verdict(REFERENCE, instance(spec, "fp32", GUMBEL, 1, is_probe=True)) is None
    found = check_all([Trial(REFERENCE, spec, "fp32", GUMBEL) for spec in phases])
    assert list(found) == [Status("passed")] * len(phases)


@pytest.mark.parametrize("spec", [SOFT, HARD], ids=label)
def test_noise_that_never_varies_is_stopped(spec, monkeypatch):
    """A generator that starts anew at every call."""
    monkeypatch.setattr(
        dense_to_sparse, "gumbel_like", lambda x, _: noise.gumbel_like(x, torch.Generator().manual_seed(1))
    )
    assert "ignores the draw" in verdict(REFERENCE, instance(spec, "fp32", GUMBEL, 1, is_probe=True))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_noise_of_another_size_is_stopped(scale, monkeypatch):
    """Half and twice the noise: a quarter and four times the variance."""
    monkeypatch.setattr(dense_to_sparse, "gumbel_like", lambda x, g: scale * noise.gumbel_like(x, g))
    assert "variance of Gumbel" in verdict(REFERENCE, instance(SOFT, "fp32", GUMBEL, 1, is_probe=True))


class _Scales(ReferenceLayer):
    def route(self, x_TD):
        routing = super().route(x_TD)
        return replace(routing, weights_TK=routing.weights_TK * 1.1)


class _OtherLoss(ReferenceLayer):
    def route(self, x_TD):
        routing = super().route(x_TD)
        return replace(routing, aux=routing.aux * 1.1)


@pytest.mark.parametrize(("layer", "word"), [(_Scales, "do not sum to 1"), (_OtherLoss, "auxiliary loss")])
def test_noisy_shares_that_are_wrong_are_stopped(layer, word):
    """A tenth too much weight, a tenth too much loss."""
    assert word in verdict(_Broken(layer), instance(SOFT, "fp32", GUMBEL, 1, is_probe=True))


def test_the_gate_decides_how_many_experts_the_instance_has():
    """A multiple of the prototypes; groups large enough for the choices."""
    assert instance(gate("ktop1", 3), "fp32", COMMON, 4).workload.experts == 12
    assert instance(gate("sam", 2, groups=8), "fp32", COMMON, 4).workload.experts == 16
    assert ktop1.limits(gate("ktop1", 3), 8) is not None
    assert instance(HASH, "fp32", COMMON, 2).workload.experts == 4
    assert hash.STATE in GATES["hash"].initial_state(HASH, 4)
