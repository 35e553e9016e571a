"""Small stores for the tests of this folder; apart, so that a process that is to be killed imports no pytest."""

import random

import torch

from moebench.systems.moesys.experts import create_store
from moebench.systems.moesys.state_layout import StateLayout

LAYOUT = StateLayout({"w1_DF": (2, 3), "w2_FD": (3, 2)})


def experts_of(layout, layers=1, experts=4, seed=0):
    """Random parameters of every expert."""
    generator = torch.Generator().manual_seed(seed)
    return {
        (layer, expert): {name: torch.randn(shape, generator=generator) for name, shape in layout.shapes.items()}
        for layer in range(layers)
        for expert in range(experts)
    }


def small_store(folder, layers=1, experts=4, layout=LAYOUT):
    """A store in a new folder."""
    return create_store(folder, layout, experts_of(layout, layers, experts))


def fill(record_B, value):
    """Make a record one that only `value` gives."""
    record_B.copy_(torch.frombuffer(bytearray(random.Random(value).randbytes(len(record_B))), dtype=torch.uint8))


def changed_in(step, keys):
    """The states that step number `step` of the process that is killed changes."""
    return random.Random(step).sample(list(keys), 3)
