"""Weights' gradients added to FP32 sums by the product that makes them: what Transformer Engine and apex fuse.

Micro-batches of a step add up in FP32. Unfused, a product writes the gradient in the weights' dtype and another
operator reads it and both reads and writes the sum; fused, only the sum is read and written, and nothing is rounded in
between.

T rows, N rows sorted by expert, L experts, D columns in, F columns out.
"""

import torch
from torch import Tensor

from moebench.kernels.checks import check_same_dtype, check_shape, check_tensor, check_together
from moebench.kernels.cost import Cost, Product
from moebench.kernels.define import define_operator
from moebench.kernels.grouped_gemm import grouped_gemm_dw, grouped_gemm_dw_cost, grouped_gemm_dw_torch


def add_product_(sum_DF: Tensor, x_TD: Tensor, dy_TF: Tensor) -> None:
    """`sum += x^T dy`, in place; not differentiable.

    Args:
        sum_DF: fp32, or wider where x is; any strides.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    check_tensor("x", x_TD, "TD")
    check_tensor("dy", dy_TF, "TF")
    check_shape("dy", dy_TF, (x_TD.shape[0], dy_TF.shape[1]), "the rows of x")
    check_tensor("sum", sum_DF, "DF")
    check_shape("sum", sum_DF, (x_TD.shape[1], dy_TF.shape[1]), "x and dy")
    _check_dtypes(sum_DF, x_TD, dy_TF)
    _add_product(x_TD, dy_TF, sum_DF)


def add_grouped_product_(sum_LDF: Tensor, x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor) -> None:
    """`sum[l] += x[rows of l]^T dy[rows of l]`, in place; rows past the last end are not read. Not differentiable.

    On a GPU without a fused kernel BF16 gradients of one call are rounded before they are added.

    Raises:
        ValueError: wrong dtypes, shapes or devices.
    """
    check_tensor("x", x_ND, "ND")
    check_tensor("dy", dy_NF, "NF")
    check_shape("dy", dy_NF, (x_ND.shape[0], dy_NF.shape[1]), "the rows of x")
    check_tensor("sum", sum_LDF, "LDF")
    check_shape("sum", sum_LDF, (ends_L.shape[0], x_ND.shape[1], dy_NF.shape[1]), "ends, x and dy")
    _check_dtypes(sum_LDF, x_ND, dy_NF)
    _add_grouped_product(x_ND, ends_L, dy_NF, sum_LDF)


def _check_dtypes(total: Tensor, x: Tensor, dy: Tensor) -> None:
    check_together("dy", dy, "x", x)
    check_together("sum", total, "x", x)
    check_same_dtype("dy", dy, "x", x)
    wide = torch.promote_types(x.dtype, torch.float32)
    if total.dtype != wide or total.requires_grad:
        raise ValueError(f"sum must be {wide} and need no gradient for gradients in {x.dtype}; got {total.dtype}")


def _torch_add_product(x_TD: Tensor, dy_TF: Tensor, sum_DF: Tensor) -> None:
    if x_TD.dtype == sum_DF.dtype:
        sum_DF.addmm_(x_TD.t(), dy_TF)
    elif x_TD.is_cuda:
        sum_DF.add_(torch.mm(x_TD.t(), dy_TF, out_dtype=sum_DF.dtype))
    else:
        sum_DF.addmm_(x_TD.t().to(sum_DF.dtype), dy_TF.to(sum_DF.dtype))


def _torch_add_grouped_product(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor, sum_LDF: Tensor) -> None:
    if x_ND.is_cuda:
        sum_LDF.add_(grouped_gemm_dw(x_ND, ends_L, dy_NF))
    else:
        sum_LDF.add_(grouped_gemm_dw_torch(x_ND.to(sum_LDF.dtype), ends_L, dy_NF.to(sum_LDF.dtype)))


def _cost(out: None, x_TD: Tensor, dy_TF: Tensor, sum_DF: Tensor) -> Cost:
    """Rows once in, the sum once in and once out."""
    (rows, d_in), d_out = x_TD.shape, dy_TF.shape[1]
    return Cost(
        "product",
        flops=2 * rows * d_in * d_out,
        bytes_read=x_TD.nbytes + dy_TF.nbytes + sum_DF.nbytes,
        bytes_written=sum_DF.nbytes,
        products=(Product(d_in, d_out, rows),) if rows else (),
    )


def _grouped_cost(out: None, x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor, sum_LDF: Tensor) -> Cost:
    """As `grouped_gemm_dw`, into a sum that is read too."""
    plain = grouped_gemm_dw_cost(sum_LDF, x_ND, ends_L, dy_NF)
    return Cost("product", plain.flops, plain.bytes_read + sum_LDF.nbytes, sum_LDF.nbytes, products=plain.products)


_add_product = define_operator(
    "add_product_(Tensor x, Tensor dy, Tensor(a!) sum) -> ()",
    implementation=_torch_add_product,
    fake=lambda x_TD, dy_TF, sum_DF: None,
    cost=_cost,
)
_add_grouped_product = define_operator(
    "add_grouped_product_(Tensor x, Tensor ends, Tensor dy, Tensor(a!) sum) -> ()",
    implementation=_torch_add_grouped_product,
    fake=lambda x_ND, ends_L, dy_NF, sum_LDF: None,
    cost=_grouped_cost,
)
