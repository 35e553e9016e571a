"""Groups, dynamic programming, numbers of parts, pipelines on two streams, and the whole plan of a model's forward."""

import random
import sys
from dataclasses import replace
from functools import cache

import pytest

from moebench.kernels.collectives.group import described_group
from moebench.systems.lancet.axes import IRREGULAR, WHOLE
from moebench.systems.lancet.capture import capture
from moebench.systems.lancet.instructions import COMPUTE, Instruction
from moebench.systems.lancet.partition import Limits, PartTimes, even_part_s, full_experts, plan_partition
from moebench.systems.lancet.pipeline import cut, in_parts, pipeline, stages_of
from moebench.systems.lancet.ranges import Cost, best_parts, choose, common_counts, group
from moebench.systems.lancet.timeline import simulate
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from tests.systems.lancet.models import SMALL, data_of, made_up_times, model_of

DEEP = replace(SMALL, layers=4, batch_size=8)


def every_cover(count, longest):
    """All ways to cut `count` groups into ranges."""
    if not count:
        yield []
    for first in range(max(0, count - longest), count):
        for cover in every_cover(first, longest):
            yield [*cover, (first, count)]


@pytest.mark.parametrize("seed", range(20))
def test_dynamic_programming_is_brute_force(seed):
    """The least total over every way to cut the groups; ranges cover all, none too long; each cost is asked once."""
    source, asked = random.Random(seed), []
    count, longest = source.randint(1, 8), source.randint(1, 5)
    table = {(a, b): source.uniform(0.5, 1.5) * (b - a) for a in range(count) for b in range(a + 1, count + 1)}

    def cost(first, end):
        asked.append((first, end))
        return Cost(table[first, end], 2)

    found = choose(count, longest, cost)
    assert [one.first for one in found] == [0, *(one.end for one in found[:-1])]
    assert found[-1].end == count
    assert max(one.end - one.first for one in found) <= longest
    total = sum(one.cost.seconds for one in found)
    assert total == pytest.approx(min(sum(table[one] for one in cover) for cover in every_cover(count, longest)))
    assert len(asked) == len(set(asked)) <= count * longest
    assert choose(0, 1, cost) == []
    with pytest.raises(ValueError, match="at least one group"):
        choose(count, 0, cost)


def test_parts_divide_everything_and_stop_early():
    """The paper's batches: 48, 24, 16 and 8 sequences; the first number that is no better ends the search."""
    assert common_counts([48, 48 * 512], 8) == [2, 3, 4, 6, 8]
    assert common_counts([24], 8) == [2, 3, 4, 6, 8]
    assert common_counts([16], 8) == [2, 4, 8]
    assert common_counts([8], 8) == [2, 4]
    assert common_counts([8, 6], 8) == [2]
    assert common_counts([], 8) == common_counts([7], 8) == common_counts([8], 1) == []
    times = {2: 9.0, 3: 8.0, 4: 8.5, 6: 7.0}
    assert best_parts(10.0, [2, 3, 4, 6], times.__getitem__) == Cost(8.0, 3)
    assert best_parts(10.0, [2, 3, 4, 6], times.__getitem__, stops_early=False) == Cost(7.0, 6)
    assert best_parts(5.0, [2, 3, 4, 6], times.__getitem__) == Cost(5.0, 1)


def test_groups_hold_together_what_must():
    """By time, with a span in one piece and boundaries where they are forced; every instruction once."""
    program = [Instruction(str(at), COMPUTE, 1.0) for at in range(10)]
    assert group(program, 3.0) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert group(program, 3.0, spans=[(4, 9)]) == [(0, 3), (3, 4), (4, 9), (9, 10)]
    assert group(program, 100.0, boundaries=[2, 5]) == [(0, 2), (2, 5), (5, 10)]
    assert group(program, 0.0, spans=[(0, 10)], boundaries=[5]) == [(0, 10)]
    assert group([], 1.0) == []


