"""The scoreboard puts reported and obtained side by side, with a computed verdict and a sentence of why."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims import scoreboard as board
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score, scoreboard, summary, unscored
from moebench.results.rows import row_of
from moebench.run import begin, execute, prepare
from moebench.sim.uncertainty import draw
from moebench.workloads.load import load_suite, load_topology
from tests.moebench.fake_engine import Watch, behaving
from tests.moebench.suites import small_overall

H1 = next(claim for claim in claims_of("hetu") if claim.id == "hetu-h1")
SAMPLES = 200


@cache
def hetu():
    return replace(small_overall(), samples=SAMPLES)


@cache
def cases():
    return plan(hetu(), Filters())


def test_what_is_not_built_says_what_it_needs():
    """Every row of a paper that its suite can't answer, and every text of it is about a row."""
    suite = load_suite("moesys")
    scores = scoreboard(suite)
    named = {name for score in scores for name in (score.claim.id, score.claim.experiment)}
    assert set(suite.needs) <= named
    why = {score.claim.id: score.why for score in scores}
    assert {score.verdict for score in scores} == {v.NOT_RUN}
    assert why["moesys-embedding-mem"] == suite.needs["moesys-embedding-mem"]
    assert why["moesys-a2a-e2e"] == suite.needs["moesys-a2a-e2e"]
    assert "not built yet" not in why["moesys-a2a-comm"]


def judged(speedup_of, claim=H1, topologies=None):
    """H1's score where `speedup_of(case, topology, parameters) -> draws` is the ratio at each case."""
    machines = topologies or {name: load_topology(name) for name in {case.topology for case in cases()}}
    drawn = {name: draw(t.parameters(), SAMPLES, hetu().seed) for name, t in machines.items()}
    found = []
    for case in cases():
        topology, parameters = machines[case.topology], drawn[case.topology]
        ones = np.ones(SAMPLES + 1)
        values = ones * speedup_of(case, topology, parameters) if case.system == "deepspeed" else ones
        row = row_of(case, "hw", "step_time", "s", None if np.isnan(values[0]) else float(values[0]))
        status = "out-of-memory" if np.isnan(values[0]) else "passed"
        found.append(replace(row, draws=tuple(values), status=status))
    return score(claim, hetu(), Evidence(found, machines))


def test_a_claim_that_holds_everywhere_is_reproduced():
    """The same ratio in every draw and assumption: reproduced, with error, interval and a full share."""
    result = judged(lambda case, topology, parameters: 8.0)
    assert result.verdict == v.REPRODUCED
    assert result.obtained == result.low == result.high == 8.0
    assert result.error == pytest.approx(0.1 / 7.1)
    assert result.share == 1
    assert (result.null_verdict, result.null_error) == (v.CONTRADICTED, 1.0)
    assert "8x against up to 8.1x: reproduced in 100 % of 4,800 draws over 24 assumptions" in result.why
    assert result.to_json()["verdict"] == v.REPRODUCED


def test_the_same_winner_by_another_size():
    """3x everywhere is `direction only`, 0.5x is `contradicted`."""
    assert judged(lambda *_: 3.0).verdict == v.DIRECTION_ONLY
    assert judged(lambda *_: 0.5).verdict == v.CONTRADICTED


def test_a_claim_that_hangs_on_a_parameter_depends():
    """Below 90 % agreement the verdict is `depends`; the parameter that splits the draws is named, with numbers."""

    def speedup(case, topology, parameters):
        link = parameters["link.bandwidth"]
        return np.where(link >= np.median(link), 8.0, 3.0)

    result = judged(speedup)
    assert result.verdict == v.DEPENDS
    assert result.decides[0]["name"] == "link.bandwidth"
    assert result.decides[0]["status"] in ("assumed", "measured", "derived")
    assert result.decides[0]["eta_squared"] > 0.8
    assert sum(result.shares.values()) == pytest.approx(1)
    assert "link.bandwidth decides most (explains " in result.why
    assert "of the variation between draws)" in result.why
    assert result.decides[0]["significant"]
    assert "of its range" in result.why


