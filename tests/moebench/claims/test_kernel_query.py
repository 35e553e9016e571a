"""Claims about kernels: judged on measured GPUs alone, and told with what both sides do where there is none."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, Machines, plan
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.kernel_query import answers
from moebench.claims.reported import claims_of, compared_with, implementations
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import score
from moebench.kernels.registry import KERNELS
from moebench.results.rows import row_of
from moebench.workloads.kernel_calls import implementations_of
from moebench.workloads.load import load_topology
from tests.moebench.suites import of_kind

CLAIMS = {claim.id: claim for claim in claims_of("hetu")}
H5, H6 = CLAIMS["hetu-h5"], CLAIMS["hetu-h6"]
DESCRIBED = load_topology("1x1-h200")
HERE = replace(DESCRIBED, name="1x1-this-machine", hardware=replace(DESCRIBED.hardware, name="this-machine"))


@pytest.fixture(scope="module")
def hetu():
    return of_kind("hetu", "kernel")


def measured(hetu, time_of, kind="gpu"):
    """Hot and cold summaries of every case on this machine; `time_of(case) -> seconds`, or a status in its place."""
    topology = replace(HERE, hardware=replace(HERE.hardware, kind=kind))
    machines = Machines(load=lambda name: topology)
    rows = []
    for case in plan(hetu, Filters(topologies=(HERE.name,)), "local", machines):
        time = time_of(case)
        status = "passed" if isinstance(time, float) else time
        for regime, factor in (("hot", 1.0), ("cold", 5.0)):
            value = time * factor if isinstance(time, float) else None
            detail = {"regime": regime}
            rows.append(
                row_of(case, "gpu", "kernel_time", "s", value, status=status, reason="because", detail=detail)
            )
        rows.append(row_of(case, "gpu", "kernel_time", "s", 1e-9, sample=0, detail={"regime": "hot"}))
    return Evidence(rows, {HERE.name: topology})


def faster(**factors):
    """Times by implementation, relative to one second."""
    return lambda case: factors.get(case.system, 1.0)


def test_names_of_papers_are_implementations_of_kernels():
    """What `implementations.csv` and `compared_with.csv` name stands in the registry."""
    for op, implementation in implementations().values():
        assert implementation in implementations_of(op)
    layout = implementations_of("layout")
    assert {name.partition("+")[0] for name in compared_with("hetu")} <= set(layout)
    assert set(KERNELS) >= {op for op, _ in implementations().values()}
    assert answers(H5) == {"hetu", "torch"}
    assert answers(H6) == {"hetu", "deepspeed", "fastmoe", "tutel"}


def test_a_measured_gpu_judges_the_mean(hetu):
    """H5: the mean over k = 1 and 2 of the time of torch.topk over the kernel's own, hot, samples left out."""

    def time_of(case):
        if case.system != "hetu":
            return 1.0
        return 0.5 if case.workload.top_k == 1 else 1.0

    found = obtain(H5, hetu, measured(hetu, time_of))
    (condition,) = found.conditions
    assert condition.values.tolist() == [pytest.approx(1.5)]
    assert (found.engine, found.points, found.lacking) == ("local", 8, 0)
    result = score(H5, hetu, measured(hetu, faster(hetu=0.8)))
    assert (result.verdict, result.obtained, result.engine) == (v.REPRODUCED, pytest.approx(1.25), "local")
    assert result.why == "1.25x against on average 1.25x: reproduced on the machine measured"


def test_best_other_is_the_fastest_of_the_papers_baselines(hetu):
    """H6: tutel, deepspeed and fastmoe count, ours and what DeepSpeed ships today don't; the least of the calls."""
    times = {"hetu": 1.0, "tutel": 1.4, "deepspeed": 9.0, "fastmoe": 2.0, "triton": 0.1, "deepspeed_sparse": 0.1}
    result = score(H6, hetu, measured(hetu, faster(**times)))
    assert (result.verdict, result.obtained) == (v.REPRODUCED, pytest.approx(1.4))

    def slower_once(case):
        once = case.system == "tutel" and case.workload.tokens == 8192
        return 0.9 if once else times.get(case.system, 1.0)

    result = score(H6, hetu, measured(hetu, slower_once))
    assert (result.verdict, result.obtained) == (v.CONTRADICTED, pytest.approx(0.9))


