"""A step in parts is the step: the same experts, slots and drops bit for bit, loss and gradients within rounding."""

from dataclasses import replace
from functools import cache

import pytest

from moebench.kernels.collectives.group import described_group
from moebench.ranks.run import run_ranks
from moebench.systems.lancet.axes import data_of as data_behind
from moebench.systems.lancet.axes import infer_axes
from moebench.systems.lancet.blocks import COMBINE, DISPATCH, name_of
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.executor import Executor
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.in_parts import in_parts
from moebench.systems.lancet.nodes import is_backward
from moebench.systems.lancet.partition import Limits, PartTimes, Pipeline, even_part_s, plan_partition
from moebench.systems.lancet.plan import plan_of
from moebench.systems.lancet.schedule import schedule
from moebench.trace.recorder import record_step
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.models.shape import MODEL_CONVENTIONS
from tests.systems.lancet.models import SMALL, data_of, inputs_of, made_up_times, model_of
from tests.systems.lancet.on_ranks import parts_are_whole

WIDE = replace(SMALL, layers=2, batch_size=16, sequence=6, capacity_factor=0.9)
GATES = {"switch": GateSpec("switch"), "bpr": GateSpec("bpr", 1)}
TOKEN_MAJOR = replace(MODEL_CONVENTIONS, choice_order="token-major")
TIMES = made_up_times().node_s


@cache
def captured(shape, ranks):
    """A step on paper that also gives the rows of every MoE layer's routes."""
    group = described_group(ranks)
    step = with_gradient_sync(capture(model_of(shape, group, "meta"), data_of(shape, device="meta")), group)
    rows = [node.args[1] for node in step.graph.nodes if name_of(node) == DISPATCH]
    step.output.args = ([*step.output.args[0], *rows],)
    return step


@cache
def planned(step):
    """Ranges around every MoE layer."""
    free = PartTimes(even_part_s(TIMES, 0.0), lambda nbytes: 0.0)
    return plan_partition(step, TIMES, free, Limits(groups_between=3)).pipelines


def pipelines(step, parts):
    """Those ranges, all in so many parts."""
    return [replace(one, parts=parts) for one in planned(step)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_real_ranks_parts_are_the_whole(ranks):
    """For 2, 4 and 8 parts and both gates, alone and with weight gradients moved and sums joined."""
    cases = []
    for gate in GATES.values():
        step = captured(replace(WIDE, gate=gate), ranks)
        plans = [in_parts(step, pipelines(step, parts)) for parts in (2, 4, 8)]
        assert all(one is not step for one in plans)
        plans.append(schedule(plans[1], made_up_times()).step)
        cases.append((replace(WIDE, gate=gate), *(plan_of(one.graph) for one in (step, *plans))))
    for far in run_ranks("tests.systems.lancet.on_ranks:parts_are_whole", ranks, (cases,), timeout_s=240):
        assert len(far) == 8
        assert max(far) < 3e-5


def forced(step, parts, last=COMBINE):
    """A range from each layer's gate, or where that decides at once from its dispatch, to its combination."""
    nodes = [node for node in step.graph.nodes if node.op == "call_function"]
    data = data_behind(step.graph, len(step.parameters))
    found = []
    for at, node in enumerate(nodes):
        if name_of(node) != DISPATCH or is_backward(node):
            continue
        gate = next(n for n in range(at, 0, -1) if name_of(nodes[n]) == "moebench::topk_gate")
        end = next(n for n in range(at, len(nodes)) if name_of(nodes[n]) == last)
        inside = nodes[gate : end + 1]
        axes = infer_axes(inside, data)
        if axes is None:
            inside = nodes[at : end + 1]
            axes = infer_axes(inside, data)
        names = tuple(one.name for one in inside)
        found.append(Pipeline(names, parts, {one.name: axis for one, axis in axes.items()}, 2.0, 1.0))
    return found


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_alone_parts_are_the_whole_too(gate):
    """Without any exchange, and for two choices a token where tokens queue one after another."""
    for shape in (replace(WIDE, gate=gate), replace(WIDE, gate=replace(gate, top_k=2), conventions=TOKEN_MAJOR)):
        if shape.gate.label == "switch" and shape.gate.top_k > 1:
            shape = replace(shape, gate=GateSpec("topk", 2))
        step = captured(shape, 1)
        plans = [plan_of(in_parts(step, forced(step, parts)).graph) for parts in (2, 4, 8)]
        assert max(parts_are_whole(described_group(1), [(shape, plan_of(step.graph), *plans)])) < 3e-5


def sent(op):
    """Bytes of rows that a rank puts into an exchange; sizes are none."""
    even = len(op.collective.ranks) * (op.collective.bytes_per_peer or 0)
    return 0 if op.dtype == "int64" else sum(op.collective.send_bytes) or even


def test_in_parts_a_trace_has_no_padding_and_one_program():
    """On meta: parts share the slots evenly; the bytes of all exchanges of rows are those of the whole."""
    group, shape = described_group(4), WIDE
    step = captured(shape, 4)
    found = {}
    for parts in (1, 4):
        plan = plan_of((step if parts == 1 else in_parts(step, pipelines(step, parts))).graph)
        executor = Executor(plan, group, "meta")
        inputs = inputs_of(model_of(shape, group, "meta"), data_of(shape, device="meta"))
        ops = record_step(lambda: executor(inputs), persistent=inputs).ops  # noqa: B023
        found[parts] = [op for op in ops if op.collective and op.region == "exchange"]
        assert sum(op.kind == "host-read" for op in ops) == (0 if parts == 1 else parts * len(shape.moe_blocks))
    rows = {parts: sum(map(sent, ops)) for parts, ops in found.items()}
    assert rows[4] == rows[1]


def test_ranges_that_cant_be_packed_say_why():
    """Cut off behind the dispatch, or before the second exchange."""
    step = captured(WIDE, 2)
    whole = forced(step, 2)[0]
    at = next(place for place, name in enumerate(whole.nodes) if name.startswith("permute"))
    with pytest.raises(InputError, match="begins behind the dispatch"):
        in_parts(step, [replace(whole, nodes=whole.nodes[at + 1 :])])
    end = next(place for place, name in enumerate(whole.nodes) if name.startswith("relu"))
    with pytest.raises(InputError, match="second exchange is behind"):
        in_parts(step, [replace(whole, nodes=whole.nodes[: end + 1])])
    assert in_parts(step, []) is step
    top2 = captured(replace(WIDE, gate=GateSpec("topk", 2)), 2)
    with pytest.raises(InputError, match="every first choice queues before"):
        in_parts(top2, forced(top2, 2))
    assert pipelines(top2, 2) == []
