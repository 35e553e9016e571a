"""Our value of a claim comes from equal points, draw by draw, under one assumption, in one engine."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims import rivals
from moebench.claims.query import StepTimes, obtain
from moebench.claims.reported import Claim, Reading
from moebench.claims.scope import CantAnswer, points
from moebench.claims.verdict import BASELINE_OUT, BOTH_OUT, SYSTEM_OUT
from moebench.results.rows import row_of
from tests.moebench.suites import small_overall

H1 = Claim(
    "h1", "hetu", "overall", "step_speedup", "max-over", "hetumoe", "deepspeed", 8.1, "ratio", "printed",
    scope={"gate": "switch", "batch_size": "32"},
)  # fmt: skip
SIZES = ["1x8", "2x8", "4x8", "8x8"]


@pytest.fixture(scope="module")
def hetu():
    return small_overall()


@pytest.fixture(scope="module")
def cases(hetu):
    return plan(hetu, Filters())


def rows(cases, time_of, engine="sim"):
    """A step-time row a case; `time_of(case) -> draws`, NaN where out of memory, None for no row."""
    found = []
    for case in cases:
        draws = time_of(case)
        if draws is None:
            continue
        draws = np.atleast_1d(np.asarray(draws, dtype=float))
        out = np.isnan(draws[0])
        found.append(
            replace(
                row_of(case, "hw", "step_time", "s", None if out else float(draws[0])),
                status="out-of-memory" if out else "passed",
                draws=tuple(draws),
                engine=engine,
            )
        )
    return found


def by_size(**times):
    """Times of the baseline by size; the system always takes 1 s."""
    return lambda case: times["s" + case.size] if case.system == "deepspeed" else [1.0, 1.0]


def test_a_maximum_ranges_over_sizes_of_one_assumption(hetu, cases):
    """Each assumption has its own maximum over its own topologies, draw by draw."""

    def time_of(case):
        base = 1 + SIZES.index(case.size)
        scale = 10 if case.assumptions["gpu"] == "v100-pcie" else 1
        return [base * scale, (5 - base) * scale] if case.system == "deepspeed" else [1.0, 1.0]

    found = obtain(H1, hetu, StepTimes(rows(cases, time_of)))
    assert found.engine == "sim"
    assert len(found.conditions) == found.planned == 24
    assert found.points == 4
    assert found.conditions[0].assumption.is_default
    for condition in found.conditions:
        scale = 10 if condition.assumption.gpu == "v100-pcie" else 1
        np.testing.assert_allclose(condition.values, [4 * scale, 4 * scale])
        assert len(condition.cases) == 2 * found.points
        assert {name.split("/")[3].partition("-")[0] for name in condition.cases[:2]} == {SIZES[-1]}  # it decides


def test_only_the_papers_own_cases_count(hetu, cases):
    """Other gates, batch sizes, conventions and systems don't reach a claim about one gate and batch size."""

    def time_of(case):
        inside = case.workload.gate.name == "switch" and case.workload.batch_size == 32
        inside = inside and case.conventions == "common"
        return [3.0, 3.0] if inside and case.system == "deepspeed" else [1.0, 1.0] if inside else [100.0, 0.001]

    found = obtain(H1, hetu, StepTimes(rows(cases, time_of)))
    assert all((condition.values == 3).all() for condition in found.conditions)


def test_a_case_out_of_memory_leaves_the_maximum(hetu, cases):
    """Where the baseline fails at one size, the others still answer; where at all, the draw says so."""
    times = {"s1x8": [np.nan, np.nan], "s2x8": [2.0, np.nan], "s4x8": [3.0, np.nan], "s8x8": [1.0, np.nan]}
    default = obtain(H1, hetu, StepTimes(rows(cases, by_size(**times)))).conditions[0]
    assert default.values[0] == 3
    assert np.isnan(default.values[1])
    assert default.missing.tolist() == ["", BASELINE_OUT]


def test_who_ran_out_is_told(hetu, cases):
    """The system alone, or both: each has its own word."""
    out = [np.nan, np.nan]
    system = obtain(H1, hetu, StepTimes(rows(cases, lambda c: out if c.system == "hetumoe" else [1.0, 1.0])))
    assert set(system.conditions[0].missing) == {SYSTEM_OUT}
    both = obtain(H1, hetu, StepTimes(rows(cases, lambda c: out)))
    assert set(both.conditions[0].missing) == {BOTH_OUT}


