"""One explicit form of each operator that is banned in systems and gates, the same on CPU, CUDA and meta tensors.

`one_hot`, dropout and friends are different programs on different devices. `nonzero`, boolean indexing, `masked_select`
and `unique` have a result whose size is data, which a trace does not know: here the caller says it, having read it
through moebench.kernels.host. Attention is in attention.py, clipping and optimisers are in optimizer.py.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_tensor


def one_hot(ids: Tensor, num_classes: int) -> Tensor:
    """int64 [..., num_classes] with a 1 at each id: fill and scatter, what `F.one_hot` does on CUDA.

    Args:
        ids: int64 of any shape, in 0..num_classes-1.

    Raises:
        ValueError: ids of another dtype, no class.
    """
    _check_ids("ids", ids)
    check_at_least("num_classes", num_classes, 1)
    zeros = torch.zeros(*ids.shape, num_classes, dtype=torch.int64, device=ids.device)
    return zeros.scatter_(-1, ids.unsqueeze(-1), 1)


def count(ids: Tensor, num_ids: int) -> Tensor:
    """How often each of 0..num_ids-1 occurs, int64 [num_ids]; -1 is not counted. Stands for `bincount`.

    Raises:
        ValueError: ids that are not int64, num_ids below 1.
    """
    _check_ids("ids", ids)
    check_at_least("num_ids", num_ids, 1)
    bins = ids.reshape(-1) + 1  # bin 0 takes the -1s
    counts = torch.zeros(num_ids + 1, dtype=torch.int64, device=ids.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[1:]


def nonzero(mask_N: Tensor, num_true: int) -> Tensor:
    """Indices of the true entries in ascending order, int64 [num_true]. Stands for `nonzero` on a vector.

    Args:
        mask_N: bool.
        num_true: how many are true, known on the host.

    Raises:
        ValueError: a mask that is not a bool vector, num_true below 0 or above N.
    """
    if mask_N.dtype != torch.bool or mask_N.dim() != 1:
        raise ValueError(f"mask must be a bool vector; got {mask_N.dtype} {list(mask_N.shape)}")
    if not 0 <= num_true <= mask_N.shape[0]:
        raise ValueError(f"num_true must be between 0 and the {mask_N.shape[0]} entries; got {num_true}")
    places_N = torch.cumsum(mask_N, 0).sub_(1).masked_fill_(mask_N.logical_not(), num_true)
    # False entries go to one more place, which is cut off.
    indices = torch.zeros(num_true + 1, dtype=torch.int64, device=mask_N.device)
    return indices.scatter_(0, places_N, torch.arange(mask_N.shape[0], device=mask_N.device))[:num_true]


def masked_rows(x_ND: Tensor, mask_N: Tensor, num_true: int) -> Tensor:
    """The rows of x where the mask is true, in order. Stands for `x[mask]` and `masked_select`; differentiable in x.

    Raises:
        ValueError: as `nonzero`; a mask of another length than x.
    """
    if x_ND.shape[:1] != mask_N.shape:
        raise ValueError(f"mask has shape {list(mask_N.shape)}, x {list(x_ND.shape)}; the mask needs one entry a row")
    return x_ND.index_select(0, nonzero(mask_N, num_true))


def unique(ids: Tensor, num_ids: int, num_unique: int) -> Tensor:
    """The distinct ids in ascending order, int64 [num_unique]; -1 is none. Stands for `unique` of ids below num_ids.

    Raises:
        ValueError: as `count` and `nonzero`.
    """
    return nonzero(count(ids, num_ids) > 0, num_unique)


def dropout(x: Tensor, probability: float, training: bool = True) -> Tensor:
    """Zero entries with this probability and scale the others by 1 / (1 - probability): one operator on every device.

    Raises:
        ValueError: x that is not floating-point, probability outside 0..1.
    """
    check_tensor("x", x, "*" * x.dim())
    if not 0 <= probability <= 1:
        raise ValueError(f"probability must be between 0 and 1; got {probability}")
    if not training or probability == 0:
        return x
    return torch.native_dropout(x, probability, True)[0]


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype != torch.int64:
        raise ValueError(f"{name} must be int64; got {ids.dtype}")
