"""Data-parallel gradients: three ways to sum them over d replicas, each of which ends with its shard (Fig 11).

A rank holds N gradients in one FP32 buffer, in which it has added up its micro-batches. u = 2^-8 is BF16's rounding.

| way | bytes a rank sends | roundings to BF16 | error of a sum, at most |
|---|---|---|---|
| `fp32-reduce-scatter` | 4 N (d - 1) / d | none | that of FP32 sums |
| `bf16-all-to-all` | 2 N (d - 1) / d | one a replica, then FP32 sums | u x sum of magnitudes |
| `bf16-ring` | 2 N (d - 1) / d | one a hop | about d u x sum of magnitudes: it grows with d |

The all-to-all needs no memory besides: the BF16 copy takes one half of the buffer, the other half receives.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_to_all, start_all_to_all_into, start_reduce_scatter

BF16_ROUNDING = 2.0**-8


def add_gradients(params: Sequence[Tensor], sums_N: Tensor) -> None:
    """Add the parameters' gradients, one after another, to FP32 sums, and let them go."""
    begin = 0
    for param in params:
        if param.grad is not None:
            sums_N[begin : begin + param.numel()].add_(param.grad.reshape(-1))
            param.grad = None
        begin += param.numel()


def padded_size(elements: int, replicas: int) -> int:
    """The least N that every way can deal to d replicas: a multiple of 2 d."""
    return -(-elements // (2 * replicas)) * 2 * replicas


def reduce_gradients(buffer_N: Tensor, group: Group, way: str = "bf16-all-to-all") -> Tensor:
    """The sum over the replicas of this rank's shard, the i-th of d.

    Args:
        buffer_N: FP32, contiguous, without gradient; N a multiple of 2 d. Its content is lost.
        way: one of `WAYS`.

    Returns:
        [N / d] FP32; it may be a part of the buffer.

    Raises:
        ValueError: another way, or another buffer.
    """
    if way not in WAYS:
        raise ValueError(f"no way {way!r} to sum gradients; choose one of {', '.join(WAYS)}")
    is_right = buffer_N.dtype == torch.float32 and buffer_N.dim() == 1 and buffer_N.is_contiguous()
    if not is_right or len(buffer_N) % (2 * group.size) or buffer_N.requires_grad:
        raise ValueError(
            f"gradients lie in one contiguous float32 vector of a multiple of {2 * group.size} elements for "
            f"{group.size} replicas, which needs no gradient; got {buffer_N.dtype} {list(buffer_N.shape)}"
        )
    return start_sums(buffer_N, group, way)()


def start_sums(buffer_N: Tensor, group: Group, way: str) -> Callable[[], Tensor]:
    """As `reduce_gradients`, in two halves: what is returned waits and gives the shard; the ring goes round at once.

    Raises:
        KeyError: another way; buffers are not checked.
    """
    return (lambda: buffer_N) if group.size == 1 else _STARTS[way](buffer_N, group)


def _fp32_reduce_scatter(buffer_N: Tensor, group: Group) -> Callable[[], Tensor]:
    return start_reduce_scatter(buffer_N, group).wait


def _bf16_all_to_all(buffer_N: Tensor, group: Group) -> Callable[[], Tensor]:
    narrow_N = narrow_in_place(buffer_N)
    replicas, shard = group.size, len(buffer_N) // group.size
    received_N = buffer_N.view(torch.bfloat16)[len(buffer_N) :]
    pending = start_all_to_all_into(received_N, narrow_N, group, [shard] * replicas, [shard] * replicas)

    def finish() -> Tensor:
        pending.wait()
        sums = buffer_N[:shard]  # in the first half, which has been sent
        return torch.sum(received_N.view(replicas, shard), 0, dtype=torch.float32, out=sums)

    return finish


def narrow_in_place(buffer_N: Tensor) -> Tensor:
    """The buffer's elements in BF16, in its first half; no second buffer.

    Element i moves from byte 4 i to 2 i: what lies in the way has been read before if elements 2^j to 2^(j + 1) go
    together, one j after another. Only the first block meets itself, and is copied.
    """
    narrow_N = buffer_N.view(torch.bfloat16)[: len(buffer_N)]
    begin, end = 0, min(_FIRST_BLOCK, len(buffer_N))
    while begin < len(buffer_N):
        wide = buffer_N[begin:end]
        narrow_N[begin:end].copy_(wide.clone() if begin == 0 else wide)
        begin, end = end, min(2 * end, len(buffer_N))
    return narrow_N


_FIRST_BLOCK = 1024


def _bf16_ring(buffer_N: Tensor, group: Group) -> Callable[[], Tensor]:
    """d - 1 hops: a part goes round, and every rank adds its own and rounds."""
    replicas, me = group.size, group.index
    own_DN = buffer_N.to(torch.bfloat16).view(replicas, -1)
    shard = own_DN.shape[1]
    to_next = [shard if rank == (me + 1) % replicas else 0 for rank in range(replicas)]
    from_last = [shard if rank == (me - 1) % replicas else 0 for rank in range(replicas)]
    part = own_DN[(me - 1) % replicas]
    for hop in range(replicas - 1):
        part = start_all_to_all(part, group, to_next, from_last).wait()
        part = part + own_DN[(me - 2 - hop) % replicas]
    return lambda: part.float()


_STARTS: dict[str, Callable[[Tensor, Group], Callable[[], Tensor]]] = {
    "fp32-reduce-scatter": _fp32_reduce_scatter,
    "bf16-all-to-all": _bf16_all_to_all,
    "bf16-ring": _bf16_ring,
}
WAYS = tuple(_STARTS)
