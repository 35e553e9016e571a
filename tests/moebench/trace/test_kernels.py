"""Every shared kernel and collective runs the same operators on meta tensors as on real ones, forward and backward."""

import pytest
import torch

from moebench.kernels import explicit, optimizer
from moebench.kernels.assign_slots import assign_slots
from moebench.kernels.collectives.group import described_group
from moebench.kernels.expert_ffn import expert_ffn_grouped
from moebench.kernels.permute import slot_rows
from moebench.kernels.region import region
from moebench.kernels.registry import KERNELS
from moebench.program import BACKWARD
from moebench.ranks import run_ranks
from moebench.trace.recorder import Recorder
from tests.moebench.trace import rank_collectives

T, E, K, C, L, D, F = 13, 4, 2, 5, 2, 8, 6


def _ids(*shape, high):
    return torch.randint(high, shape)


def _weights():
    return torch.randn(L, D, F, requires_grad=True), torch.randn(L, F, D, requires_grad=True)


def _rows():
    experts_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    return slot_rows(experts_TK, assign_slots(experts_TK, E)[0], C)


def _leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


# Arguments of each registered kernel; every implementation that is no naive loop takes them.
ARGUMENTS = {
    "topk_gate": lambda: (_leaf(T, E), K),
    "assign_slots": lambda: (_ids(T, K, high=E), E),
    "permute": lambda: (_leaf(T, D), _rows(), E * C),
    "unpermute": lambda: (_leaf(E * C, D), _rows(), torch.rand(T, K, requires_grad=True)),
    "expert_ffn": lambda: (_leaf(L, T, D), *_weights()),
    "attention": lambda: (_leaf(2, 4, T, D), _leaf(2, 2, T, D), _leaf(2, 2, T, D)),
}
CALLS = {
    f"{kernel.name}/{name}": (function, ARGUMENTS[kernel.name])
    for kernel in KERNELS.values()
    for name, function in kernel.implementations.items()
    if name != "reference"
} | {
    "expert_ffn_grouped": (lambda x, *w: expert_ffn_grouped(x, (9, 4), *w), lambda: (_leaf(T, D), *_weights())),
    "slot_rows": (slot_rows, lambda: (_ids(T, K, high=E), _ids(T, K, high=T), C)),
    "one_hot": (explicit.one_hot, lambda: (_ids(T, high=E), E)),
    "count": (explicit.count, lambda: (_ids(T, high=E), E)),
    "nonzero": (explicit.nonzero, lambda: (torch.arange(T) % 2 == 0, 7)),
    "masked_rows": (explicit.masked_rows, lambda: (_leaf(T, D), torch.arange(T) % 2 == 0, 7)),
    "unique": (explicit.unique, lambda: (torch.arange(T) % E, E, E)),
    "dropout": (explicit.dropout, lambda: (_leaf(T, D), 0.1)),
}


def _recorded(function, args):
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    with Recorder(tensors) as recorder:
        with region("dense"):
            out = function(*args)
        outputs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
        if outputs:
            torch.autograd.backward(outputs, [output.detach() for output in outputs])
    return recorder


@pytest.mark.parametrize("name", CALLS)
def test_kernel_runs_the_same_operators_on_meta_tensors(name):
    """Operators, shapes, bytes, FLOPs, persistent and peak memory, forward and backward."""
    function, make = CALLS[name]
    real_args = make()
    meta_args = [
        arg.detach().to("meta").requires_grad_(arg.requires_grad) if isinstance(arg, torch.Tensor) else arg
        for arg in real_args
    ]
    real, meta = _recorded(function, real_args), _recorded(function, meta_args)
    assert meta.ops == real.ops
    assert (meta.persistent_bytes, meta.peak_bytes) == (real.persistent_bytes, real.peak_bytes)
    needs_gradient = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in real_args)
    assert any(op.phase == BACKWARD for op in real.ops) == needs_gradient


def _optimizer_calls(device):
    params = [torch.zeros(4, 8, device=device), torch.zeros(8, device=device)]
    for param in params:
        param.grad = torch.zeros_like(param)
    adam = optimizer.AdamW(params)
    persistent = [*params, *(param.grad for param in params), *adam.averages, *adam.squares]
    with Recorder(persistent) as recorder, region("optimizer"):
        optimizer.clip_grad_norm(params, 1.0)
        optimizer.sgd_step(params, 0.1)
        adam.step()
    return recorder


def test_optimisers_run_the_same_operators_on_meta_tensors():
    """Clipping, SGD and AdamW; state counts as persistent."""
    real, meta = _optimizer_calls("cpu"), _optimizer_calls("meta")
    assert meta.ops == real.ops
    assert meta.persistent_bytes == 4 * (4 * 8 + 8) * 4
    assert meta.peak_bytes == real.peak_bytes


@pytest.mark.parametrize("world", [1, 2, 4])
def test_collectives_are_the_same_operators_in_real_ranks(world):
    """Each collective, even and uneven, forward and backward: ops, bytes by peer, waits."""
    real = run_ranks(f"{rank_collectives.__name__}:record_collectives", world, ("cpu",), timeout_s=120)
    for rank in range(world):
        assert rank_collectives.record_collectives(described_group(world, rank), "meta") == real[rank]


def test_bytes_of_collectives():
    """Even all-to-all: bytes to each peer; gather: contribution; scatter: share; reduce: buffer; uneven: by peer."""
    ops = rank_collectives.record_collectives(described_group(4, 1), "meta")
    forward = [op.collective for op in ops if op.collective is not None and op.phase != BACKWARD]
    assert [(c.algorithm, c.bytes_per_peer) for c in forward] == [
        ("all_to_all", 2 * 8 * 4),
        ("all_to_all", None),
        ("all_gather", 8 * 8 * 4),
        ("reduce_scatter", 2 * 8 * 4),
        ("all_reduce", 8 * 8 * 4),
        ("all_reduce", 8 * 8 * 4),
    ]
    assert all(c.group == "world" and c.ranks == range(4) for c in forward)
    # Rank r sends 1 + (r + p) % 3 rows of 32 bytes to peer p; the pattern is symmetric.
    assert forward[1].send_bytes == forward[1].receive_bytes == (64, 96, 32, 64)


def test_work_between_start_and_wait_stands_between_them_in_both_directions():
    """start, product, wait in the forward; start, products, wait in the backward."""
    ops = rank_collectives.record_overlap(described_group(4), "meta")
    order = [
        (op.phase, op.kind) for op in ops if op.kind in ("collective", "wait") or (op.kind == "product" and op.flops)
    ]
    assert order == [
        ("forward", "collective"),
        ("forward", "product"),
        ("forward", "wait"),
        ("backward", "collective"),
        ("backward", "product"),
        ("backward", "product"),
        ("backward", "wait"),
    ]
    starts = [op.index for op in ops if op.kind == "collective"]
    assert [op.waits_on for op in ops if op.kind == "wait"] == [(start,) for start in starts]
