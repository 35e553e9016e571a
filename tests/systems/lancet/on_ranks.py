"""What ranks run in this folder's tests; apart, so that a rank does not import pytest."""

import torch

from moebench.systems.lancet.executor import Executor
from moebench.systems.lancet.training import eager_gradients
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