def test_best_other_is_the_fastest_baseline_that_fits(hetu, cases, monkeypatch):
    """The minimum over gates and batch sizes of the fastest baseline's ratio; a baseline out of memory steps aside."""
    two = (Reading("", ("deepspeed", "deepspeed_sparse"), ""),)
    monkeypatch.setattr(rivals, "readings", lambda paper: two)
    claim = replace(H1, metric="min_step_speedup", relation="at-least", baseline="best-other", scope={"scope": "all"})

    def time_of(case):
        big = case.workload.batch_size == 64
        return {"deepspeed": [np.nan if big else 2.0], "deepspeed_sparse": [5.0], "hetumoe": [1.0]}[case.system]

    found = obtain(claim, hetu, StepTimes(rows(cases, time_of)))
    assert found.points == 3 * 4 * 4
    assert found.planned == 1  # the sweep runs for one gate, the claim is about all
    assert found.conditions[0].values.tolist() == [2.0]

    def system_fails(case):
        return [np.nan] if case.system == "hetumoe" and case.workload.batch_size == 64 else time_of(case)

    failed = obtain(claim, hetu, StepTimes(rows(cases, system_fails)))
    assert failed.conditions[0].missing.tolist() == [SYSTEM_OUT]


def best_of(monkeypatch, *readings):
    monkeypatch.setattr(rivals, "readings", lambda paper: tuple(Reading(*reading, "") for reading in readings))
    return replace(H1, metric="min_step_speedup", relation="at-least", baseline="best-other", scope={"scope": "all"})


def test_a_rival_without_the_gate_steps_aside(hetu, cases, monkeypatch):
    """The best other is the best of those that have such a layer; where none has it, there is nothing to compare."""
    claim = best_of(monkeypatch, ("", ("deepspeed", "deepspeed_sparse")))
    lacks = {"deepspeed": ("gshard", "topk-4"), "deepspeed_sparse": ("topk-4",)}
    times = {"deepspeed": 2.0, "deepspeed_sparse": 3.0, "hetumoe": 1.0}
    found = [
        replace(row, status="unsupported", value=None, draws=()) if row.gate in lacks.get(row.system, ()) else row
        for row in rows(cases, lambda c: [times[c.system]])
    ]
    (condition,) = obtain(claim, hetu, StepTimes(found)).conditions
    assert (condition.values.tolist(), condition.missing.tolist()) == ([2.0], [""])
    assert (condition.decider.baseline, condition.decider.point.gate) == ("deepspeed", "switch")
    assert condition.decider.cases == 2 * 4 * 4
    own = [replace(row, status="unsupported", value=None) if row.system == "hetumoe" else row for row in found]
    with pytest.raises(CantAnswer, match="is unsupported"):
        obtain(claim, hetu, StepTimes(own))
    none = [replace(row, status="unsupported", value=None) if row.system != "hetumoe" else row for row in found]
    with pytest.raises(CantAnswer, match=r"no baseline has it: .*/deepspeed is unsupported"):
        obtain(claim, hetu, StepTimes(none))


def test_readings_of_who_the_rivals_are_stand_beside_each_other(hetu, cases, monkeypatch):
    """The claim's own reading first; who decides and where is told of each; one whose systems did not run is absent."""
    own, other = ("of its time", ("deepspeed",)), ("of today", ("deepspeed", "deepspeed_sparse"))
    claim = best_of(monkeypatch, own, other, ("of tomorrow", ("reference",)))

    def time_of(case):
        least = case.workload.batch_size == 16 and case.size == "4x8" and case.workload.gate.name == "gshard"
        times = {"deepspeed": 2.0, "deepspeed_sparse": 0.5} if least else {"deepspeed": 4.0, "deepspeed_sparse": 8.0}
        return [times.get(case.system, 1.0)]

    found = obtain(claim, hetu, StepTimes(rows(cases, time_of)))
    assert [c.assumption.labels["rivals"] for c in found.conditions] == ["of its time", "of today"]
    assert [c.assumption.is_default for c in found.conditions] == [True, False]
    assert [c.values.tolist() for c in found.conditions] == [[2.0], [0.5]]
    assert found.planned == 3
    where = "with gshard at batch size 16 on 4x8-titan-rtx"
    assert f"of its time: deepspeed decides, {where}; ahead of the best of them at 48 of 48 cases" in found.detail
    assert f"of today: 0.5x; deepspeed_sparse decides, {where}; ahead of the best of them at 47" in found.detail


def test_a_mean_is_the_arithmetic_mean(hetu, cases):
    """`mean-over` averages the ratios of the cases in scope."""
    times = {"s1x8": [1.0], "s2x8": [2.0], "s4x8": [3.0], "s8x8": [6.0]}
    claim = replace(H1, relation="mean-over")

    def time_of(case):
        return times["s" + case.size] if case.system == "deepspeed" else [1.0]

    assert obtain(claim, hetu, StepTimes(rows(cases, time_of))).conditions[0].values.tolist() == [3.0]


