"""Products of ragged groups: the rows of every expert times that expert's matrix, with the counts on the device.

N rows sorted by expert, L experts of this rank, D columns in, F columns out. `ends_L` says where each expert's rows
end: those of expert l are `ends[l - 1]:ends[l]`, and rows from the last end on belong to nobody. A system that knows
its counts on the device only (`counts.cumsum(0)`) needs no host read to run its experts.

`torch.nn.functional.grouped_mm` computes the same, but leaves nobody's rows uninitialised, takes bf16 only where it is
traced, and counts as 0 FLOPs. Here those rows are zero, whatever lies in them; every dtype traces; FLOPs are declared,
for torch's own counter through `moebench.kernels.flops`.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moebench.kernels.checks import check_same_dtype, check_shape, check_tensor, check_together, described, is_dense
from moebench.kernels.cost import Cost, Product
from moebench.kernels.define import define_operator


def grouped_gemm(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor, check: bool = False) -> Tensor:
    """`y[n] = x[n] w[l]` for the rows n of every expert l, 0 for rows past the last end. Differentiable in x and w.

    Sums are taken in fp32 (fp64 for fp64) and rounded once; fp32 products are TF32 on a GPU only where
    `torch.backends.cuda.matmul` allows it. On a GPU the Triton implementation reads nothing on the host; torch's does
    but for bf16 in 16-byte rows, and fp64 always runs torch's.

    Args:
        x_ND: sorted by expert; any strides.
        ends_L: int32 or int64, cumulative, on the device of x; ends out of order give unspecified results but are never
            used as an address outside the tensors.
        w_LDF: any strides; a transposed view of [L, F, D] is read as it lies.
        check: read the ends on the host, which is a synchronisation, and raise where they are not ascending in 0..N.

    Returns:
        y_NF.

    Raises:
        ValueError: wrong dtypes or shapes, tensors on different devices; with `check`, ends that are not ascending.
    """
    _check(x_ND, ends_L, w_LDF, check)
    return _grouped_gemm(x_ND, ends_L, w_LDF)


def grouped_gemm_dw(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor, check: bool = False) -> Tensor:
    """`dw[l] = x[rows of l]^T dy[rows of l]`, the gradient of the weights of `grouped_gemm`. Differentiable.

    An expert without rows gets zeros; rows past the last end are not read.

    Returns:
        dw_LDF.

    Raises:
        ValueError: as `grouped_gemm`.
    """
    _check_dw(x_ND, ends_L, dy_NF, check)
    return _grouped_gemm_dw(x_ND, ends_L, dy_NF)


def grouped_gemm_reference(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor, check: bool = False) -> Tensor:
    """The definition: one product an expert."""
    _check(x_ND, ends_L, w_LDF, check)
    parts, begin = [], 0
    for expert, end in enumerate(ends_L.tolist()):
        parts.append(x_ND[begin:end] @ w_LDF[expert])
        begin = end
    return torch.cat([*parts, x_ND.new_zeros(x_ND.shape[0] - begin, w_LDF.shape[2])])


def grouped_gemm_dw_reference(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor, check: bool = False) -> Tensor:
    """The definition: one product an expert."""
    _check_dw(x_ND, ends_L, dy_NF, check)
    begins = [0, *ends_L.tolist()[:-1]]
    return torch.stack([x_ND[begin:end].t() @ dy_NF[begin:end] for begin, end in zip(begins, ends_L.tolist())])


def _check(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor, check: bool) -> None:
    _check_rows(x_ND, ends_L)
    check_tensor("w", w_LDF, "LDF")
    check_shape("w", w_LDF, (ends_L.shape[0], x_ND.shape[1], w_LDF.shape[2]), "ends and x")
    check_together("w", w_LDF, "x", x_ND)
    check_same_dtype("w", w_LDF, "x", x_ND)
    if check:
        _check_ends(ends_L, x_ND.shape[0])


def _check_dw(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor, check: bool) -> None:
    _check_rows(x_ND, ends_L)
    check_tensor("dy", dy_NF, "NF")
    check_shape("dy", dy_NF, (x_ND.shape[0], dy_NF.shape[1]), "the rows of x")
    check_together("dy", dy_NF, "x", x_ND)
    check_same_dtype("dy", dy_NF, "x", x_ND)
    if check:
        _check_ends(ends_L, x_ND.shape[0])


def _check_rows(x_ND: Tensor, ends_L: Tensor) -> None:
    check_tensor("x", x_ND, "ND")
    is_index = is_dense(ends_L) and ends_L.dtype in (torch.int32, torch.int64)
    if not is_index or ends_L.dim() != 1 or not ends_L.shape[0]:
        got = described(ends_L)
        raise ValueError(f"ends must be an int32 or int64 tensor [L] with at least one expert; got {got}")
    check_together("ends", ends_L, "x", x_ND)


def _check_ends(ends_L: Tensor, num_rows: int) -> None:
    begin = 0
    for expert, end in enumerate(() if ends_L.is_meta else ends_L.tolist()):
        if not begin <= end <= num_rows:
            raise ValueError(f"ends must ascend within the {num_rows} rows of x; expert {expert} has {begin}:{end}")
        begin = end


def _rows_of_experts(ends_L: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """(first row, end) of every expert, and at last of nobody's rows; a read on the host."""
    begin = 0
    for end in (*ends_L.tolist(), num_rows):
        end = min(max(end, begin), num_rows)
        yield begin, end
        begin = end


