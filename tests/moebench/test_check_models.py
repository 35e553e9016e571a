"""No number of a model before its loss and gradients are right: what passes, and what is found."""

import torch

from moebench import check_models
from moebench.kernels.collectives.group import described_group
from moebench.systems import mixed_adam
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
    """States on every rank and divided, recomputed and not; the second step is one of changed weights."""
    two, ways = GateSpec("topk", 2), ("moesys", "deepspeed", "deepspeed+zero=2")
    found = check_models._tried([(way, two, "adamw", way != "deepspeed") for way in ways] + [("lancet", two, "adamw")])
    assert [one.status for one in found] == ["passed"] * 3 + ["unsupported"], found
    assert "trains with sgd" in found[3].reason


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
