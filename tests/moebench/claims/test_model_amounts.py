"""Claims about the speed and the memory of whole models' training, judged on rows that are made up."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.results.rows import row_of, without_number
from moebench.workloads.load import load_suite

SUITE = load_suite("moesys")
CASES = [case for case in plan(SUITE, Filters()) if case.experiment == "training"]
CLAIMS = {claim.id: claim for claim in claims_of("moesys")}


def judged(claim, seconds, memory_gb=lambda case: 50.0):
    """The score where `seconds(case)` is a step's time; None: out of memory."""
    rows = []
    for case in CASES:
        time_s = seconds(case)
        if time_s is None:
            rows.append(without_number(case, "gpu", "out-of-memory", "because"))
        else:
            rows.append(row_of(case, "gpu", "step_time", "s", time_s, draws=(time_s, time_s)))
        rows.append(row_of(case, "gpu", "peak_memory", "B", memory_gb(case) * 1e9))
    return score(claim, SUITE, Evidence(rows))


def eightfold(case):
    """A second, and eight for eight sequences."""
    return float(case.workload.shape.batch_size)


def stem(case):
    """A system's name without its options."""
    return case.system.partition("+")[0]


def test_tokens_of_all_ranks_count():
    """1,024 a sequence, whatever the reading, where time goes with the batch."""
    found = judged(replace(CLAIMS["moesys-train-64-tps"], value=64 * 1024.0), eightfold)
    assert (found.verdict, found.obtained) == (v.REPRODUCED, 64 * 1024.0)
    assert {one["reading"] for one in found.conditions} == {"one-sequence", "eight-sequences"}


def test_a_gain_in_general_is_the_mean_over_all_sizes():
    """Over the baseline that is named, and in readings of their own over the one with divided states."""
    def seconds(case):
        slow = {"deepspeed": 1.5, "deepspeed+zero=2": 1.1}.get(case.system, 1.0)
        return slow * (1.2 if case.size == "1x8" and case.system != "moesys" else 1.0)

    found = judged(CLAIMS["moesys-train"], seconds)
    assert found.obtained == pytest.approx((4 * 0.5 + 0.8) / 5)
    assert found.verdict == v.DIRECTION_ONLY
    by_reading = {one["reading"]: one["nominal"] for one in found.conditions}
    assert by_reading["eight-sequences-against-stage-2"] == pytest.approx((4 * 0.1 + 0.32) / 5)


def test_memory_is_that_of_the_system_itself():
    """In GB of 10^9 bytes, of the size that the scope names; a reading may mean another system."""
    memory = {"deepspeed": 66.0, "deepspeed+zero=2": 55.0, "moesys": 54.0, "moesys+stage=3": 53.0}
    found = judged(CLAIMS["moesys-train-64-mem-deepspeed"], eightfold, lambda case: memory[case.system])
    assert (found.verdict, found.obtained) == (v.DEPENDS, pytest.approx(66.0))
    assert {one["reading"]: one["nominal"] for one in found.conditions}["one-sequence-against-stage-2"] == 55.0
    own = judged(
        CLAIMS["moesys-train-8-mem"], eightfold, lambda case: memory[case.system] if case.size == "1x8" else 1.0
    )
    assert own.obtained == pytest.approx(54.0)


def test_out_of_memory_is_no_speed():
    """Neither a confirmation nor a contradiction."""
    found = judged(CLAIMS["moesys-train-64-tps"], lambda case: None)
    assert (found.verdict, found.obtained) == (v.NOT_RUN, None)
    assert "the system out of memory in 100 %" in found.why
    for lacking, who in (("moesys", "the system"), ("deepspeed", "the baseline"), ("moesys deepspeed", "both")):
        gain = judged(CLAIMS["moesys-train"], lambda case, out=lacking: None if stem(case) in out.split() else 1.0)
        assert (gain.verdict, f"{who} out of memory in 100 %" in gain.why) == (v.NOT_RUN, True)


def test_a_scope_that_is_another_model_is_no_case():
    """Its parameters, or its width."""
    for scope in ({"params": "14.9e9", "gpus": "8"}, {"hidden": "2048", "gpus": "8"}):
        found = judged(replace(CLAIMS["moesys-train-8-tps"], scope=scope), eightfold)
        assert "no case of the claim's scope" in found.why