def _runs_on_device(left: Tensor, right: Tensor) -> bool:
    """Whether torch has one kernel for all groups, whose counts stay on the device: bf16 on a GPU, 16-byte rows.

    For other dtypes and on the CPU its grouped product is the loop below, with a host read before it. A trace on meta
    tensors is one of a GPU.
    """
    is_for_gpu = (left.is_cuda or left.is_meta) and left.dtype == torch.bfloat16
    return is_for_gpu and _has_aligned_rows(left) and _has_aligned_rows(right)


def _has_aligned_rows(tensor: Tensor) -> bool:
    """What torch's grouped product asks for: one of the last two strides 1, the others multiples of 16 bytes."""
    *outer, rows, columns = tensor.stride()
    if 1 not in (rows, columns) or not tensor.numel() or tensor.data_ptr() % 16:
        return False
    leading = rows if columns == 1 else columns
    shorter = tensor.shape[-1] if columns == 1 else tensor.shape[-2]
    return leading >= shorter and all(stride * tensor.itemsize % 16 == 0 for stride in (*outer, leading))


def _torch_grouped_gemm(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor) -> Tensor:
    if _runs_on_device(x_ND, w_LDF):
        return grouped_mm_with_zero_tail(x_ND, ends_L, w_LDF)
    y_NF = x_ND.new_empty(x_ND.shape[0], w_LDF.shape[2])
    *experts, (unused, _) = _rows_of_experts(ends_L, x_ND.shape[0])
    for expert, (begin, end) in enumerate(experts):
        if end > begin:
            torch.mm(x_ND[begin:end], w_LDF[expert], out=y_NF[begin:end])
    y_NF[unused:].zero_()
    return y_NF


def grouped_mm_with_zero_tail(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor) -> Tensor:
    """torch's grouped product with zeros where it leaves memory as it was: past the last end."""
    y_NF = F.grouped_mm(x_ND, w_LDF, offs=_offsets(ends_L, x_ND.shape[0]))
    is_unused_N = torch.arange(x_ND.shape[0], device=x_ND.device) >= ends_L[-1]
    return y_NF.masked_fill_(is_unused_N.unsqueeze(1), 0)


def _offsets(ends_L: Tensor, num_rows: int) -> Tensor:
    """The ends as torch's grouped product takes them, which does not check them: int32, ascending, within the rows."""
    return ends_L.clamp(0, num_rows).cummax(0).values.to(torch.int32)


def grouped_gemm_dw_torch(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor) -> Tensor:
    """The torch code of `grouped_gemm_dw`, without an operator around it."""
    if _runs_on_device(x_ND, dy_NF):
        return F.grouped_mm(x_ND.t(), dy_NF, offs=_offsets(ends_L, x_ND.shape[0]))
    dw_LDF = _fake_grouped_gemm_dw(x_ND, ends_L, dy_NF)
    *experts, _ = _rows_of_experts(ends_L, x_ND.shape[0])
    for expert, (begin, end) in enumerate(experts):
        if end > begin:
            torch.mm(x_ND[begin:end].t(), dy_NF[begin:end], out=dw_LDF[expert])
        else:
            dw_LDF[expert].zero_()
    return dw_LDF


