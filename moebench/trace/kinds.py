"""Which kind of kernel an operator is; one efficiency curve of a Hardware file serves one kind.

A table by name for what torch doesn't state, then torch's own tags (`pointwise`, `reduction`) and schemas (views).
An operator that none of them knows is an error: a guessed kind would be a guessed cost.
"""

import torch
from torch._ops import OpOverload

from moebench.kernels.cost import KINDS
from moebench.trace.errors import UnknownOperator

# Names without the trailing underscore of in-place forms and without the `_foreach_` prefix.
_NAMES = {
    "product": "mm bmm addmm baddbmm addbmm mv addmv dot vdot linear _grouped_mm _scaled_mm _int_mm _addmm_activation "
    "convolution linear_backward matmul_backward",
    "view": "_unsafe_view _reshape_alias lift alias set view_as unsafe_split unsafe_split_with_sizes",
    "allocation": "empty empty_like new_empty empty_strided new_empty_strided empty_permuted resize resize_as",
    "fill": "zeros zeros_like new_zeros zero ones ones_like new_ones full full_like new_full fill arange linspace "
    "logspace eye rand rand_like randn randn_like randint randint_like randperm uniform normal "
    "exponential random geometric cauchy log_normal tril_indices triu_indices",
    "copy": "clone copy cat stack _stack flip roll repeat constant_pad_nd slice_backward select_backward "
    "slice_scatter select_scatter diagonal_scatter diagonal_backward as_strided_scatter unfold_backward diag_embed "
    "block_diag pixel_shuffle pixel_unshuffle channel_shuffle im2col col2im",
    "pointwise": "_to_copy native_dropout native_dropout_backward masked_fill tril triu where bernoulli lerp addcmul "
    "addcdiv clamp threshold_backward gelu_backward silu_backward sigmoid_backward tanh_backward "
    "softplus_backward leaky_relu_backward hardtanh_backward elu_backward logit_backward hardswish "
    "hardswish_backward hardsigmoid_backward hardshrink_backward softshrink_backward glu glu_backward "
    "log_sigmoid_forward log_sigmoid_backward rsub floor_divide addr isin complex polar mse_loss_backward "
    "huber_loss huber_loss_backward smooth_l1_loss smooth_l1_loss_backward binary_cross_entropy "
    "binary_cross_entropy_backward binary_cross_entropy_with_logits",
    "reduction": "sum mean amax amin max min argmax argmin all any prod norm var std var_mean std_mean logsumexp "
    "linalg_vector_norm count_nonzero aminmax median nanmedian mode trace dist native_layer_norm "
    "native_layer_norm_backward native_group_norm native_group_norm_backward _fused_rms_norm _fused_rms_norm_backward "
    "nll_loss_forward mse_loss",
    "softmax": "_softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax",
    "scan": "cumsum cumprod cummax cummin logcumsumexp",
    "gather": "gather index_select embedding index take _unsafe_index _embedding_bag _embedding_bag_forward_only "
    "_embedding_bag_per_sample_weights_backward",
    "scatter": "scatter scatter_add scatter_reduce index_add index_copy index_put _index_put_impl _unsafe_index_put "
    "index_fill index_reduce put embedding_dense_backward nll_loss_backward",
    "sort": "sort topk argsort msort kthvalue searchsorted bucketize",
}
KIND_BY_NAME = {name: kind for kind, names in _NAMES.items() for name in names.split()}


def base_name(operator: OpOverload) -> str:
    """`add` for `aten::add_` and for `aten::_foreach_add_`: the name under which forms of one operator share a kind."""
    name = operator._schema.name.split("::")[1]
    return name.removeprefix("_foreach_").removesuffix("_")


def kind_of(operator: OpOverload) -> str:
    """The kind of a plain aten operator, one of `moebench.kernels.cost.KINDS`.

    Raises:
        UnknownOperator: neither the table nor torch's tags and schema tell.
    """
    kind = KIND_BY_NAME.get(base_name(operator))
    if kind is None:
        kind = _kind_by_torch(operator)
    if kind not in KINDS:
        raise UnknownOperator(
            f"{operator._schema.name} has no known kind: use another operator, add it to moebench/trace/kinds.py, or "
            "make it a custom operator with a declared cost (moebench.kernels.cost.declare_cost)"
        )
    return kind


def _kind_by_torch(operator: OpOverload) -> str | None:
    if is_view(operator):
        return "view"
    tags = operator.tags
    if torch.Tag.inplace_view in tags:
        return "view"
    if torch.Tag.pointwise in tags or operator._schema.name.startswith("aten::_foreach_"):
        return "pointwise"
    if hasattr(torch.Tag, "reduction") and torch.Tag.reduction in tags:
        return "reduction"
    if operator._schema.name.endswith("_copy"):
        return "copy"
    if operator._schema.name.endswith("_"):
        return _kind_of_functional_form(operator)
    return None


def _kind_of_functional_form(operator: OpOverload) -> str | None:
    """In-place forms carry fewer tags than the functional form that they belong to."""
    packet = getattr(torch.ops.aten, base_name(operator), None)
    for overload in packet.overloads() if packet is not None else ():
        if torch.Tag.pointwise in getattr(packet, overload).tags:
            return "pointwise"
    return None


def is_view(operator: OpOverload) -> bool:
    """Whether every result is an alias of an argument that the operator doesn't write."""
    returns = operator._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
