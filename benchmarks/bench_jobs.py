"""How long a training job takes to simulate: no longer with more GPUs at the same stages, and with uneven routing in
proportion to the distinct ranks, which are those of a node.

Run with `pytest benchmarks/bench_jobs.py --benchmark-enable`.
"""

from dataclasses import replace
from functools import cache

import pytest

from moebench.cases.case import Case
from moebench.rows.jobs import simulated
from moebench.sim.job import _part_time
from moebench.sim.uncertainty import draw
from moebench.trace.job import _stage
from moebench.workloads.job import JobWorkload
from moebench.workloads.load import load_topology
from moebench.workloads.load_decoder import load_decoder

MICROBATCHES = 60  # of each pipeline, whatever the GPUs
STAGES, DRAWS = 15, 32


@cache
def job(gpus, skew=0.0):
    """A case of Internal-352B, its machine and the draws; sequences in proportion to the GPUs."""
    topology = load_topology(f"{gpus // 8}x8-h800")
    batch = gpus // (8 * STAGES) * MICROBATCHES
    workload = JobWorkload("internal-352b", load_decoder("internal-352b"), STAGES, batch, skew=skew)
    case = Case("bench", "bench", "megascale", workload, topology.name, topology.name.partition("-")[0], "sim")
    return case, topology, draw(topology.parameters(), DRAWS, 0)


def anew(case, topology, values):
    """As in a process that has simulated nothing yet."""
    _stage.cache_clear()
    _part_time.cache_clear()
    return simulated(case, topology, values)


@pytest.mark.parametrize("gpus", [240, 1_440, 11_520])
def test_even_routing(benchmark, gpus):
    """One program a stage and part."""
    anew(*job(240))  # what is imported and remembered of operators' shapes is everybody's
    rows = benchmark.pedantic(anew, job(gpus), rounds=1, iterations=1)
    assert rows[0].status == "passed"


@pytest.mark.parametrize("gpus", [240, 1_440, 11_520])
def test_uneven_routing(benchmark, gpus):
    """Eight programs a stage and part: the ranks of a node."""
    case, topology, values = job(gpus, skew=0.5)
    anew(case, topology, values)
    rows = benchmark.pedantic(anew, (case, topology, values), rounds=1, iterations=1)
    assert rows[0].status in ("passed", "out-of-memory")
    assert replace(case.workload, skew=0.0) == job(gpus)[0].workload
