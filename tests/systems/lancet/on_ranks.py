"""What ranks run in this folder's tests; apart, so that a rank does not import pytest."""

from functools import partial

import torch

from moebench.systems.lancet.executor import Executor
from moebench.systems.lancet.profile import MeasuredProfile
from moebench.systems.lancet.system import LANCET, RAF
from moebench.systems.lancet.training import eager_gradients
from moebench.systems.model_interface import Place
from tests.systems.lancet.models import data_of, inputs_of, model_of


def largest_differences(group, cases):
    """Of each (shape, plan): how far loss and gradients are from eager mode, relative to the largest of each; 0: equal.

    NaN compares as infinitely far.
    """
    found = []
    for shape, plan in cases:
        model, data = model_of(shape, group), data_of(shape, group.rank)
        loss, gradients = eager_gradients(model, data, group)
        outputs = Executor(plan, group, "cpu")(inputs_of(model, data, 1 / group.size))
        found.append(max(_distance(a, b) for a, b in zip(outputs, (loss, *gradients), strict=True)))
    return found


def _distance(ours, theirs):
    if torch.equal(ours, theirs):
        return 0.0
    far = float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    return far if far == far else float("inf")


def parts_are_whole(group, cases):
    """Of each (shape, plan of the whole, plans in parts): how far loss and gradients are apart, relatively.

    Behind loss and gradients the plans give experts and rows of every layer: the same ones, some dropped.
    """
    found = []
    for shape, whole, *in_parts in cases:
        model, data = model_of(shape, group), data_of(shape, group.rank)
        inputs, first = inputs_of(model, data, 1 / group.size), 1 + len(list(model.parameters()))
        wanted = Executor(whole, group, "cpu")(inputs)
        assert len(wanted) > first
        assert any(bool((rows < 0).any()) for rows in wanted[first:])
        for plan in in_parts:
            outputs = Executor(plan, group, "cpu")(inputs)
            assert all(map(torch.equal, outputs[first:], wanted[first:]))
            found.append(max(_distance(a, b) for a, b in zip(outputs[:first], wanted[:first], strict=True)))
    return found


def measured_plan_is_right(group, shape):
    """Rank 0 plans by what all ranks measure; every rank's loss and gradients are those of the graph as it was."""
    cpu = torch.device("cpu")
    place = Place(group, cpu, partial(MeasuredProfile, runs=2, warm_up=1))
    planned, whole = (system.build(shape, place, seed=3) for system in (LANCET, RAF))
    data = data_of(shape, group.rank)
    assert _distance(planned.run(data), whole.run(data)) < 1e-5
    ours, theirs = planned.gradients(), whole.gradients()
    assert ours.keys() == theirs.keys()
    assert max(_distance(ours[name], theirs[name]) for name in ours) < 1e-4
    return None if planned.planned is None else (planned.planned.told, planned.planned.before.makespan_s)
