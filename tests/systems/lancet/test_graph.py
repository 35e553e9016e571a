"""The graph of a whole step: equal to eager mode on real ranks, and the same program when traced."""

import itertools
from dataclasses import replace

import pytest
import torch

from moebench.kernels.collectives.group import described_group
from moebench.kernels.collectives.outstanding import WaitError
from moebench.ranks.run import run_ranks
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.executor import Executor, Span
from moebench.systems.lancet.gradient_sync import with_gradient_sync
from moebench.systems.lancet.nodes import collective_of, is_wait
from moebench.systems.lancet.plan import function_of, plan_of
from moebench.systems.lancet.schedule import Switches, schedule
from moebench.systems.lancet.training import PlannedStep, eager_gradients
from moebench.systems.lancet.weight_gradients import greedy
from moebench.trace.recorder import record_step
from moebench.workloads.errors import InputError
from tests.systems.lancet.models import GATES, SMALL, data_of, inputs_of, made_up_times, model_of

ALONE = described_group(1)


def synced(shape, group, partition="joint"):
    """A model's step with gradient sync, captured on meta."""
    model, data = model_of(shape, group, "meta"), data_of(shape, device="meta")
    return with_gradient_sync(capture(model, data, partition), group)


def plan(*args):
    """The plan of `synced`."""
    return plan_of(synced(*args).graph)


@pytest.mark.parametrize("ranks", [2, 4])
def test_on_real_ranks_plans_are_eager_mode(ranks):
    """Captured once, on meta, and loaded by every rank: loss and every gradient bit for bit, recomputing or not.

    So are scheduled plans; joined sums of four ranks add up in another order.
    """
    group, shapes = described_group(ranks), [replace(SMALL, gate=gate) for gate in GATES[: 3 if ranks == 2 else 1]]
    partitions = ["min-cut", *["joint"] * (len(shapes) - 1)]
    steps = [synced(shape, group, by) for shape, by in zip(shapes, partitions)]
    apart = schedule(steps[0], made_up_times(), switches=Switches(fuses_sums=False))
    fused = schedule(steps[-1], made_up_times(), greedy)
    assert sum(len(one.under) for one in apart.filled) > 10
    assert sum(map(len, fused.sums)) > 10
    cases = [*zip(shapes, steps), (shapes[0], apart.step), (shapes[-1], fused.step)]
    cases = [(shape, plan_of(step.graph)) for shape, step in cases]
    for place, (_, one) in enumerate(cases):
        names = [call.target for call in one.calls]
        assert names.count("moebench::all_to_all_start.default") == 4 * len(SMALL.moe_blocks)
        assert (names.count("moebench::all_reduce_start.default") > 20) == (place != len(cases) - 1)
    for seen in run_ranks("tests.systems.lancet.on_ranks:largest_differences", ranks, (cases,), timeout_s=240):
        assert seen[:-1] == [0.0] * (len(cases) - 1)
        assert seen[-1] <= (0 if ranks == 2 else 1e-5)


@pytest.mark.parametrize("partition", ["joint", "min-cut"])
def test_alone_the_graph_is_eager_mode_and_the_traced_program(partition):
    """Bit-equal, no collective; under the recorder CPU and meta execute the same operators in the same regions."""
    programs = []
    for device in ("cpu", "meta"):
        model, data = model_of(SMALL, ALONE, device), data_of(SMALL, device=device)
        step = capture(model, data, partition)
        assert with_gradient_sync(step, ALONE) is step
        assert not any(collective_of(node) or is_wait(node) for node in step.graph.nodes)
        executor, inputs = Executor(plan_of(step.graph), ALONE, device), inputs_of(model, data)
        if device == "cpu":
            loss, gradients = eager_gradients(model, data, ALONE)
            found = executor(inputs)
            assert torch.equal(found[0], loss)
            assert all(map(torch.equal, found[1:], gradients))
        programs.append(record_step(lambda: executor(inputs), persistent=inputs))  # noqa: B023
    assert programs[0].ops == programs[1].ops
    assert programs[0].peak_bytes == programs[1].peak_bytes


def test_graphs_of_many_ranks_are_captured_without_any():
    """64 ranks on paper: four exchanges an MoE layer, an all-reduce a shared parameter, every launch with one wait."""
    shape, group = replace(SMALL, experts=128, batch_size=32), described_group(64)
    model, data = model_of(shape, group, "meta"), data_of(shape, device="meta")
    step = PlannedStep(model, plan(shape, group), group)
    ops = record_step(lambda: step(data), persistent=[*model.parameters(), *data]).ops
    starts = [op.index for op in ops if op.kind == "collective"]
    assert len(starts) == 4 * len(shape.moe_blocks) + len(model.shared())
    assert sorted(op.waits_on[0] for op in ops if op.kind == "wait") == starts
    assert {op.stream for op in ops if op.kind == "collective"} == {"communication"}
    own = {op.region for op in ops if op.name.startswith("moebench::all_to_all")}
    assert own == {"exchange"}
    assert {op.region for op in ops if op.name.startswith("moebench::all_reduce")} == {"grad-sync"}


def test_a_step_trains_and_tells_when_each_node_ran():
    """The loss falls over three steps; spans are in order and cover every node."""
    model, data = model_of(SMALL, ALONE), data_of(SMALL)
    step = PlannedStep(model, plan(SMALL, ALONE), ALONE, learning_rate=0.1)
    spans: list[Span] = []
    losses = [float(step(data)), float(step(data)), float(step(data, spans))]
    assert losses[0] > losses[1] > losses[2]
    assert [span.name for span in spans] == [call.name for call in step.executor.plan.calls]
    assert all(a.start_s <= a.end_s <= b.start_s for a, b in itertools.pairwise(spans))


class _Half(torch.nn.Module):
    """A model with a parameter that takes no part."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return (x * self.used).sum()


def test_bad_input_is_refused():
    """A partition that there is not, an unused parameter, inputs that do not fit, a wait that was lost."""
    model, data = model_of(SMALL, ALONE), data_of(SMALL)
    with pytest.raises(InputError, match="partition"):
        capture(model, data, "half")
    with pytest.raises(RuntimeError, match="no gradient reaches unused"):
        capture(_Half(), [torch.ones(2)])
    with pytest.raises(ValueError, match="the plan has"):
        Executor(plan_of(capture(_used(), [torch.ones(2)]).graph), ALONE, "cpu")([torch.ones(2)])
    with pytest.raises(ValueError, match="has the module"):
        function_of("moebench::nothing.default")
    group = described_group(2)
    model, data = model_of(SMALL, group, "meta"), data_of(SMALL, device="meta")
    graph = capture(model, data).graph
    wait = next(node for node in graph.nodes if is_wait(node))
    wait.replace_all_uses_with(wait.args[0])
    graph.erase_node(wait)
    with pytest.raises(WaitError, match="never waited for"):
        Executor(plan_of(graph), group, "meta")(inputs_of(model, data))


def _used():
    model = _Half()
    del model.unused
    return model
