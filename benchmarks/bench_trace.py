"""How long a trace takes: the layer of the `hetu` suite at 8 and at 1,440 ranks, and its way to JSON.

Run with `pytest benchmarks/bench_trace.py --benchmark-enable`.
"""

import pytest

from moebench.systems.registry import get
from moebench.trace.layer import trace_layer
from moebench.trace.serialise import programs_from_json, programs_to_json
from moebench.workloads.conventions import COMMON
from moebench.workloads.layer import GateSpec, LayerWorkload


def _workload(gate, experts):
    return LayerWorkload(gate, 8, 1024, 2048, 2048, experts)


@pytest.mark.parametrize(("ranks", "experts"), [(8, 16), (1440, 1440)])
@pytest.mark.parametrize("gate", [GateSpec("switch"), GateSpec("gshard", 2)], ids=lambda gate: gate.label)
@pytest.mark.parametrize("name", ["deepspeed", "deepspeed_sparse", "hetumoe"])
def test_trace_of_a_layer(benchmark, name, gate, ranks, experts):
    """The product's promise is 50 ms, and no more at 1,440 ranks than at 8."""
    system, workload = get(name), _workload(gate, experts)
    trace_layer(system, workload, ranks, COMMON)
    benchmark(trace_layer, system, workload, ranks, COMMON)


def test_json_there_and_back(benchmark):
    """One program of some 250 operators."""
    programs = trace_layer(get("deepspeed"), _workload(GateSpec("gshard", 2), 16), 8, COMMON)
    benchmark(lambda: programs_from_json(programs_to_json(programs)))
