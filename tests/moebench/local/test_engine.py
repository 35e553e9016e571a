from dataclasses import replace
from statistics import median

import pytest

from moebench.cases.case import Case
from moebench.kernels.region import REGIONS
from moebench.local import engine
from moebench.local.child import ChildFailed
from moebench.local.clock import CpuClock, clock_for
from moebench.local.engine import by_point, run_cases
from moebench.local.worker import Request, failure_of, measure
from moebench.systems import registry
from moebench.workloads.conventions import COMMON
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.load import load_topology
from moebench.workloads.machine import Hardware, Topology
from moebench.workloads.suite import Suite

TINY = LayerWorkload(GateSpec("switch"), batch_size=1, sequence=8, d_model=8, d_ffn=8, experts=2)
THIS = Topology("1x1-this-machine", "this", Hardware("this-machine", "CPU", "cpu", {}), 1, 1, "shared-memory", 1, {})
SUITE = Suite("own", "own", "none", ())


def case(system="reference", workload=TINY, topology=THIS.name):
    return Case("own", "steps", system, workload, topology, "1x1", "local")


@pytest.fixture(scope="module")
def measured():
    """Rows of two systems on one point, from two short processes."""
    cases = [case("reference"), case("hetumoe")]
    return list(run_cases(cases, {THIS.name: THIS}, SUITE, processes=2, blocks=7, threads=1))


def step_times(rows):
    return [row for row in rows if row.metric == "step_time"]


def test_every_sample_is_a_row_and_the_summary_is_their_median(measured):
    """Two processes x seven blocks x two places = 28 samples, numbered, each positive; one summary beside them."""
    assert [rows[0].system for rows in measured] == ["reference", "hetumoe"]
    for rows in measured:
        samples = [row for row in step_times(rows) if row.sample is not None]
        (summary,) = [row for row in step_times(rows) if row.sample is None]
        assert [row.sample for row in samples] == list(range(28))
        assert all(row.value > 0 for row in samples)
        assert summary.value == pytest.approx(median(row.value for row in samples))
        assert summary.low <= summary.value <= summary.high
        assert summary.detail["q1"] <= summary.value <= summary.detail["q3"]
        assert (summary.detail["count"], summary.detail["processes"]) == (28, 2)


def test_systems_of_a_point_are_interleaved_in_balanced_blocks(measured):
    """In each block of each process, the places of the two systems mirror each other and fill the block."""
    places = [
        {(r.detail["process"], r.detail["block"], r.detail["place"]) for r in step_times(rows) if r.sample is not None}
        for rows in measured
    ]
    assert not places[0] & places[1]
    for process in range(2):
        for block in range(7):
            own = [sorted(place for p, b, place in some if (p, b) == (process, block)) for some in places]
            assert sorted(own[0] + own[1]) == [0, 1, 2, 3]
            assert [sum(some) for some in own] == [3, 3]


def test_counted_quantities_are_those_of_the_trace(measured):
    """FLOPs, bytes and launches of the measured step equal the meta trace's."""
    from moebench.systems.registry import get
    from moebench.trace.layer import trace_layer

    for rows in measured:
        (program,) = trace_layer(get(rows[0].system), TINY, 1, COMMON)
        values = {row.metric: row.value for row in rows if not row.detail}
        assert values["flops"] == sum(op.flops for op in program.ops)
        assert values["device_bytes"] == sum(op.bytes for op in program.ops)
        assert values["launches"] > 0
        assert values["peak_memory"] == program.peak_bytes


def test_regions_have_times_by_phase(measured):
    """Each region that runs has a measured time."""
    for rows in measured:
        regions = [row for row in rows if row.metric == "region_time"]
        assert {row.detail["region"] for row in regions} <= set(REGIONS)
        assert {"gate", "experts"} <= {row.detail["region"] for row in regions}
        assert all(row.value > 0 for row in regions if row.detail["region"] == "experts")


