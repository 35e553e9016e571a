"""New parameters from the replicas' FP32 shares (section 5, FP8 communication): in BF16, or as FP8 codes with scales.

| way | bytes a rank gets, of N elements | a parameter is off by, at most |
|---|---|---|
| `bf16` | 2 N (d - 1) / d | 2^-8 of it |
| `fp8` | (1 + 4 / 128) N (d - 1) / d | 1/16 of it, or 2^-10 / 448 of the largest of its 128 |

The masters stay in FP32 with their owner, so that what is rounded away in one step is not lost for the next.
"""

import torch
from torch import Tensor

from moebench.kernels.collectives.group import Group
from moebench.kernels.collectives.start_wait import start_all_gather
from moebench.kernels.fp8 import dequantise_fp8, quantise_fp8

TOGETHER = 128  # elements that share a scale
WAYS = ("bf16", "fp8")


def padded_share(elements: int, replicas: int) -> int:
    """The least share, of d equal ones that hold so many elements, whose scales are its own."""
    return -(-elements // (TOGETHER * replicas)) * TOGETHER


def gather_parameters(share_N: Tensor, group: Group, way: str) -> Tensor:
    """All replicas' shares, one after another, in the dtype of the share but as exact as they travel.

    Args:
        share_N: this rank's, FP32 or FP64, without gradient; as many on all ranks, for `fp8` a multiple of `TOGETHER`.
        way: one of `WAYS`.

    Raises:
        ValueError: another way; a share that FP8 can't divide.
    """
    if way not in WAYS:
        raise ValueError(f"no way {way!r} to send parameters; choose one of {', '.join(WAYS)}")
    if way == "bf16":
        return start_all_gather(share_N.to(torch.bfloat16), group).wait().to(share_N.dtype)
    if len(share_N) % TOGETHER:
        raise ValueError(f"{len(share_N)} elements of a share are not a multiple of {TOGETHER}, which share a scale")
    codes, scales = quantise_fp8(share_N.view(-1, TOGETHER), "row")
    flying = start_all_gather(codes.view(torch.uint8), group), start_all_gather(scales, group)
    codes, scales = (one.wait() for one in flying)
    return dequantise_fp8(codes, scales, "row").to(share_N.dtype).view(-1)