def test_a_claim_that_hangs_on_the_machine_depends():
    """A node type on which the baseline does not fit is a condition of its own: neither reproduced nor contradicted."""

    def speedup(case, topology, parameters):
        return np.nan if case.assumptions["gpu"] == "rtx-2080-ti" else 8.0

    result = judged(speedup)
    assert result.verdict == v.DEPENDS
    assert result.shares == pytest.approx({v.REPRODUCED: 0.75, v.BASELINE_OUT: 0.25})
    assert result.decides[0]["name"] == "gpu"
    assert result.decides[0]["status"] == "assumption"
    assert "the baseline out of memory in 25 %" in result.why
    by_gpu = {}
    for entry in result.conditions:
        by_gpu.setdefault(entry["gpu"], []).append(entry)
    assert {entry["out of memory"] for entry in by_gpu["rtx-2080-ti"]} == {1.0}
    assert {entry["median"] for entry in by_gpu["rtx-2080-ti"]} == {None}
    assert {(entry[v.REPRODUCED], entry["median"]) for entry in by_gpu["titan-rtx"]} == {(1.0, 8.0)}
    assert [entry["default"] for entry in result.conditions] == [True] + [False] * 23


def test_where_the_baseline_never_fits_nothing_is_compared():
    """Out of memory in every draw: not run, and the reason says so."""
    result = judged(lambda *_: np.nan)
    assert result.verdict == v.NOT_RUN
    assert result.obtained is None
    assert "the baseline out of memory in 100 %" in result.why


def test_a_parameter_fitted_to_the_claim_makes_it_calibrated():
    """Where a machine's number was fitted to this claim's data, agreeing with it proves nothing."""

    def fitted(source):
        machines = {}
        for name in {case.topology for case in cases()}:
            topology = load_topology(name)
            parameter = replace(topology.link_parameters["link.bandwidth"], source=source)
            parameters = {**topology.link_parameters, "link.bandwidth": parameter}
            machines[name] = replace(topology, link_parameters=parameters)
        return judged(lambda *_: 8.0, topologies=machines)

    result = fitted("fitted to hetu-h1, abstract")
    assert result.verdict == v.CALIBRATED
    assert "link.bandwidth was fitted to this claim's data" in result.why
    assert fitted("fitted to hetu-h10 and not-hetu-h1-either").verdict == v.REPRODUCED


def test_intervals_weigh_assumptions_alike():
    """The 5 to 95 % interval pools the draws of all assumptions, each with the same weight."""
    result = judged(lambda case, *_: 10.0 if case.assumptions["gpu"] == "titan-rtx" else 5.0)
    assert (result.low, result.high, result.obtained) == (5.0, 10.0, 10.0)


def test_the_interval_of_one_assumption_is_that_of_its_draws():
    """The terminal and the report say the same of the same draws: numpy's percentiles; equal weights change nothing."""
    values = np.array([9.0, 4.0, 1.0, np.nan, 16.0, 25.0])
    one: Any = SimpleNamespace(words=None, values=values, sampled=np.arange(6) > 0)
    assert board._interval([one]) == pytest.approx(np.percentile([1, 4, 16, 25], (5, 95)))
    assert board._interval([one, one]) == pytest.approx(np.percentile([1, 4, 16, 25] * 2, (5, 95)))
    words: Any = SimpleNamespace(words="slower")
    bytes_: Any = SimpleNamespace(words=None, values=np.array([9.0]), sampled=np.array([True]))
    more: Any = SimpleNamespace(words=None, values=np.array([12.0]), sampled=np.array([True]))
    assert board._interval([bytes_, more]) == (9.0, 12.0)  # or the first one would lie outside of its own interval
    assert board._interval([]) == board._interval([words]) == (None, None)


def run_of(path, filters, **changes):
    suite = replace(load_suite("hetu"), samples=16)
    job = begin(prepare(suite, filters), path)
    with behaving(**changes):
        execute(job, Watch())
    return job.folder


