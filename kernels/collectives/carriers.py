"""How a collective travels: NCCL and other backends by torch.distributed, gloo with receives first, `fake` not at all.

Every function here starts a collective from contiguous `source` into `output` and returns the works to wait for.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moebench.kernels.collectives.group import Group

# Above this many peers gloo's own all-to-all, one loop in C++, costs less than that many Python calls.
RECEIVES_FIRST_PEERS = 8
_TAG = 20_240  # keeps our messages apart from a program's own send and recv
_PLAIN_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)

# torch 2.13 renamed both and warns of the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def backend_of(group: Group, device: torch.device) -> str:
    """`gloo`, `nccl`, `fake`, ...: what carries tensors of `device` in the group.

    Raises:
        ValueError: the group is only described.
    """
    if group.process_group is None:
        raise ValueError(
            f"group {group.name!r} of {group.size} ranks is only described: it takes meta tensors, not tensors on "
            f"{device}; build it with process_group() to exchange real ones"
        )
    return group.process_group._get_backend(device).name()


def carry_all_to_all(
    output: Tensor,
    source: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    group: Group,
    is_rooted: bool = False,
) -> Sequence[Any]:
    """Send split i of the rows to rank i and receive its rows as split i; empty lists: even splits.

    Args:
        is_rooted: on every rank, all splits but those to and from the first rank of the group are zero.
    """
    backend = backend_of(group, source.device)
    if backend == "fake":
        return _pretend(output, source)
    output, source = _handed(output), _handed(source)
    has_few_peers = is_rooted or group.size <= RECEIVES_FIRST_PEERS + 1
    if backend == "gloo" and source.device.type == "cpu" and has_few_peers:
        return _receives_first(output, source, input_splits, output_splits, group)
    is_even = not (input_splits or output_splits)
    sent, received = (None, None) if is_even else (list(input_splits), list(output_splits))
    return (dist.all_to_all_single(output, source, received, sent, group=group.process_group, async_op=True),)


def carry_all_gather(output: Tensor, source: Tensor, group: Group) -> Sequence[Any]:
    """Concatenate the ranks' tensors, equal in shape, along dimension 0."""
    if source.numel() == 0:
        return ()
    if backend_of(group, source.device) == "fake":
        return _pretend(output, source)
    return (_gather(_handed(output), _handed(source), group=group.process_group, async_op=True),)


def carry_reduce_scatter(output: Tensor, source: Tensor, group: Group) -> Sequence[Any]:
    """Sum over the ranks; rank i keeps the i-th part of dimension 0."""
    if source.numel() == 0:
        return ()
    if backend_of(group, source.device) == "fake":
        return _pretend(output, source)
    return (_reduce_scatter(_handed(output), _handed(source), group=group.process_group, async_op=True),)


def carry_all_reduce(buffer: Tensor, group: Group) -> Sequence[Any]:
    """Sum over the ranks, in place."""
    if backend_of(group, buffer.device) == "fake" or buffer.numel() == 0:
        return ()
    return (dist.all_reduce(_handed(buffer), group=group.process_group, async_op=True),)


def carry_broadcast(output: Tensor, root: int, group: Group) -> Sequence[Any]:
    """Give every rank what rank `root` of the group has in `output`."""
    if output.numel() == 0:
        return ()
    if backend_of(group, output.device) == "fake":
        return () if group.index == root else _pretend(output, output[:0])
    return (dist.broadcast(_handed(output), group=group.process_group, async_op=True, group_src=root),)


def carry_reduce(buffer: Tensor, root: int, group: Group) -> Sequence[Any]:
    """Sum over the ranks into the buffer of rank `root` of the group; gloo leaves partial sums in the others' too."""
    if buffer.numel() == 0 or backend_of(group, buffer.device) == "fake":
        return ()
    return (dist.reduce(_handed(buffer), group=group.process_group, async_op=True, group_dst=root),)


def _handed(tensor: Tensor) -> Tensor:
    """The contiguous tensor as a backend gets it.

    On CPU it is another view of the memory, which owns nothing: gloo's threads drop what they were given a moment after
    they wake the waiter, and autograd, which asks whether anyone else holds a gradient before it keeps or adds to it in
    place, would execute other operators from run to run. Until the wait, the record of what is outstanding keeps the
    memory (moebench.kernels.collectives.outstanding). Types that gloo refuses (float8; the refusal poisons the group)
    travel as bytes.
    """
    if tensor.device.type == "cpu" and tensor.numel():
        storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), tensor.device, tensor.nbytes)
        view = torch.empty(0, dtype=tensor.dtype)
        tensor = view.set_(storage, 0, tensor.shape, tensor.stride())
    return tensor if tensor.dtype in _PLAIN_TYPES else tensor.unsqueeze(-1).view(torch.uint8)


def _receives_first(
    output: Tensor, source: Tensor, input_splits: Sequence[int], output_splits: Sequence[int], group: Group
) -> Sequence[Any]:
    """All-to-all by send and recv, every receive posted before the first send.

    gloo's own sends to a peer before it receives from it, which halves a busy link (the data queue before the message
    that lets the peer begin). Peers are visited in rotated order, so that not all ranks call on rank 0 first. Empty
    splits send nothing; the peer knows.
    """
    carrier, me, size = group.process_group, group.index, group.size
    received, sent = _parts(output, output_splits, size), _parts(source, input_splits, size)
    works = []
    for step in range(1, size):
        peer = (me - step) % size
        if received[peer].numel():
            works.append(carrier.recv([received[peer]], peer, _TAG))
    for step in range(1, size):
        peer = (me + step) % size
        if sent[peer].numel():
            works.append(carrier.send([sent[peer]], peer, _TAG))
    received[me].copy_(sent[me])
    return works


def _parts(rows: Tensor, splits: Sequence[int], size: int) -> Sequence[Tensor]:
    return rows.split(list(splits) if splits else [rows.shape[0] // size] * size)


def _pretend(output: Tensor, source: Tensor) -> Sequence[Any]:
    """Without peers, fill `output` as if every peer had sent what this rank sends: numbers as large as real ones."""
    flat_output, flat_source = output.view(-1), source.view(-1)
    if not flat_source.numel():
        output.zero_()
        return ()
    for start in range(0, flat_output.numel(), flat_source.numel()):
        part = flat_output[start : start + flat_source.numel()]
        part.copy_(flat_source[: part.numel()])
    return ()
