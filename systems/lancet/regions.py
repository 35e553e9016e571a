"""Regions of a captured graph: forward nodes keep the one that was open, backward nodes take that of their forward.

The graph is made by one trace in which autograd runs the backward outside the model's `with region` blocks. Every node
carries the number of the autograd node that it came from, so a backward node finds its forward by that number; sums of
gradients, which belong to no forward operator, take the region of what they add up.
"""

from typing import Any

import torch
from torch import fx
from torch.fx import traceback
from torch.utils._python_dispatch import TorchDispatchMode

from moebench.kernels.region import current_region

_KEY = "moebench_region"


class MarkRegions(TorchDispatchMode):
    """Writes the open region into the nodes that are traced inside the `with` block."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = current_region()
        if name is None:
            return func(*args, **(kwargs or {}))
        with traceback.annotate({_KEY: name}):
            return func(*args, **(kwargs or {}))


def settle_regions(graph: fx.Graph) -> None:
    """Write `meta["region"]` of every node that is executed, from the marks and the autograd numbers."""
    of_number: dict[int, str] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        number, is_backward = node.meta.get("seq_nr"), _is_backward(node)
        marked = None if is_backward else node.meta.get("custom", {}).get(_KEY)
        if marked is None:
            marked = of_number.get(number) if is_backward else None
        if marked is None or _is_sum_of_gradients(node, is_backward):
            marked = _neighbour(node) or marked or "dense"
        if not is_backward and number is not None:
            of_number.setdefault(number, marked)
        node.meta["region"] = marked


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _is_sum_of_gradients(node: fx.Node, is_backward: bool) -> bool:
    return is_backward and node.target is torch.ops.aten.add.Tensor


def _neighbour(node: fx.Node) -> str | None:
    """The region of the last of the node's inputs that has one."""
    found = [source.meta.get("region") for source in node.all_input_nodes]
    return next((name for name in reversed(found) if name is not None), None)