def test_a_topology_of_several_ranks_is_unsupported_with_the_way_out():
    """One process holds one rank; the reason names the other engine."""
    many = replace(THIS, gpus_per_node=4, name="1x4-this-machine")
    (rows,) = run_cases([case(topology=many.name)], {many.name: many}, SUITE)
    assert [(row.status, row.value) for row in rows] == [("unsupported", None)]
    assert "--engine sim" in rows[0].reason


def test_a_gpu_is_an_error_where_there_is_none():
    """The error says what to do; nothing pretends to be a GPU."""
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError, match="torch sees none"):
        clock_for("gpu")
    gpu = load_topology("1x1-a100-80")
    (rows,) = run_cases([case(topology=gpu.name)], {gpu.name: gpu}, SUITE)
    assert rows[0].status == "unsupported"
    assert "torch sees none" in rows[0].reason


def test_an_unsupported_case_leaves_its_neighbours_measured():
    """A case that can't be built gets a reason, the other one of the point its samples."""
    sent = []
    odd = replace(TINY, gate=GateSpec("switch", 3))
    measure(Request(((case(workload=odd), case()),), "cpu", 0, 1, detail=False), lambda **message: sent.append(message))
    assert sent[0]["status"] == "unsupported"
    assert "top_k = 3" in sent[0]["reason"]
    assert sum("time_s" in message for message in sent) == 2


def test_a_process_that_dies_makes_its_cases_failed(monkeypatch):
    """The reason is in the row; the run goes on."""
    monkeypatch.setattr(engine, "WORKER", "moebench.local.no_such_worker")
    (rows,) = run_cases([case()], {THIS.name: THIS}, SUITE, threads=1)
    assert rows[0].status == "failed"
    assert "no_such_worker" in rows[0].reason


def test_a_foreign_system_that_ends_the_process_takes_no_neighbour_along(monkeypatch):
    """Its case is failed; the others of the point are measured again without it, from the first sample on."""
    asked = []

    def child(module, request, threads):
        asked.append([c.system for c in request.points[0]])
        for chosen in request.points[0]:
            yield {"case": chosen.hash, "time_s": 0.1, "regime": "hot", "block": 0, "place": 0}
            if chosen.system.startswith("theirs"):
                raise ChildFailed("ended with status 3")
        yield {"point_done": 0}

    monkeypatch.setattr(engine, "run_child", child)
    monkeypatch.setattr(registry, "package_of", lambda name: "theirs 1.0" if name.startswith("theirs") else None)
    point = (case("a"), case("theirs+degree=2"), case("b"))
    found = engine.measure_points([point], "cpu", processes=2)
    assert asked == [["a", "theirs+degree=2", "b"]] + 2 * [["a", "b"]]
    own, theirs, other = (found[c.hash] for c in point)
    assert (theirs.status, theirs.reason) == ("failed", "ended with status 3")
    assert [[s["process"] for s in m.samples] for m in (own, other)] == [[0, 1], [0, 1]]


def test_zero_tokens_are_measured_like_any_other_workload():
    """An empty batch takes time and moves no tokens."""
    (rows,) = run_cases([case(workload=replace(TINY, batch_size=0))], {THIS.name: THIS}, SUITE, processes=1, blocks=1)
    assert rows[0].status == "passed"


def test_failures_have_the_status_of_their_kind():
    """Memory is told from other errors."""
    assert failure_of(MemoryError("no room"))[0] == "out-of-memory"
    assert failure_of(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))[0] == "out-of-memory"
    assert failure_of(ValueError("odd")) == ("failed", "ValueError: odd")


def test_points_group_the_systems_and_nothing_else():
    """Another batch size, suite or implementation is another point."""
    other = replace(TINY, batch_size=2)
    cases = [case("a"), case("a", other), case("b"), replace(case("a"), implementation="triton"), case("b", other)]
    assert [[c.system for c in group] for group in by_point(cases)] == [["a", "b"], ["a", "b"], ["a"]]


def test_the_cpu_clock_is_the_wall():
    """A call that sleeps takes at least its sleep."""
    import time

    seconds, _ = CpuClock().time_s(lambda: time.sleep(0.01))
    assert seconds >= 0.01
