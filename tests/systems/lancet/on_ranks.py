"""What ranks run in this folder's tests; apart, so that a rank does not import pytest."""

import torch

from moebench.systems.lancet.executor import Executor
from moebench.systems.lancet.training import eager_gradients
from tests.systems.lancet.models import data_of, inputs_of, model_of


def plans_equal_eager(group, cases):
    """Of each (shape, plan): whether loss and all gradients are those of eager mode, bit for bit."""
    same = []
    for shape, plan in cases:
        model, data = model_of(shape, group), data_of(shape, group.rank)
        loss, gradients = eager_gradients(model, data, group)
        found = Executor(plan, group, "cpu")(inputs_of(model, data, 1 / group.size))
        same.append(torch.equal(found[0], loss) and all(map(torch.equal, found[1:], gradients)))
    return same