def exchange_between(compute_s, exchange_s):
    """Compute, exchange, compute."""
    return [
        Instruction("a", COMPUTE, compute_s),
        Instruction("x", "all_to_all", exchange_s, (0,)),
        Instruction("v", COMPUTE, 0.0, (1,)),
        Instruction("b", COMPUTE, compute_s, (2,)),
    ]


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_pipelines_by_hand(parts):
    """With perfect division: the first part's compute, then the longer of the two, then the last part's."""
    program = exchange_between(4.0, 8.0)
    assert stages_of(program) == [[0], [1], [2, 3]]
    found = pipeline(program, parts, lambda number, k: program[number].time_s / k)
    assert found.makespan_s == pytest.approx(4.0 / parts + 8.0 + 4.0 / parts)
    assert found.communication_s == pytest.approx(8.0)
    issued = in_parts(program, parts, lambda number, k: program[number].time_s / k)
    assert [one.name for one in issued[: 2 * parts]] == [f"{name}.{part}" for part in range(parts) for name in "ax"]
    assert len(issued) == parts * len(program)
    merged = pipeline(program, parts, lambda number, k: program[number].time_s / k, {0: 3.0, 3: 2.0})
    late_s = 1.0 if parts == 4 else 0.0  # the first one goes under the exchange, but for what holds up the first part
    assert merged.makespan_s == pytest.approx(found.makespan_s + late_s + 2.0)
    if parts == 1:
        assert found.makespan_s == simulate(program).makespan_s


def test_a_cut_range_needs_nothing_from_before():
    """Numbers are its own; times are kept."""
    part = cut(exchange_between(1.0, 2.0), 1, 4)
    assert [one.needs for one in part] == [(), (0,), (1,)]
    assert simulate(part).makespan_s == 3.0


@cache
def captured(gate, ranks):
    """A model's step on paper."""
    shape, group_of = replace(DEEP, gate=GateSpec(gate, 1)), described_group(ranks)
    return capture(model_of(shape, group_of, "meta"), data_of(shape, device="meta"))


def planned(gate="switch", limits=None, latency_s=1e-6, is_full=False, merge_s=0.0, ranks=2):
    """The step and its plan."""
    step, node_s = captured(gate, ranks), made_up_times().node_s
    part_s = even_part_s(node_s, latency_s)
    times = PartTimes(full_experts(node_s, part_s) if is_full else part_s, lambda nbytes: merge_s)
    return step, plan_partition(step, node_s, times, limits or Limits(groups_between=3))


@pytest.mark.parametrize("gate", ["switch", "bpr"])
def test_every_moe_layer_gets_a_pipeline_around_its_exchanges(gate):
    """One a layer; a number of parts that divides the batch; shorter than before; BPR's start behind the gate."""
    step, plan = planned(gate)
    assert len(plan.pipelines) == len(DEEP.moe_blocks)
    assert plan.after_s < plan.before_s
    assert plan.evaluated < plan.groups * plan.groups
    region = {node.name: node.meta["region"] for node in step.graph.nodes if node.op == "call_function"}
    for one in plan.pipelines:
        assert DEEP.batch_size % one.parts == 0
        assert one.parts_s < one.whole_s
        assert sum(name.startswith("all_to_all_start") for name in one.nodes) == 2
        assert sum(name.startswith("wait") for name in one.nodes) == 2
        assert {axis for name, axis in one.axes.items() if name.startswith(("all_to_all", "wait"))} == {IRREGULAR}
        assert all(one.axes.get(name, WHOLE) != WHOLE for name in one.nodes if region[name] in ("exchange", "combine"))
        if gate == "bpr":
            assert "gate" not in {region[name] for name in one.nodes}
        assert f"in {one.parts} parts: " in str(one)


def test_what_parts_cost_decides():
    """Dear launches, dear merges: left as it is. Experts in full for every part: fewer parts or longer."""
    _, cheap = planned()
    for dear in (planned(latency_s=1.0)[1], planned(merge_s=1.0)[1]):
        assert dear.pipelines == ()
        assert dear.after_s == pytest.approx(dear.before_s)
    _, full = planned(is_full=True)
    assert cheap.after_s < full.after_s
    _, most = planned(limits=Limits(most_parts=2, groups_between=3))
    assert {one.parts for one in most.pipelines} == {2}
    _, short = planned(limits=Limits(longest=1))
    assert short.after_s >= cheap.after_s


def test_no_exchange_no_plan_and_no_solver_an_error(monkeypatch):
    """One rank has nothing to hide; without ortools nothing can be inferred."""
    _, alone = planned(ranks=1)
    assert (alone.pipelines, alone.before_s) == ((), alone.after_s)
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(InputError, match="pip install ortools"):
        planned()
