"""Weighted sums of selected rows in one pass over memory: what the torch layout transforms are made of.

Kept apart from permute.py because it knows nothing of tokens and slots: rows of a table, ids, a weight each.
"""

import torch
from torch import Tensor


def gather_sum(
    table_ND: Tensor, ids_BK: Tensor, weights_BK: Tensor | None = None, read_on_host: bool | None = None
) -> Tensor:
    """`out[b] = sum over k of weights[b, k] * table[ids[b, k]]`; negative ids add nothing and read nothing.

    `torch.embedding_bag` reads each selected row once and writes each sum once. A negative id must not become a zero
    weight: 0 x NaN would carry an unused row's contents into the result. So the real ids are moved to the front.

    Args:
        read_on_host: whether the number of real ids is read to cut off the others, which is free where memory is the
            host's (the default on CPU); on a GPU, and in a trace, which stands for one, they fall into one more bag,
            which is thrown away.
    """
    bags = ids_BK.shape[0]
    if ids_BK.numel() == 0 or table_ND.numel() == 0:
        return table_ND.new_zeros(bags, table_ND.shape[1])
    if read_on_host is None:
        read_on_host = table_ND.device.type == "cpu"
    ids = ids_BK.reshape(-1)
    order = torch.argsort((ids < 0).to(torch.uint8), stable=True)
    ends_B = (ids_BK >= 0).sum(1).cumsum_(0)
    if read_on_host:
        order = order[: int(ends_B[-1])]
    weights = None if weights_BK is None else weights_BK.reshape(-1)[order].to(table_ND.dtype)
    offsets = torch.cat((ends_B.new_zeros(1), ends_B))
    indices = ids[order].clamp_(min=0)
    sums = torch.embedding_bag(table_ND.contiguous(), indices, offsets, False, 0, False, weights, read_on_host)[0]
    return sums if read_on_host else sums[:bags]


def gather_dot(table_ND: Tensor, ids_BK: Tensor, other_BD: Tensor) -> Tensor:
    """`out[b, k] = dot(table[ids[b, k]], other[b])`, 0 where the id is negative: gather_sum's gradient for weights."""
    if ids_BK.numel() == 0 or table_ND.numel() == 0:
        return table_ND.new_zeros(ids_BK.shape)
    bags, per_bag = ids_BK.shape
    ids = ids_BK.reshape(-1)
    bag_of_id = torch.arange(bags, device=ids.device).repeat_interleave(per_bag, output_size=ids.numel())
    offsets = torch.arange(0, ids.numel(), per_bag, device=ids.device)
    dots = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        other_BD.contiguous(), table_ND.contiguous(), ids.clamp(min=0), offsets, bag_of_id, 0
    )
    return dots.masked_fill_(ids < 0, 0).view(bags, per_bag)
