"""What ranks run in test_megatron_decoder_package.py; apart, so that a rank does not import pytest."""

from contextlib import contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from moebench.systems.megatron import indexed
from moebench.systems.megatron.mesh import mesh_of

TOKENS, EXPERTS, WIDTH, CHOICES = 12, 8, 16, 2


def both_dispatchers(group, tensor):
    """By dispatcher (ours, the package's): results of this rank's tokens, and their gradient."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor, expert_model_parallel_size=group.size // tensor
    )
    mesh = mesh_of(group, tensor)
    generator = torch.Generator().manual_seed(group.rank)
    x_TD = torch.randn(TOKENS, WIDTH, generator=generator)
    scores_TE = torch.randn(TOKENS, EXPERTS, generator=generator)
    weights_TK, experts_TK = scores_TE.softmax(1).topk(CHOICES, 1)
    if 1 < tensor < group.size:  # gloo gathers no uneven rows, which the package leaves to NCCL
        experts_TK = ((torch.arange(TOKENS * CHOICES) + group.rank) % EXPERTS).view(TOKENS, CHOICES)
    upstream_TD = torch.randn(TOKENS, WIDTH, generator=generator)
    found = {}
    for name, run in indexed.DISPATCHERS.items():
        own_TD = x_TD.clone().requires_grad_()
        y_TD = run(own_TD, experts_TK, weights_TK, mesh, EXPERTS, lambda x_ND, ends_L: _experts(x_ND, ends_L, mesh))
        y_TD.backward(upstream_TD)
        ours = y_TD.detach(), own_TD.grad
        found[name] = ours, _theirs(name, x_TD, experts_TK, weights_TK, upstream_TD, mesh)
    return found


def _experts(x_ND, ends_L, mesh) -> Tensor:
    """Each row times a number of its expert and of this tensor-parallel rank."""
    expert_N = torch.searchsorted(ends_L, torch.arange(len(x_ND)), right=True)
    first = mesh.expert.index * (EXPERTS // mesh.expert.size)
    return x_ND * (1.0 + first + expert_N + 0.1 * mesh.tensor.index).unsqueeze(1)


def _theirs(name, x_TD, experts_TK, weights_TK, upstream_TD, mesh):
    from megatron.core.transformer.moe import token_dispatcher

    config = SimpleNamespace(
        tensor_model_parallel_size=mesh.tensor.size,
        expert_model_parallel_size=mesh.expert.size,
        num_moe_experts=EXPERTS,
        moe_router_topk=CHOICES,
        add_bias_linear=False,
        deterministic_mode=True,
        moe_pad_expert_input_to_capacity=False,
        moe_expert_capacity_factor=None,
        moe_extended_tp=False,
    )
    local = EXPERTS // mesh.expert.size
    held = [mesh.expert.index * local + number for number in range(local)]
    kind = {"alltoall": "MoEAlltoAllTokenDispatcher", "allgather": "MoEAllGatherTokenDispatcher"}[name]
    with without_the_devices():
        dispatcher = getattr(token_dispatcher, kind)(local, held, config=config)
        own_TD = x_TD.clone().requires_grad_()
        rows_ND, counts_L = dispatcher.token_permutation(own_TD.unsqueeze(1), weights_TK, experts_TK)
        y_ND = _experts(rows_ND, counts_L.cumsum(0), mesh)
        y_TD = dispatcher.token_unpermutation(y_ND)[0].squeeze(1)
        y_TD.backward(upstream_TD)
    return y_TD.detach(), own_TD.grad


@contextmanager
def without_the_devices():
    """CUDA's answers on a CPU."""
    stream = SimpleNamespace(synchronize=lambda: None)
    with (
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("torch.cuda.current_stream", return_value=stream),
    ):
        yield
