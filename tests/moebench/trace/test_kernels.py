"""Every shared kernel and collective runs the same operators on meta tensors as on real ones, forward and backward."""

import pytest
import torch

from benchmarks.kernel_calls import CALLS, moved, recorded
from moebench.kernels import optimizer
from moebench.kernels.collectives.grad_clip import clip_gradients
from moebench.kernels.collectives.group import described_group
from moebench.kernels.region import region
from moebench.program import BACKWARD
from moebench.ranks.run import run_ranks
from moebench.trace.recorder import Recorder
from tests.moebench.trace import rank_collectives


@pytest.mark.parametrize("name", CALLS)
def test_kernel_runs_the_same_operators_on_meta_tensors(name):
    """Operators, shapes, bytes, FLOPs, persistent and peak memory, forward and backward."""
    function, make = CALLS[name]
    real_args = make()
    real, meta = recorded(function, real_args), recorded(function, moved(real_args, "meta"))
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
        clip_gradients([params[0].grad], [params[1].grad], described_group(1), 1.0)
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
        ("broadcast", 8 * 8 * 4),
        ("reduce", 8 * 8 * 4),
        ("all_reduce", 8 * 8 * 4),
        ("all_to_all", None),
        ("all_to_all", None),
    ]
    assert all(c.group == "world" and c.ranks == range(4) for c in forward)
    # Rank r sends 1 + (r + p) % 3 rows of 32 bytes to peer p; the pattern is symmetric.
    assert all(c.send_bytes == c.receive_bytes == (64, 96, 32, 64) for c in forward if c.bytes_per_peer is None)


def test_waits_on_parts_of_one_tensor_name_their_own_start():
    """Two exchanges into one tensor, waited for in the other order; each wait stands for one start."""
    ops = rank_collectives.record_collectives(described_group(4, 1), "meta")
    first, second = [op.index for op in ops if op.name == "moebench::all_to_all_into_start"]
    waits = [op.waits_on for op in ops if op.kind == "wait"]
    assert [on for on in waits if on in ((first,), (second,))] == [(second,), (first,)]
    starts = [op.index for op in ops if op.kind == "collective"]
    assert sorted(waits) == [(start,) for start in starts]


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