def test_a_baseline_out_of_memory_leaves_the_others(hetu):
    """Dense masks do not fit: the comparison is with those that do."""
    times = {"hetu": 1.0, "tutel": 1.3, "fastmoe": 2.0, "deepspeed": "out-of-memory"}
    result = score(H6, hetu, measured(hetu, faster(**times)))
    assert result.obtained == pytest.approx(1.3)


def test_a_baseline_that_failed_judges_nothing(hetu):
    """The reason is the case's."""
    result = score(H6, hetu, measured(hetu, faster(tutel="failed")))
    assert result.verdict == v.NOT_RUN
    assert "tutel is failed: because" in result.why


def test_a_cpu_and_a_simulation_judge_nothing(hetu):
    """Whatever the times are: what it would need, and no value."""
    on_cpu = score(H5, hetu, measured(hetu, faster(hetu=0.5), "cpu"))
    simulated = Evidence(
        [row_of(c, "t", "kernel_time", "s", 1.0) for c in plan(hetu, Filters(quick=True))],
        {"1x1-titan-rtx": load_topology("1x1-titan-rtx")},
    )
    for result in (on_cpu, score(H5, hetu, simulated), score(H6, hetu, Evidence())):
        assert (result.verdict, result.obtained) == (v.NOT_RUN, None)
        assert "needs times measured on a GPU" in result.why
        assert "--topology this-machine" in result.why


def test_what_both_sides_do_stands_beside(hetu):
    """Bytes, FLOPs and launches a token, from any run that counted them, one call for each number of choices."""
    rows = []
    for case in plan(hetu, Filters(quick=True, experiments=("topk-kernel",))):
        moved = {"hetu": 10.0, "torch": 4.0, "triton": 1.0}[case.system] * case.workload.top_k * case.workload.tokens
        rows.append(row_of(case, "t", "device_bytes", "B", moved))
        rows.append(row_of(case, "t", "launches", "1", 1.0 if case.system == "hetu" else 3.0))
        rows.append(row_of(case, "t", "flops", "FLOP", 0.0))
    why = score(H5, hetu, Evidence(rows)).why
    assert "at t8192-e16-k1-fp32 hetumoe-topk moves 10.0 B in 1 launch, torch.topk moves 4.00 B in 3 launches" in why
    assert "at t8192-e16-k2-fp32 hetumoe-topk moves 20.0 B in 1 launch" in why
    assert "FLOP" not in why
    assert "triton" not in why


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"system": "fastermoe-topk"}, "needs fastermoe-topk, not built yet"),
        ({"baseline": "triton.topk"}, "needs triton.topk, not built yet"),
        ({"scope": {"k": "9"}}, "has no call of topk in the claim's scope"),
        ({"scope": {"gate": "switch"}}, "organised by gate"),
        ({"metric": "step_speedup"}, "no query for the metric step_speedup"),
        ({"experiment": "sort-kernel"}, "experiment sort-kernel is not built yet"),
    ],
)
def test_what_can_not_be_answered_says_why(hetu, changes, told):
    """And what it would need."""
    with pytest.raises(CantAnswer, match=told):
        obtain(replace(H5, **changes), hetu, measured(hetu, faster()))


def test_a_part_of_the_calls_judges_nothing(hetu):
    """The value of those that were run is shown, and is no verdict."""
    evidence = measured(hetu, faster(hetu=0.8))
    some = Evidence([row for row in evidence.rows if row.tokens != 8192], evidence.topologies)
    result = score(H5, hetu, some)
    assert (result.verdict, result.obtained) == (v.NOT_RUN, pytest.approx(1.25))
    assert "needs 8 cases" in result.why
