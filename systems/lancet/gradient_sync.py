"""Data-parallel gradient sums as nodes: an all-reduce for each shared parameter, launched as soon as its gradient is
there, all waits at the end. That is RAF's graph; Lancet's passes move and fuse the launches.
"""

from typing import Any

import torch
from torch import fx

from moebench.kernels.collectives import operators
from moebench.kernels.collectives.group import Group
from moebench.systems.lancet.capture import StepGraph
from moebench.systems.lancet.nodes import value_of


def with_gradient_sync(step: StepGraph, group: Group) -> StepGraph:
    """The step whose gradients of shared parameters are the sums over the ranks; on one rank the step itself."""
    if group.size == 1:
        return step
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(step.graph, copied)
    placed = [copied[node] for node in step.gradients]
    sums: list[fx.Node] = []
    for gradient, is_shared in zip(placed, step.is_shared):
        sums.append(_launch(graph, gradient, group) if is_shared else gradient)
    for place, (gradient, started) in enumerate(zip(placed, sums)):
        if started is not gradient:
            sums[place] = _like(graph.call_function(operators.wait, (started, group.key)), started)
    graph.output([copied[step.output.args[0][0]], *sums])  # type: ignore[index]
    graph.lint()
    return step.with_graph(graph)


def _launch(graph: fx.Graph, gradient: fx.Node, group: Group) -> fx.Node:
    """Right behind the gradient its all-reduce; behind a copy, where the gradient is not contiguous."""
    after = gradient
    if not value_of(gradient).is_contiguous():
        with graph.inserting_after(after):
            kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
            after = _like(graph.call_function(torch.ops.aten.clone.default, (gradient,), kwargs), gradient)
            after.meta["val"] = value_of(gradient).contiguous()
    with graph.inserting_after(after):
        return _like(graph.call_function(operators.all_reduce_start, (after, group.key)), after)


def _like(node: fx.Node, source: fx.Node) -> fx.Node:
    node.meta = {"val": source.meta["val"], "region": "grad-sync"}
    return node