def _fake_grouped_gemm(x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor) -> Tensor:
    return x_ND.new_empty(x_ND.shape[0], w_LDF.shape[2])


def _fake_grouped_gemm_dw(x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor) -> Tensor:
    return x_ND.new_empty(ends_L.shape[0], x_ND.shape[1], dy_NF.shape[1])


def _balanced_rows(num_rows: int, experts: int) -> list[tuple[int, int]]:
    """(rows, experts with so many): a cost is a function of shapes, and counts are not in the shapes.

    Every row counts as used, and as evenly spread as whole rows allow, so that FLOPs are 2 N D F in any case.
    """
    least, rest = divmod(num_rows, experts)
    return [(rows, number) for rows, number in ((least + 1, rest), (least, experts - rest)) if rows and number]


def _cost(out: Tensor, x_ND: Tensor, ends_L: Tensor, w_LDF: Tensor) -> Cost:
    """Rows and the matrices of the experts that have rows once in, results once out."""
    (experts, d_in, d_out), rows = w_LDF.shape, x_ND.shape[0]
    groups = _balanced_rows(rows, experts)
    used = sum(number for _, number in groups)
    return Cost(
        "product",
        flops=2 * rows * d_in * d_out,
        bytes_read=x_ND.nbytes + ends_L.nbytes + used * d_in * d_out * w_LDF.itemsize,
        bytes_written=out.nbytes,
        products=tuple(Product(rows, d_out, d_in, number) for rows, number in groups),
    )


def grouped_gemm_dw_cost(out: Tensor, x_ND: Tensor, ends_L: Tensor, dy_NF: Tensor) -> Cost:
    """Both matrices of rows once in, a matrix for every expert out."""
    (rows, d_in), d_out = x_ND.shape, dy_NF.shape[1]
    groups = _balanced_rows(rows, ends_L.shape[0])
    return Cost(
        "product",
        flops=2 * rows * d_in * d_out,
        bytes_read=x_ND.nbytes + ends_L.nbytes + dy_NF.nbytes,
        bytes_written=out.nbytes,
        products=tuple(Product(d_in, d_out, rows, number) for rows, number in groups),
    )


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_NF):
    x_ND, ends_L, w_LDF = ctx.saved_tensors
    grad_x_ND = grad_w_LDF = None
    if ctx.needs_input_grad[0]:
        grad_x_ND = _grouped_gemm(grad_NF, ends_L, w_LDF.transpose(1, 2))
    if ctx.needs_input_grad[2]:
        # A gradient that lies in memory as its weight does is accumulated without a copy.
        if w_LDF.stride(1) == 1 and w_LDF.stride(2) != 1:
            grad_w_LDF = _grouped_gemm_dw(grad_NF, ends_L, x_ND).transpose(1, 2)
        else:
            grad_w_LDF = _grouped_gemm_dw(x_ND, ends_L, grad_NF)
    return grad_x_ND, None, grad_w_LDF


def _dw_backward(ctx, grad_LDF):
    x_ND, ends_L, dy_NF = ctx.saved_tensors
    grad_x_ND = _grouped_gemm(dy_NF, ends_L, grad_LDF.transpose(1, 2)) if ctx.needs_input_grad[0] else None
    grad_dy_NF = _grouped_gemm(x_ND, ends_L, grad_LDF) if ctx.needs_input_grad[2] else None
    return grad_x_ND, None, grad_dy_NF


_grouped_gemm = define_operator(
    "grouped_gemm(Tensor x, Tensor ends, Tensor w) -> Tensor",
    implementation=_torch_grouped_gemm,
    fake=_fake_grouped_gemm,
    cost=_cost,
    backward=_backward,
    setup_context=_setup_context,
    triton="grouped_gemm:grouped_gemm",
)
_grouped_gemm_dw = define_operator(
    "grouped_gemm_dw(Tensor x, Tensor ends, Tensor dy) -> Tensor",
    implementation=grouped_gemm_dw_torch,
    fake=_fake_grouped_gemm_dw,
    cost=grouped_gemm_dw_cost,
    backward=_dw_backward,
    setup_context=_setup_context,
    triton="grouped_gemm:grouped_gemm_dw",
)
