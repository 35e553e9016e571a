"""What ranks run in test_fastmoe.py and test_fastermoe.py; apart, so that a rank does not import pytest."""

import torch

from moebench.systems.interface import LayerWeights
from moebench.systems.registry import get
from moebench.systems.training import TrainingStep
from moebench.workloads.layer import LayerWorkload

D, F, HELD = 16, 12, 2


def everyone_wants(experts, top_k, tokens, rank):
    """[T, D] whose first choice is expert 0, whose further ones differ, and the upstream gradient."""
    random = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(tokens, D, generator=random, dtype=torch.float64)
    x_TD[:, 0] = 9 + x_TD[:, 0].abs()
    return x_TD, torch.randn(tokens, D, generator=random, dtype=torch.float64)


def weights_of(experts):
    """Of all experts; the router's rows are unit vectors, so that columns of x are logits."""
    random = torch.Generator().manual_seed(99)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64) / shape[-2] ** 0.5

    return LayerWeights(torch.eye(D, experts, dtype=torch.float64), normal(experts, D, F), normal(experts, F, D))


def two_steps_with_all_to_one(group, name, spec, conventions, tokens):
    """Outputs, gradients and updated experts of two steps in which every token's first choice is expert 0."""
    experts = HELD * group.size
    workload = LayerWorkload(spec, 1, max(tokens), D, F, experts, dtype="fp64")
    layer = get(name).build(workload, group, conventions, torch.device("cpu"), torch.float64)
    values, own = weights_of(experts), slice(HELD * group.index, HELD * group.index + HELD)
    layer.load_weights(LayerWeights(values.gate_DE, values.w1_LDF[own], values.w2_LFD[own]))
    step, seen = TrainingStep(layer, group, learning_rate=0.05), []
    x_TD, upstream_TD = everyone_wants(experts, spec.top_k, tokens[group.index], group.index)
    for _ in range(2):
        x_TD = x_TD.detach().requires_grad_()
        y_TD, _ = step(x_TD, upstream_TD / group.size)
        gradients = layer.weight_gradients()
        seen.append((y_TD.detach(), x_TD.grad, gradients.gate_DE, gradients.w1_LDF, gradients.w2_LFD))
    return seen
