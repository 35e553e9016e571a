"""What kind of work a node of a step's graph is: computation, the launch of a collective, the wait for one."""

import operator

import torch
from torch import fx

from moebench.kernels.collectives import operators
from moebench.systems.lancet import composites

_STARTS = {
    operators.all_to_all_start: "all_to_all",
    operators.all_reduce_start: "all_reduce",
    operators.all_gather_start: "all_gather",
    operators.reduce_scatter_start: "reduce_scatter",
    operators.broadcast_start: "broadcast",
    operators.reduce_start: "reduce",
    operators.gather_start: "gather",
    operators.scatter_start: "scatter",
    **composites.LAUNCHES,
}
_WAITS = {operators.wait, *composites.WAITS}
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.expand.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.select.int,
    torch.ops.aten.unbind.int,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    operator.getitem,
}


def collective_of(node: fx.Node) -> str | None:
    """`all_to_all`, `all_reduce`, ... of a node that launches one; None of all others.

    The exchange of a part's sizes is no `all_to_all` but `sizes`: it is too short for anything to go under it.
    """
    return _STARTS.get(node.target) if node.op == "call_function" else None  # type: ignore[call-overload]


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective, its first argument."""
    return node.op == "call_function" and node.target in _WAITS


def is_backward(node: fx.Node) -> bool:
    """Whether the node stems from the backward."""
    return node.meta.get("partitioner_tag") == "is_backward"


def is_view(node: fx.Node) -> bool:
    """Whether the node moves no data: a view, or a part of a node with several results."""
    return node.op == "call_function" and node.target in _VIEWS


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for a node's result: shape, strides, dtype."""
    return node.meta["val"]


def region_of(node: fx.Node) -> str:
    """The part of the step that the node belongs to (`moebench.kernels.region`)."""
    return node.meta["region"]