def test_engines_are_never_mixed(hetu, cases):
    """A system measured in another engine than the baseline gives no ratio."""
    ours = rows([c for c in cases if c.system == "hetumoe"], lambda c: [1.0], engine="local")
    theirs = rows([c for c in cases if c.system == "deepspeed"], lambda c: [2.0], engine="sim")
    with pytest.raises(CantAnswer, match="none of its cases under the default assumptions was run"):
        obtain(H1, hetu, StepTimes([*ours, *theirs]))


def test_a_partial_run_says_what_it_lacks(hetu, cases):
    """Rows of two of four sizes: the value is theirs, and two are counted as lacking."""
    some = [c for c in cases if c.size in ("1x8", "2x8")]
    found = obtain(H1, hetu, StepTimes(rows(some, lambda c: [2.0] if c.system == "deepspeed" else [1.0])))
    assert (found.points, found.lacking) == (4, 2)
    assert len(found.conditions) == 1


def test_samples_are_no_step_times(hetu, cases):
    """Single measured samples beside a summary don't enter a ratio."""
    summary = rows(cases, lambda c: [2.0] if c.system == "deepspeed" else [1.0])
    samples = [replace(row, sample=0, value=99.0, draws=()) for row in summary]
    assert obtain(H1, hetu, StepTimes([*samples, *summary])).conditions[0].values.tolist() == [2.0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"experiment": "gates"}, "experiment gates is not built yet"),
        ({"metric": "mfu"}, "no query for the metric mfu yet"),
        ({"system": "hierarchical"}, "needs hierarchical, not built yet"),
        ({"baseline": "best-other"}, "needs .*, not part of this run"),
        ({"baseline": "reference"}, "needs reference, not part of this run"),
        ({"baseline": "best-other", "paper": "nobody"}, "are not recorded"),
        ({"scope": {"batch_size": "128"}}, "has no batch size of the claim's scope"),
        ({"scope": {"gate": "base"}}, "has no gate of the claim's scope"),
        ({"scope": {"nodes": "16"}}, "has no topology of the claim's scope"),
        ({"scope": {"model": "gpt"}}, "no experiment here is organised by model"),
        ({"scope": {"scope": "most models"}}, "no experiment here is organised by scope"),
        ({"relation": "equal"}, "its scope holds 4 cases, and the claim is about one"),
    ],
)
def test_what_can_not_be_answered_says_why(hetu, cases, changes, reason):
    """A claim about something that isn't there names what it would need."""
    with pytest.raises(CantAnswer, match=reason):
        obtain(replace(H1, **changes), hetu, StepTimes(rows(cases, lambda c: [1.0])))


def test_a_wrong_system_has_no_ratio(hetu, cases):
    """A case without a number makes its claim unanswerable, with the case's reason."""
    found = rows(cases, lambda c: [1.0])
    found = [replace(r, status="wrong", reason="differs", value=None) if r.system == "hetumoe" else r for r in found]
    with pytest.raises(CantAnswer, match="is wrong: differs"):
        obtain(H1, hetu, StepTimes(found))


def test_an_equal_claim_about_one_topology(hetu, cases):
    """nodes and gpus_per_node, or the number of GPUs, choose a topology."""
    for scope in ({"nodes": "4", "gpus_per_node": "8"}, {"gpus": "32"}):
        claim = replace(H1, relation="equal", scope={**H1.scope, **scope})
        (condition, *_) = obtain(claim, hetu, StepTimes(rows(cases, lambda c: [1.0]))).conditions
        assert condition.topologies == ("4x8-titan-rtx",)


def test_a_step_time_claim_is_in_its_own_unit(hetu, cases):
    """An absolute claim in ms is answered in ms."""
    claim = replace(H1, metric="iteration_time", relation="equal", unit="ms", scope={**H1.scope, "gpus": "8"})
    found = obtain(claim, hetu, StepTimes(rows(cases, lambda c: [0.25, np.nan])))
    assert found.conditions[0].values[0] == 250
    assert found.conditions[0].missing.tolist() == ["", SYSTEM_OUT]


def test_points_of_every_assumption_differ(hetu):
    """No two assumptions share all of their points: where two rules give as many experts, they are one assumption."""
    for scope, count in (({}, 24), ({"gpus": "8"}, 16), ({"gpus": "16"}, 16), ({"gpus": "32"}, 16)):
        found = points(replace(H1, scope={**H1.scope, **scope}), hetu.experiments[0])
        listed = [tuple(p) for _, p in found]
        assert len(set(listed)) == len(listed) == count, scope
        assert [assumption.is_default for assumption, _ in found] == [True] + [False] * (count - 1)
