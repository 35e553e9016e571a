"""What ranks run in test_megatron_package.py; apart, so that a rank does not import pytest."""

import torch

from benchmarks.megatron_package import package_layer, random_weights, without_a_gpu
from moebench.systems.interface import LayerWeights
from moebench.systems.registry import get, stem_of
from moebench.systems.training import TrainingStep

CPU = torch.device("cpu")
DISPATCHERS = {"megatron": "alltoall", "megatron_allgather": "allgather"}


def both_layers_of_each(group, cases):
    """`both_layers` of every case."""
    return [both_layers(group, *case) for case in cases]


def both_layers(group, name, workload, conventions, config):
    """(ours, the package's): output, loss, gradients of input, router (summed over ranks), first and second weights."""
    torch.manual_seed(1)
    every = random_weights(workload, workload.experts)
    held = workload.experts // group.size
    own = slice(group.index * held, (group.index + 1) * held)
    w3_LDF = None if every.w3_LDF is None else every.w3_LDF[own]
    weights = LayerWeights(every.gate_DE, every.w1_LDF[own], every.w2_LFD[own], w3_LDF)
    torch.manual_seed(group.rank)
    x_TD, upstream_TD = (torch.randn(workload.tokens, workload.d_model) for _ in range(2))
    upstream_TD /= group.size
    return _ours(group, name, workload, conventions, weights, x_TD, upstream_TD), _theirs(
        name, workload, conventions, weights, x_TD, upstream_TD, config
    )


def _ours(group, name, workload, conventions, weights, x_TD, upstream_TD):
    layer = get(name).build(workload, group, conventions, CPU, torch.float32)
    layer.load_weights(weights)
    x_TD = x_TD.clone().requires_grad_()
    y_TD, aux = TrainingStep(layer, group, learning_rate=0.0)(x_TD, upstream_TD)
    own = layer.weight_gradients()
    first = own.w1_LDF if own.w3_LDF is None else torch.cat([own.w1_LDF, own.w3_LDF], dim=2)
    return y_TD.detach(), aux.detach(), x_TD.grad, own.gate_DE, first, own.w2_LFD


def _theirs(name, workload, conventions, weights, x_TD, upstream_TD, config):
    with without_a_gpu():
        call = package_layer(workload, conventions, DISPATCHERS[stem_of(name)], weights, **config)
        x_TD = x_TD.clone().requires_grad_()
        y_TD, aux = call(x_TD)
        y_TD.backward(upstream_TD)
    router_DE = call.layer.router.weight.grad.t().contiguous()
    torch.distributed.all_reduce(router_DE)
    experts = call.layer.experts.local_experts
    first = torch.stack([expert.linear_fc1.weight.grad.t() for expert in experts])
    second = torch.stack([expert.linear_fc2.weight.grad.t() for expert in experts])
    return y_TD.detach(), aux.detach(), x_TD.grad, router_DE, first, second