def test_a_run_scores_every_claim_of_its_paper(fake, tmp_path):
    """All claims of the paper appear, those that can't be judged with what they need."""
    folder = run_of(tmp_path / "run", Filters(gates=("switch",)))
    scores = {s.claim.id: s for s in scoreboard(folder.suite, folder)}
    assert list(scores) == [claim.id for claim in claims_of("hetu")]
    assert scores["hetu-h1"].verdict == v.REPRODUCED  # the fake engine's factor is 8
    assert scores["hetu-h1"].engine == "sim"
    assert scores["hetu-h2"].verdict == v.NOT_RUN
    assert "needs 128 cases under the default assumptions, this run has 16" in scores["hetu-h2"].why
    assert "the cases it has (rivals as of the paper: " in scores["hetu-h2"].why
    counts = summary(list(scores.values()))
    assert counts == {"claims": len(scores), "judged": 1, "reproduced": 1, "null_reproduced": 0}


def test_a_partial_run_judges_nothing(fake, tmp_path):
    """A maximum over one of four topologies is shown, and is no verdict."""
    folder = run_of(tmp_path / "run", Filters(topologies=("4x8-titan-rtx",)))
    result = next(s for s in scoreboard(folder.suite, folder) if s.claim.id == "hetu-h1")
    assert result.verdict == v.NOT_RUN
    assert result.obtained == pytest.approx(8)
    assert "needs 4 cases under the default assumptions, this run has 1" in result.why


def test_a_quick_run_says_how_many_assumptions_it_had(fake, tmp_path):
    """--quick judges the default assumption, and the sentence says so."""
    folder = run_of(tmp_path / "run", Filters(quick=True))
    result = next(s for s in scoreboard(folder.suite, folder) if s.claim.id == "hetu-h1")
    assert result.verdict == v.REPRODUCED
    assert "(1 of 24 assumptions were run)" in result.why


def test_a_what_if_is_marked(fake, tmp_path):
    """A verdict under --set says what was set."""
    folder = run_of(tmp_path / "run", Filters(overrides={"nic.bandwidth": "25GB/s"}, gates=("switch",)))
    result = next(s for s in scoreboard(folder.suite, folder) if s.claim.id == "hetu-h1")
    assert result.why.startswith(
        "what if nic.bandwidth=25GB/s on every node type (titan-rtx, rtx-2080-ti, v100-pcie, v100-sxm2): "
    )
    one = Filters(overrides={"nic.bandwidth": "25GB/s"}, gates=("switch",), topologies=("titan-rtx",))
    folder = run_of(tmp_path / "one", one)
    assert board.what_if(folder) == "what if nic.bandwidth=25GB/s"
    folder.record["engine"] = "cluster"  # whose network was really given that rate
    assert board.what_if(folder) == "emulated network: nic.bandwidth=25GB/s"
    assert board.what_if(run_of(tmp_path / "as-is", Filters(quick=True))) == ""


def test_noise_has_no_decider():
    """Where the draws differ by nothing that a parameter says, and are few, the sentence names none."""
    random = np.random.default_rng(3)
    result = judged(lambda *_: np.where(random.uniform(size=SAMPLES + 1) > 0.85, 8.0, 3.0))
    assert result.verdict == v.DEPENDS
    assert "decides most" not in result.why


def test_without_results_nothing_is_judged():
    """Before any run every claim is `not run`, with the null model's score beside it where it has one."""
    assert {s.verdict for s in scoreboard(load_suite("hetu"))} == {v.NOT_RUN}
    assert {s.verdict for s in unscored("lancet")} == {v.NOT_RUN}
    assert scoreboard(load_suite("smoke")) == []
    assert next(s for s in unscored("megascale") if s.claim.unit == "ratio").null_error is not None


def test_a_definition_does_not_count():
    """What is normalised to itself has no verdict."""
    claim = replace(H1, value=1.0, relation="equal")
    result = judged(lambda *_: 1.0, claim)
    assert result.verdict == v.NOT_RUN
    assert "true by definition" in result.why


def test_every_verdict_is_json():
    """No score holds what JSON can't say, but for an infinite error, which the command line turns into null."""
    import json

    for result in (judged(lambda *_: np.nan), judged(lambda *_: 8.0), *unscored("moesys")):
        json.dumps(result.to_json(), allow_nan=False)
    assert board.Score.__dataclass_params__.frozen
