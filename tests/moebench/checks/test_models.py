"""No number of a model before its loss and gradients are right: what passes, and what is found."""

import pytest
import torch

from moebench.checks import models as check_models
from moebench.kernels.collectives.grad_clip import clip_gradients as clip
from moebench.kernels.collectives.group import described_group
from moebench.ranks.run import run_ranks
from moebench.systems import mixed_adam, model_training
from moebench.systems.model_registry import get
from moebench.workloads.layer import GateSpec

ALONE = described_group(1)


def test_systems_train_the_model_on_real_ranks():
    """One start for a system with every pass, with both gates, and for one that is a layer; some lack a gate."""
    trials = [("lancet", GateSpec("switch")), ("tutel+degree=2", GateSpec("bpr", 1)), ("deepspeed", GateSpec("bpr", 1))]
    found = check_models._tried(trials)
    assert [one.status for one in found] == ["passed", "passed", "unsupported"]
    assert "no gate bpr" in found[2].reason


def test_systems_train_with_adam_on_real_ranks():
    """States on every rank, divided and in slices, recomputed and not, clipped and not, MoESys' strategies on and off;
    the second step is one of changed weights."""
    two, paper = GateSpec("topk", 2), "moesys+as=paper"
    ways = [(way, True) for way in ("deepspeed", "deepspeed+zero=2", "moesys", paper, "moesys+gate=released")]
    ways += [(f"{paper}+fusion=false+prefetch=false+recompute=false", True), ("moesys+stage=0+fusion=false", False)]
    trials = [(way, two, "adamw", way != "deepspeed", clips) for way, clips in ways]
    found = check_models._tried([*trials, ("lancet", two, "adamw")])
    assert [one.status for one in found] == ["passed"] * len(ways) + ["unsupported"], found
    assert "trains with sgd" in found[-1].reason


@pytest.mark.parametrize("world", [1, 2])
def test_strategies_are_right_on_fewer_ranks(world):
    """Alone, and on two that are a node each."""
    ways = ("moesys", "moesys+as=paper", "moesys+gate=released+stage=3")
    trials = [(way, GateSpec("topk", 2), "adamw", True, True) for way in ways]
    if world == 1:
        assert check_models.run_rank(ALONE, trials) == [None] * len(trials)
        return
    found = run_ranks(check_models.TARGET, world, (tuple(trials),), 120, ranks_per_node=1)
    assert found == [[None] * len(trials)] * world


def test_a_wrong_norm_is_found(monkeypatch):
    """Clipping that counts this rank's experts alone, or what all ranks hold once a rank."""
    trial = ("moesys+stage=0", GateSpec("topk", 2), "adamw", True, True)
    assert check_models._problem(ALONE, *trial) is None
    monkeypatch.setattr(model_training, "clip_gradients", lambda shared, own, group, norm: clip(own, [], group, norm))
    assert "run 1" in check_models._problem(ALONE, *trial)


def test_a_wrong_update_is_found(monkeypatch):
    """A rank that does not take the others' parts of the parameters is seen by the second step."""
    trial = ("moesys", GateSpec("topk", 2), "adamw", True)
    assert check_models._problem(ALONE, *trial) is None
    monkeypatch.setattr(mixed_adam._Bucket, "take", lambda self, flat: None)
    assert "run 2" in check_models._problem(ALONE, *trial)


def test_a_wrong_gradient_is_found(monkeypatch):
    """One entry, of one parameter; and a parameter without a gradient."""
    gate, right = GateSpec("switch"), get("raf").build
    assert check_models._problem(ALONE, "raf", gate) is None

    def wrong(change):
        def build(*args, **kwargs):
            step = right(*args, **kwargs)
            return type(step)(step.run, step.parameters, lambda: change(step.gradients()), step.planned)

        monkeypatch.setattr(get("raf"), "build", build)
        return check_models._problem(ALONE, "raf", gate)

    name = "blocks.0.ffn.router_ED"
    assert name in wrong(lambda found: {**found, name: found[name] + torch.eye(*found[name].shape) * 1e-2})
    assert "no gradient of" in wrong(lambda found: {key: one for key, one in found.items() if key != name})
