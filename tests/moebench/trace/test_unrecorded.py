"""The trace against runs that no recorder watches: torch's profiler says which operators ran and what was allocated.

A dispatch mode changes a little of what torch does; the trace must show the program without one.
"""

from functools import cache

import pytest

from moebench.ranks.run import run_ranks
from moebench.systems.registry import get, systems
from moebench.trace.layer import trace_layer
from moebench.workloads.conventions import COMMON, Conventions
from moebench.workloads.layer import GateSpec, LayerWorkload, RoutingSpec
from tests.moebench.trace import rank_programs
from tests.moebench.trace.ragged import RAGGED

GATES = (GateSpec("switch"), GateSpec("gshard", 2), GateSpec("topk", 3))
DROPLESS = Conventions(capacity_rule="unlimited")
COPIED_BY_GLOO = ("megatron_allgather",)


def _workload(gate, **changes):
    return LayerWorkload(gate, 2, 128, 256, 192, 8, **changes)


CASES = {
    **{
        f"{name}-{gate.label}-{'gradient' if gradient else 'constant'}": (
            name,
            _workload(gate, input_gradient=gradient),
            COMMON,
        )
        for name in sorted(systems())
        if getattr(get(name), "by", "flat") == "flat"  # as all are on one node
        for gate in GATES
        for gradient in (True, False)
    },
    "ragged-zipf": (RAGGED.name, _workload(GateSpec("topk", 2), routing=RoutingSpec("zipf")), DROPLESS),
    "megatron-zipf": ("megatron", _workload(GATES[2], routing=RoutingSpec("zipf")), DROPLESS),
    "megatron-fused-zipf": ("megatron+layout=fused", _workload(GATES[2], routing=RoutingSpec("zipf")), DROPLESS),
    "megatron-ragged-zipf": ("megatron+pads=false", _workload(GATES[2], routing=RoutingSpec("zipf")), COMMON),
    "deepspeed-zipf": ("deepspeed", _workload(GATES[0], routing=RoutingSpec("zipf")), DROPLESS),
}


@cache
def _profiled(world):
    results = run_ranks(f"{rank_programs.__name__}:profile_each", world, (list(CASES.values()),), timeout_s=240)
    return dict(zip(CASES, results[0], strict=True))


def _traced(case, world):
    name, workload, conventions = case
    system = RAGGED if name == RAGGED.name else get(name)
    return trace_layer(system, workload, world, conventions, ranks_per_node=world)[0]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_peak_memory_equals_the_allocators(case, world):
    """Within 1 %: what torch's CPU allocator hands out at most during the step, above what lived before it."""
    if world > 1 and CASES[case][0] in COPIED_BY_GLOO:
        pytest.skip("gloo reduces a copy of what a reduce-scatter is given")
    allocated, _ = _profiled(world)[case]
    program = _traced(CASES[case], world)
    assert program.peak_bytes - program.persistent_bytes == pytest.approx(allocated, rel=0.01)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_operators_are_those_that_run_without_a_recorder(case, world):
    """Every operator that touches memory, in order, is the one that the profiler saw."""
    _, spans = _profiled(world)[case]
    traced = [op.name for op in _traced(CASES[case], world).ops if op.kind not in ("view", "allocation", "host-read")]
    if case.startswith("fastermoe"):  # a profiler sees the copy behind `write_ints`
        traced = [name for name in traced if name != "aten::copy_"]
    traced = ["aten::clone" if name.startswith("host::copy") else name for name in traced]  # a copy on CPUs
    assert traced == _outermost(spans, set(traced))


def _outermost(spans, names):
    """The spans of these names that lie in no other: an operator's own inner calls are not the program's."""
    found, end = [], 0
    for name, start, stop in spans:
        if start >= end and name in names:
            found.append(name)
            end = stop
    return found
