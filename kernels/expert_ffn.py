"""The experts' feed-forward network as products and an activation, so that the recorder sees every FLOP.

L experts of this rank, N rows (of one expert in `x_LND`, of all in the ragged `x_ND`), D model, F feed-forward.
`y = act(x w1) w2`, or for SwiGLU `y = (silu(x w1) * (x w3)) w2`; no biases. Three ways to run L experts with plain
products: one after another (loop), one batched product a weight (batched), one after another over ragged rows
(grouped). A fourth takes the counts of ragged rows from the device, in fused operators (grouped_device).
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.activation import ACTIVATIONS, activate, check_activation
from moebench.kernels.checks import check_same_dtype, check_shape, check_tensor, check_together
from moebench.kernels.grouped_gemm import grouped_gemm

__all__ = [
    "ACTIVATIONS",
    "expert_ffn",
    "expert_ffn_batched",
    "expert_ffn_grouped",
    "expert_ffn_grouped_device",
    "expert_ffn_loop",
    "expert_ffn_reference",
]

Weights = Tensor | Sequence[Tensor]


def expert_ffn(
    x_ND: Tensor, w1_DF: Tensor, w2_FD: Tensor, w3_DF: Tensor | None = None, activation: str = "relu"
) -> Tensor:
    """One expert on its rows.

    Raises:
        ValueError: wrong shapes, dtypes or devices, an unknown activation, w3 without SwiGLU or SwiGLU without w3.
    """
    check_tensor("x", x_ND, "ND")
    _check_weights(x_ND, [w1_DF], [w2_FD], None if w3_DF is None else [w3_DF], activation, experts=1)
    return _ffn(torch.mm, x_ND, w1_DF, w2_FD, w3_DF, activation)


def expert_ffn_loop(
    x_LND: Tensor, w1_LDF: Weights, w2_LFD: Weights, w3_LDF: Weights | None = None, activation: str = "relu"
) -> Tensor:
    """L experts one after another. Weights may be a tensor, or a list of one expert's each, as modules hold them.

    Raises:
        ValueError: as `expert_ffn`; as many experts in every argument.
    """
    check_tensor("x", x_LND, "LND")
    _check_weights(x_LND, w1_LDF, w2_LFD, w3_LDF, activation, experts=x_LND.shape[0])
    return torch.stack(_one_by_one(x_LND.unbind(0), w1_LDF, w2_LFD, w3_LDF, activation))


def expert_ffn_batched(
    x_LND: Tensor, w1_LDF: Tensor, w2_LFD: Tensor, w3_LDF: Tensor | None = None, activation: str = "relu"
) -> Tensor:
    """L experts with as many rows each, in one batched product per weight.

    Raises:
        ValueError: as `expert_ffn_loop`.
    """
    check_tensor("x", x_LND, "LND")
    _check_weights(x_LND, w1_LDF, w2_LFD, w3_LDF, activation, experts=x_LND.shape[0])
    return _ffn(torch.bmm, x_LND, w1_LDF, w2_LFD, w3_LDF, activation)


def expert_ffn_grouped(
    x_ND: Tensor,
    counts_L: Sequence[int],
    w1_LDF: Weights,
    w2_LFD: Weights,
    w3_LDF: Weights | None = None,
    activation: str = "relu",
) -> Tensor:
    """L experts over ragged rows sorted by expert: the first counts[0] rows are the first expert's, and so on.

    An expert without rows still takes part, so that its weights get zero gradients on every rank.

    Args:
        counts_L: on the host; their sum is N.

    Raises:
        ValueError: as `expert_ffn_loop`; counts that are negative or do not add up to N.
    """
    check_tensor("x", x_ND, "ND")
    counts = list(counts_L)
    if min(counts, default=0) < 0 or sum(counts) != x_ND.shape[0]:
        raise ValueError(f"counts must be non-negative and sum to the {x_ND.shape[0]} rows of x; got {counts}")
    _check_weights(x_ND, w1_LDF, w2_LFD, w3_LDF, activation, experts=len(counts))
    return torch.cat(_one_by_one(x_ND.split(counts), w1_LDF, w2_LFD, w3_LDF, activation))


def expert_ffn_grouped_device(
    x_ND: Tensor,
    ends_L: Tensor,
    w1_LDF: Tensor,
    w2_LFD: Tensor,
    w3_LDF: Tensor | None = None,
    activation: str = "relu",
    row_weights_N: Tensor | None = None,
) -> Tensor:
    """L experts over ragged rows sorted by expert, whose counts only the device knows: no host synchronisation.

    A grouped product a weight, and between them one operator for activation, gate and the rows' routing weights, as in
    MegaScale-MoE and Megatron. Differentiable in x, the experts' weights and the rows'.

    Args:
        ends_L: int32 or int64, cumulative, see `moebench.kernels.grouped_gemm`.
        row_weights_N: multiplies every row's result; None stands for 1.

    Returns:
        y_ND; rows past the last end are zero, whatever x and the rows' weights hold there.

    Raises:
        ValueError: as `expert_ffn_loop`, `grouped_gemm` and `activate`.
    """
    check_tensor("x", x_ND, "ND")
    _check_weights(x_ND, w1_LDF, w2_LFD, w3_LDF, activation, experts=w1_LDF.shape[0])
    h_NF = grouped_gemm(x_ND, ends_L, w1_LDF)
    h3_NF = None if w3_LDF is None else grouped_gemm(x_ND, ends_L, w3_LDF)
    return grouped_gemm(activate(h_NF, activation, h3_NF, row_weights_N), ends_L, w2_LFD)


def expert_ffn_reference(
    x_LND: Tensor, w1_LDF: Tensor, w2_LFD: Tensor, w3_LDF: Tensor | None = None, activation: str = "relu"
) -> Tensor:
    """The definition, one einsum a product."""
    check_tensor("x", x_LND, "LND")
    _check_weights(x_LND, w1_LDF, w2_LFD, w3_LDF, activation, experts=x_LND.shape[0])
    h_LNF = torch.einsum("lnd,ldf->lnf", x_LND, w1_LDF)
    if w3_LDF is not None:
        h_LNF = h_LNF * torch.sigmoid(h_LNF) * torch.einsum("lnd,ldf->lnf", x_LND, w3_LDF)
    elif activation == "relu":
        h_LNF = h_LNF.clamp(min=0)
    else:
        h_LNF = h_LNF * 0.5 * (1 + torch.erf(h_LNF / 2**0.5))
    return torch.einsum("lnf,lfd->lnd", h_LNF, w2_LFD)


def _one_by_one(xs: Sequence[Tensor], w1: Weights, w2: Weights, w3: Weights | None, activation: str) -> list[Tensor]:
    third = [None] * len(xs) if w3 is None else _each(w3)
    experts = zip(xs, _each(w1), _each(w2), third)
    return [_ffn(torch.mm, x_ND, a_DF, b_FD, c_DF, activation) for x_ND, a_DF, b_FD, c_DF in experts]


def _each(weights: Weights) -> Sequence[Tensor]:
    """One weight an expert. `unbind` gathers the gradients once; indexing would write all of them for each expert."""
    return weights.unbind(0) if isinstance(weights, Tensor) else weights


def _ffn(
    product: Callable[[Tensor, Tensor], Tensor], x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None, activation: str
) -> Tensor:
    h = product(x, w1)
    if w3 is not None:
        h = F.silu(h) * product(x, w3)
    else:
        h = torch.relu(h) if activation == "relu" else F.gelu(h)
    return product(h, w2)


def _check_weights(x: Tensor, w1: Weights, w2: Weights, w3: Weights | None, activation: str, *, experts: int) -> None:
    check_activation(activation, w3 is not None, "w3")
    if experts < 1 or len(w1) != experts:
        raise ValueError(f"every weight needs one entry for each expert, at least one; got {len(w1)} for {experts}")
    # Shapes only: indexing a tensor would be an operator of the program.
    d_model, d_ffn = x.shape[-1], w1.shape[-1] if isinstance(w1, Tensor) else w1[0].shape[-1]
    _check_weight("w1", w1, x, (d_model, d_ffn), experts)
    _check_weight("w2", w2, x, (d_ffn, d_model), experts)
    if w3 is not None:
        _check_weight("w3", w3, x, (d_model, d_ffn), experts)


def _check_weight(name: str, weights: Weights, x: Tensor, shape: tuple[int, int], experts: int) -> None:
    if isinstance(weights, Tensor):
        tensors: Sequence[Tensor] = (weights,)
        expected: tuple[int, ...] = (experts, *shape)
    else:
        tensors, expected = weights, shape
        if len(weights) != experts:
            raise ValueError(f"{name} needs one entry for each of the {experts} experts; got {len(weights)}")
    for weight in tensors:
        check_shape(name, weight, expected, "x, w1 and the experts")
        check_together(name, weight, "x", x)
        check_same_dtype(name, weight, "x", x)
