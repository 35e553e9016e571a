"""A model's training step as one FX graph: forward, loss and backward, with launches and waits of collectives as nodes.

The joint graph is AOTAutograd's, traced on fake tensors: nothing is computed, so that a model of any size is captured
in seconds, whatever its parameters lie on. `min-cut` lets torch's partitioner choose what the backward recomputes
instead of keeping it, and joins its two graphs again; `joint` keeps every value that the backward reads.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from moebench.systems.lancet.regions import MarkRegions, settle_regions
from moebench.workloads.errors import one_of

PARTITIONS = ("joint", "min-cut")


@dataclass(frozen=True)
class StepGraph:
    """One training step of one rank.

    The graph's inputs are the parameters in order, the data, and the gradient of the job's loss with respect to this
    rank's; its outputs the loss and a gradient for each parameter.

    Attributes:
        graph: nodes in issue order; each has `meta["val"]` and, unless it is an input or the output, `meta["region"]`.
        parameters: names.
        is_shared: of each parameter, whether all ranks hold it alike and its gradients are summed over them.
    """

    graph: fx.Graph
    parameters: tuple[str, ...]
    is_shared: tuple[bool, ...]

    @property
    def output(self) -> fx.Node:
        """The output node; its one argument is the list of outputs."""
        return next(iter(reversed(self.graph.nodes)))

    @property
    def gradients(self) -> list[fx.Node]:
        """The node of each parameter's gradient."""
        return list(self.output.args[0][1:])  # type: ignore[index,arg-type]

    def with_graph(self, graph: fx.Graph) -> "StepGraph":
        """The same step by another graph."""
        return StepGraph(graph, self.parameters, self.is_shared)


def capture(model: nn.Module, data: Sequence[Tensor], partition: str = "joint") -> StepGraph:
    """The step of `model(*data) -> loss` as a graph; parameters and data are not read, they may be on meta.

    Args:
        data: tensors like those of a step; the graph is for their shapes.
        partition: one of `PARTITIONS`.

    Raises:
        InputError: another partition.
        RuntimeError: the model can't be traced, or a parameter takes no part in the loss: the reason.
    """
    if partition not in PARTITIONS:
        raise one_of("partition", partition, PARTITIONS)
    named = dict(model.named_parameters())
    joint = _joint(model, list(named), [*named.values(), *data])
    settle_regions(joint.graph)
    _clean(joint.graph)
    if partition == "min-cut":
        joint = _recomputing(joint)
    _keep_gradients(joint.graph, list(named))
    is_shared = tuple(not getattr(parameter, "is_expert", False) for parameter in named.values())
    return StepGraph(joint.graph, tuple(named), is_shared)


def _joint(model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> fx.GraphModule:
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch._subclasses.fake_tensor import FakeTensorMode

    def loss(*args: Tensor) -> tuple[Tensor]:
        with MarkRegions():
            parameters = dict(zip(names, args))
            return (torch.func.functional_call(model, parameters, tuple(args[len(names) :])),)

    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [_like(tensor) for tensor in tensors]
    # `moebench::wait` returns its argument, which torch warns of, and refuses where CI is set.
    with config.patch(error_on_custom_op_aliasing=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return aot_export_joint_simple(loss, tuple(fakes), trace_joint=True)  # type: ignore[return-value]


def _keep_gradients(graph: fx.Graph, names: Sequence[str]) -> None:
    """Leave the loss and the parameters' gradients as outputs; data have none.

    Raises:
        RuntimeError: a parameter has none.
    """
    output = graph.output_node()
    wanted: list[Any] = list(output.args[0][: len(names) + 1])  # type: ignore[index,arg-type]
    missing = [name for name, node in zip(names, wanted[1:]) if node is None]
    if missing:
        raise RuntimeError(f"no gradient reaches {', '.join(missing)}: every parameter must take part in the loss")
    output.args = (wanted,)


def _like(tensor: Tensor) -> Tensor:
    """A tensor of its shape and strides; for meta on the CPU, where torch traces losses that it drops on meta."""
    device = "cpu" if tensor.is_meta else tensor.device
    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return fake.requires_grad_(tensor.requires_grad)


def _clean(graph: fx.Graph) -> None:
    """Drop checks of metadata, detachments and what nobody reads."""
    for node in list(graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)
        elif node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)


def _recomputing(joint: fx.GraphModule) -> fx.GraphModule:
    """Forward and backward as the min-cut partitioner has them, one after the other in one graph."""
    from functorch.compile import min_cut_rematerialization_partition

    inputs = [node.name for node in joint.graph.nodes if node.op == "placeholder"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=1)
    graph, by_name = fx.Graph(), {}
    templates = {node.name: node for part in (backward, forward) for node in part.graph.nodes}
    for name in inputs:
        by_name[name] = graph.placeholder(name)
        by_name[name].meta = dict(templates[name].meta) if name in templates else {}
    loss = _append(graph, forward.graph, by_name)[0]
    gradients = _append(graph, backward.graph, by_name)
    graph.output([loss, *gradients])
    graph.lint()
    return fx.GraphModule(joint, graph)


def _append(graph: fx.Graph, part: fx.Graph, by_name: dict[str, fx.Node]) -> list[Any]:
    """Copy a part's nodes, whose inputs are nodes before it by name; returns its outputs."""
    copied: dict[fx.Node, fx.Node] = {}
    outputs: list[Any] = []
    for node in part.nodes:
        if node.op == "placeholder":
            copied[node] = by_name[node.name]
        elif node.op == "output":
            outputs = list(fx.node.map_arg(node.args[0], lambda source: copied[source]))
        else:
            copied[node] = graph.node_copy(node, lambda source: copied[source])
            by_name.setdefault(node.name, copied[node])
    return outputs
