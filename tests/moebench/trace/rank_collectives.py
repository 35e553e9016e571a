"""Collectives for test_kernels.py, run by real ranks and on meta tensors. Apart, so that a rank imports no pytest."""

import torch

from moebench.kernels.collectives.start_wait import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce,
    reduce_scatter,
    start_all_reduce_,
    start_all_to_all,
    start_all_to_all_into,
)
from moebench.kernels.region import region
from moebench.trace.recorder import Recorder

ROWS, WIDTH = 8, 8


def record_collectives(group, device):
    """The Ops of every collective, with its backward where it has one."""
    splits = [1 + (group.rank + peer) % 3 for peer in range(group.size)]
    ragged = torch.zeros(sum(splits), WIDTH, device=device, requires_grad=True)
    x = torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)
    root = group.size - 1
    shared = torch.zeros(ROWS if group.index == root else 0, WIDTH, device=device, requires_grad=True)
    with Recorder([x, ragged, shared]) as recorder:
        with region("exchange"):
            outputs = [
                all_to_all(x, group),
                all_to_all(ragged, group, splits, splits),
                all_gather(x, group),
                reduce_scatter(x, group),
                all_reduce(x, group),
                broadcast(shared, group, ROWS, root),
                reduce(x, group, root),
            ]
            start_all_reduce_(x.detach(), group).wait()
            parts = x.detach().new_zeros(2 * len(ragged), WIDTH).split(len(ragged))
            pendings = [start_all_to_all_into(part, ragged.detach(), group, splits, splits) for part in parts]
            for pending in reversed(pendings):
                pending.wait()
        torch.autograd.backward(outputs, [output.detach() for output in outputs])
    return recorder.ops


def record_overlap(group, device):
    """The Ops of a product between an exchange's start and its wait."""
    x = torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)
    weight = torch.zeros(WIDTH, WIDTH, device=device, requires_grad=True)
    other = torch.zeros(ROWS, WIDTH, device=device, requires_grad=True)
    with Recorder([x, weight, other]) as recorder:
        with region("exchange"):
            pending = start_all_to_all(x, group)
        with region("dense"):
            y = other @ weight
        with region("exchange"):
            z = pending.wait()
        torch.autograd.backward((y, z), (y.detach(), z.detach()))
    return recorder.ops
