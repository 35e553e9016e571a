"""Calls of kernels measured in real processes: which run on a CPU, what their rows say, who shares a process."""

from dataclasses import replace

import pytest
import torch

from moebench.cases.case import Case
from moebench.local import engine
from moebench.local.engine import POINTS_A_PROCESS, _batches, by_point, run_cases
from moebench.local.kernel_step import kernel_step
from moebench.local.step import CannotRun, build_step
from moebench.trace.errors import Skipped
from moebench.trace.kernel import trace_kernel
from moebench.workloads.kernel import KernelWorkload
from moebench.workloads.kernel_floor import floor_of
from moebench.workloads.load import load_topology
from moebench.workloads.suite import Suite
from tests.moebench.local.test_engine import SUITE, TINY

CPU = torch.device("cpu")
GATE = KernelWorkload("topk_gate", 64, experts=8, top_k=2)
THIS = replace(load_topology("1x1-titan-rtx"), name="1x1-this-machine")
THIS = replace(THIS, hardware=replace(THIS.hardware, name="this-machine", kind="cpu"))


def case(name="torch", workload=GATE):
    return Case("own", "kernels", name, workload, THIS.name, "1x1", "local", implementation=name)


@pytest.fixture(scope="module")
def measured():
    """A forward of all that runs here and Triton, and a backward, from one short process each."""
    backward = replace(GATE, direction="backward")
    cases = [case("reference"), case("torch"), case("triton"), case("torch", backward)]
    found = run_cases(cases, {THIS.name: THIS}, SUITE, processes=1, blocks=3, threads=1)
    return {(rows[0].system, rows[0].direction): rows for rows in found}


def test_what_runs_here_has_times_and_what_follows_from_them(measured):
    """Samples, their summary, the floor and the distance from it, and the counts of the traced program."""
    for key in (("reference", "forward"), ("torch", "forward"), ("torch", "backward")):
        rows = measured[key]
        samples = [row for row in rows if row.metric == "kernel_time" and row.sample is not None]
        (summary,) = [row for row in rows if row.metric == "kernel_time" and row.sample is None]
        assert len(samples) == 6
        assert 0 < summary.value <= max(row.value for row in samples)
        assert (summary.op, summary.tokens, summary.implementation) == ("topk_gate", 64, key[0])
        by_metric = {row.metric: row for row in rows if row.sample is None}
        floor_s = floor_of(replace(GATE, direction=key[1])).bytes / 672e9
        assert by_metric["floor_ratio"].value == pytest.approx(summary.value / floor_s)
    counted = {row.metric: row.value for row in measured["torch", "forward"] if not row.detail}
    assert counted["device_bytes"] == sum(op.bytes for op in trace_kernel(GATE, "torch").ops)
    assert "device_bytes" not in {row.metric for row in measured["reference", "forward"]}


def test_triton_needs_a_gpu(measured):
    """On a CPU it has no time, and says so."""
    (row,) = measured["triton", "forward"]
    assert (row.metric, row.status, row.value) == ("kernel_time", "unsupported", None)
    assert "this is a CPU" in row.reason


def test_a_backward_runs_the_backward_alone():
    """Every call gives the gradients again, from one forward."""
    step = build_step(case("torch", replace(GATE, direction="backward")), CPU)
    first, again = step.run(), step.run()
    assert [gradient.shape for gradient in first] == [(64, 8)]
    assert torch.equal(first[0], again[0])
    assert step.counted.ops[0].phase == "backward"


@pytest.mark.parametrize(
    ("workload", "name", "error", "told"),
    [
        (KernelWorkload("topk", 4096, experts=4, top_k=1), "reference", Skipped, "up to 1,024"),
        (KernelWorkload("topk", 2**24, experts=64, top_k=1), "torch", Skipped, "on a CPU the limits are 200 MB"),
        (KernelWorkload("expert_ffn", 8192, 2, None, 2048, 2048, variant="relu"), "torch", Skipped, "FLOP; on a CPU"),
        (KernelWorkload("topk", 8, experts=2, top_k=3), "torch", CannotRun, "top_k = 3 must be between 1 and"),
    ],
)
def test_what_is_not_tried_here_says_why(workload, name, error, told):
    """Too long for the definition, too much for a CPU, no meaning: before any memory is taken."""
    with pytest.raises(error, match=told):
        kernel_step(case(name, workload), CPU)


def test_a_call_that_turns_out_slow_is_skipped(monkeypatch):
    """By the second try: it would be made some sixty times."""
    monkeypatch.setattr("moebench.local.kernel_step.CPU_S", 0.0)
    with pytest.raises(Skipped, match=r"a call takes .* here; on a CPU the limit is 0 s"):
        kernel_step(case(), CPU)


def test_implementations_of_a_call_are_measured_together():
    """They share the point; another shape is another one."""
    other = replace(GATE, tokens=128)
    groups = by_point([case("torch"), case("reference"), case("torch", other)])
    assert [[c.system for c in group] for group in groups] == [["torch", "reference"], ["torch"]]


def test_kernels_share_processes_and_layers_don_t():
    """A process starts in seconds and a call takes microseconds; a layer's memory is its own process's."""
    layer = Case("own", "steps", "reference", TINY, THIS.name, "1x1", "local")
    points = [(case("torch", replace(GATE, seed=seed)),) for seed in range(POINTS_A_PROCESS + 1)]
    sizes = [len(batch) for batch in _batches([points[0], (layer,), (layer,), *points])]
    assert sizes == [1, 1, 1, POINTS_A_PROCESS, 1]


def test_a_process_that_dies_takes_one_point_along(monkeypatch):
    """The next process goes on behind the point that was under way; what was measured before it is kept."""
    points = [(case("torch", replace(GATE, seed=seed)),) for seed in range(3)]
    asked = []

    def run_child(module, request, threads):
        asked.append(len(request.points))
        for index, (only,) in enumerate(request.points):
            if only.workload.seed == 1:
                raise engine.ChildFailed("killed")
            yield {"case": only.hash, "time_s": 1.0, "regime": "hot", "block": 0, "place": 0}
            yield {"point_done": index}

    monkeypatch.setattr(engine, "run_child", run_child)
    found = engine.measure_points(points, "cpu", processes=1)
    assert asked == [3, 1]
    assert [found[only.hash].status for (only,) in points] == ["passed", "failed", "passed"]
    assert [len(found[only.hash].samples) for (only,) in points] == [1, 0, 1]


def test_a_suite_of_nothing_is_nothing():
    """No cases, no processes."""
    assert list(run_cases([], {}, Suite("own", "own", "none", ()))) == []
