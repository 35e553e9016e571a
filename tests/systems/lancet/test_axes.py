"""Splits of operators are right: parts of the inputs give parts of the output. And what ranges can be split."""

import operator
from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.systems.lancet.axes import IRREGULAR, WHOLE, data_of, infer_axes, inputs_of, rule_of
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.nodes import collective_of, is_wait
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.shape import MODEL_CONVENTIONS
from tests.systems.lancet.models import SMALL, model_of
from tests.systems.lancet.models import data_of as batch_of
from tests.systems.lancet.models import inputs_of as tensors_of

WIDE = replace(SMALL, batch_size=4)
aten = torch.ops.aten
RESIZED = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
ATTENTIONS = {
    "scores": (aten.bmm.default, aten.masked_fill.Scalar, aten._softmax.default),
    "fused": (torch.ops.moebench.attention.default,),
}
PASSED_ON = torch.ops.moebench.assign_slots.default  # whose parts are those of test_gating.py


def forward(shape, ranks=1, device="cpu"):
    """A captured step and its forward nodes."""
    group = described_group(ranks)
    model, data = model_of(shape, group, device), batch_of(shape, device=device)
    step = capture(model, data)
    nodes = [n for n in step.graph.nodes if n.op == "call_function" and n.meta["partitioner_tag"] == "is_forward"]
    return step, nodes, tensors_of(model, data)


def first(value):
    """The first tensor of a result."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    return value


def every(value):
    """The tensors of a result."""
    return [one for part in value for one in every(part)] if isinstance(value, (tuple, list)) else [value]


def halves(value, axis, part):
    """One of two parts; of several tensors, of each."""
    if isinstance(value, (tuple, list)):
        return type(value)(halves(one, axis, part) for one in value)
    return value.chunk(2, axis)[part] if axis != WHOLE else value


def call(node, given):
    """The node's operator on other inputs."""
    left = iter(given)
    args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda _: next(left))
    return node.target(*args, **kwargs)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_every_rule_cuts_what_it_says(attention):
    """Each admissible split of each operator of a model's forward, in two parts, on real tensors."""
    step, nodes, tensors = forward(replace(WIDE, attention=attention))
    values = dict(zip([n for n in step.graph.nodes if n.op == "placeholder"], tensors))
    tried = set()
    for node in nodes:
        given = [values[source] for source in inputs_of(node)]
        values[node] = call(node, given)
        for *splits, out in rule_of(node):
            if IRREGULAR in (*splits, out) or node.target is PASSED_ON:
                continue
            cuts = [(one, s) for v, s in zip((*given, values[node]), (*splits, out)) if s != WHOLE for one in every(v)]
            if any(one.dim() <= axis or one.shape[axis] % 2 for one, axis in cuts):
                continue
            for part in range(2):
                parts = [halves(value, split, part) for value, split in zip(given, splits)]
                wanted = halves(values[node], out, part)
                if node.target in RESIZED:
                    found = parts[0].reshape(wanted.shape) if node.target is not RESIZED[2] else wanted
                else:
                    found = call(node, parts)
                assert torch.allclose(first(found), first(wanted), atol=1e-5), (node.name, splits, out)
            tried.add(node.target)
    assert len(tried) >= 18
    assert {operator.getitem, aten.addmm.default, *ATTENTIONS[attention]} <= tried


def span(nodes, before, behind):
    """From `before` nodes in front of the first exchange to `behind` nodes after the second one's wait."""
    start = next(at for at, node in enumerate(nodes) if collective_of(node)) - before
    waits = [at for at, node in enumerate(nodes) if is_wait(node)]
    return nodes[start : waits[1] + 1 + behind]


def named(axes):
    """By name of the node."""
    return {node.name: axis for node, axis in axes.items()}


def test_a_range_over_everything_goes_by_sequences():
    """Tokens by their leading axis, dispatched rows irregularly, weights whole."""
    step, nodes, _ = forward(WIDE, 2, "meta")
    data = data_of(step.graph, len(step.parameters))
    axes = infer_axes(nodes[:-4], data)
    inside = {node for node in nodes[:-4] if node in data}
    assert all(axes[node] != WHOLE for node in inside)
    assert all(axis == WHOLE for node, axis in axes.items() if node not in data)
    found = named(axes)
    assert {found[n.name] for n in inside if n.meta["region"] == "exchange"} == {IRREGULAR}
    assert (found["addmm"], found["unbind"], found["bmm"], found["_softmax"]) == (0, 0, 0, 0)
    permuted = {node for node in inside if node.target is aten.permute.default}
    assert {node for node in inside if axes[node] == 1} == permuted


@pytest.mark.parametrize(
    ("gate", "conventions", "in_front"),
    [
        (GateSpec("switch"), MODEL_CONVENTIONS, True),
        (GateSpec("bpr", 1), MODEL_CONVENTIONS, False),
        (GateSpec("topk", 2), MODEL_CONVENTIONS, False),
        (GateSpec("topk", 2), replace(MODEL_CONVENTIONS, choice_order="token-major"), True),
    ],
)
def test_what_comes_before_the_gate_depends_on_the_gate(gate, conventions, in_front):
    """Switch splits before and after; BPR, and first choices before second ones, only after."""
    step, nodes, _ = forward(replace(WIDE, gate=gate, conventions=conventions), 2, "meta")
    data = data_of(step.graph, len(step.parameters))
    assert infer_axes(span(nodes, 1, 12), data) is not None  # from the dispatch on
    assert infer_axes(span(nodes, 0, 0), data) is not None
    before = next(at for at, node in enumerate(nodes) if node.meta["region"] == "gate")
    until = nodes.index(span(nodes, 0, 1)[-1]) + 1
    assert (infer_axes(nodes[before:until], data) is not None) == in_front


def test_ranges_without_a_split_say_none():
    """A loss over all tokens, nothing that depends on data, an operator without a rule."""
    step, nodes, _ = forward(WIDE, 2, "meta")
    data = data_of(step.graph, len(step.parameters))
    assert infer_axes(nodes, data) is None  # the loss
    assert infer_axes([n for n in nodes if n not in data][:2], data) is None
    assert infer_axes([], data) is None
