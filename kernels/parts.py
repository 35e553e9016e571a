"""Parts of the rows of experts: what a kernel does that begins with the tokens that are there while others still
travel.

Tokens come in parts. The rows of all parts lie in one buffer, by expert and in it part after part, so that what needs
all of them, such as a weight's gradient, takes one product. Each operator reads or writes one part's rows of such a
buffer, whose number is known on the host, and leaves the others as they are.

T tokens of a part, K choices, N rows of all parts, M of this one, L experts, D columns in, F columns out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moebench.kernels.checks import check_at_least, check_same_dtype, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost, Product
from moebench.kernels.define import define_operator
from moebench.kernels.explicit import nonzero


def permute_part_(out_ND: Tensor, x_TD: Tensor, rows_TK: Tensor, part: int) -> None:
    """Copy every token to the rows of its routes, in place; not differentiable.

    Args:
        rows_TK: int64, -1 or below N; no row twice.
        part: M, how many of them are not -1.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices.
    """
    check_tensor("out", out_ND, "ND")
    check_tensor("x", x_TD, "TD")
    check_shape("x", x_TD, (rows_TK.shape[0], out_ND.shape[1]), "rows and out")
    check_same_dtype("x", x_TD, "out", out_ND)
    _check_rows(out_ND, rows_TK, part)
    _permute_part(x_TD, rows_TK, part, out_ND)


def unpermute_part(y_ND: Tensor, rows_TK: Tensor, part: int) -> Tensor:
    """Sum the rows of every token's routes; those of -1 add nothing. As `unpermute`, not differentiable.

    Raises:
        ValueError: as `permute_part_`.
    """
    check_tensor("y", y_ND, "ND")
    _check_rows(y_ND, rows_TK, part)
    return _unpermute_part(y_ND, rows_TK, part)


def grouped_gemm_part_(
    out_NF: Tensor,
    x_ND: Tensor,
    begins: Sequence[int],
    ends: Sequence[int],
    w_LDF: Tensor,
    adds: bool = False,
) -> None:
    """`out[n] = x[n] w[l]` for the rows n of every expert l from its begin to its end, in place; not differentiable.

    Args:
        begins, ends: on the host, one of each expert.
        adds: to what is there.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices, runs of rows outside the tensors.
    """
    check_tensor("x", x_ND, "ND")
    check_tensor("w", w_LDF, "LDF")
    check_tensor("out", out_NF, "NF")
    check_shape("out", out_NF, (x_ND.shape[0], w_LDF.shape[2]), "x and w")
    check_shape("w", w_LDF, (len(begins), x_ND.shape[1], out_NF.shape[1]), "begins, x and out")
    for name, tensor in (("w", w_LDF), ("out", out_NF)):
        check_together(name, tensor, "x", x_ND)
        check_same_dtype(name, tensor, "x", x_ND)
    runs = list(zip(begins, ends, strict=True))
    if any(not 0 <= begin <= end <= len(x_ND) for begin, end in runs):
        raise ValueError(f"begins and ends must be runs within the {len(x_ND)} rows of x; got {runs}")
    _grouped_gemm_part(x_ND, list(begins), list(ends), w_LDF, adds, out_NF)


def _check_rows(buffer_ND: Tensor, rows_TK: Tensor, part: int) -> None:
    check_tensor("rows", rows_TK, "TK", "int64")
    check_together("rows", rows_TK, "the buffer", buffer_ND)
    check_at_least("part", part, 0)


def _torch_permute_part(x_TD: Tensor, rows_TK: Tensor, part: int, out_ND: Tensor) -> None:
    rows = rows_TK.reshape(-1)
    routes_M = nonzero(rows >= 0, part)
    tokens_M = torch.div(routes_M, rows_TK.shape[1], rounding_mode="floor")
    out_ND.index_copy_(0, rows.index_select(0, routes_M), x_TD.index_select(0, tokens_M))


def _torch_grouped_gemm_part(
    x_ND: Tensor, begins: Sequence[int], ends: Sequence[int], w_LDF: Tensor, adds: bool, out_NF: Tensor
) -> None:
    for expert, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        if end > begin:
            own_MF = out_NF[begin:end]
            if adds:
                own_MF.addmm_(x_ND[begin:end], w_LDF[expert])
            else:
                torch.mm(x_ND[begin:end], w_LDF[expert], out=own_MF)


def _permute_cost(out: None, x_TD: Tensor, rows_TK: Tensor, part: int, out_ND: Tensor) -> Cost:
    """Every token that has rows once in, its rows out."""
    row_bytes = x_TD.shape[1] * x_TD.itemsize
    return Cost(
        "gather", bytes_read=rows_TK.nbytes + min(len(x_TD), part) * row_bytes, bytes_written=part * row_bytes
    )


def _unpermute_cost(out: Tensor, y_ND: Tensor, rows_TK: Tensor, part: int) -> Cost:
    """The part's rows once in, every token once out."""
    read = rows_TK.nbytes + part * y_ND.shape[1] * y_ND.itemsize
    return Cost("gather", bytes_read=read, bytes_written=out.nbytes)


def _gemm_cost(
    out: None, x_ND: Tensor, begins: Sequence[int], ends: Sequence[int], w_LDF: Tensor, adds: bool, out_NF: Tensor
) -> Cost:
    """The part's rows and the matrices of its experts once in, its results out, and in if they are added to."""
    _, d_in, d_out = w_LDF.shape
    counts = [end - begin for begin, end in zip(begins, ends, strict=True) if end > begin]
    rows, size = sum(counts), x_ND.itemsize
    written = rows * d_out * size
    return Cost(
        "product",
        flops=2 * rows * d_in * d_out,
        bytes_read=(rows * d_in + len(counts) * d_in * d_out) * size + adds * written,
        bytes_written=written,
        products=tuple(Product(count, d_out, d_in, counts.count(count)) for count in sorted(set(counts))),
    )


_permute_part = define_operator(
    "permute_part_(Tensor x, Tensor rows, int part, Tensor(a!) out) -> ()",
    implementation=_torch_permute_part,
    fake=lambda x_TD, rows_TK, part, out_ND: None,
    cost=_permute_cost,
)
_unpermute_part = define_operator(
    "unpermute_part(Tensor y, Tensor rows, int part) -> Tensor",
    implementation=lambda y_ND, rows_TK, part: torch.ops.moebench.unpermute(y_ND, rows_TK, None),
    fake=lambda y_ND, rows_TK, part: y_ND.new_empty(rows_TK.shape[0], y_ND.shape[1]),
    cost=_unpermute_cost,
)
_grouped_gemm_part = define_operator(
    "grouped_gemm_part_(Tensor x, SymInt[] begins, SymInt[] ends, Tensor w, bool adds, Tensor(a!) out) -> ()",
    implementation=_torch_grouped_gemm_part,
    fake=lambda x_ND, begins, ends, w_LDF, adds, out_NF: None,
    cost=_gemm_cost,
)
