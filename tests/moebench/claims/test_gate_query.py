"""How many rules a system keeps: counted from what the correctness gate said of each."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.results.rows import row_of, without_number
from tests.moebench.suites import of_kind

H7 = next(claim for claim in claims_of("hetu") if claim.id == "hetu-h7")
HETU = of_kind("hetu", "gate")


def judged(claim=H7, statuses=(), left_out=()):
    """The score where rules by label have another status than passed, or no row."""
    rows, changed = [], dict(statuses)
    for case in plan(HETU, Filters()):
        label = case.workload.gate.label
        if case.system == claim.system and label not in left_out:
            status = changed.get(label, "passed")
            passed = row_of(case, "gpu", "supported", "1", 1.0)
            rows.append(passed if status == "passed" else without_number(case, "gpu", status, "because"))
    return score(claim, HETU, Evidence(rows))


def test_all_eight():
    """Counted among the claim's gates alone; nothing was timed and no machine decides."""
    found = judged(statuses={"sinkhorn-1": "wrong"})
    assert (found.verdict, found.obtained, found.error, found.engine) == (v.REPRODUCED, 8.0, 0.0, "count")
    assert found.why == (
        "8 against 8 (each gives the outputs, losses and gradients of its definition on real ranks): reproduced"
    )
    assert found.decides == ()
    assert (found.low, found.high) == (None, None)


@pytest.mark.parametrize("status", ["unsupported", "wrong"])
def test_one_less_contradicts_and_says_why(status):
    """A count is right or wrong."""
    found = judged(statuses={"sam-2": status})
    assert (found.verdict, found.obtained) == (v.CONTRADICTED, 7.0)
    assert f"sam-2 is {status}: because" in found.why


def test_what_was_not_tried_is_not_counted():
    """A rule without a row, ranks that died, no run at all, rules that the experiment doesn't have."""
    partly = judged(left_out=("base",))
    assert (partly.verdict, partly.obtained) == (v.NOT_RUN, 7.0)
    assert "needs 8 cases" in partly.why
    assert "is failed: because" in judged(statuses={"hash": "failed"}).why
    assert "moebench run --suite hetu --experiment gates" in score(H7, HETU, Evidence()).why
    other = replace(H7, scope={"gates": "switch,lottery"})
    assert "has no gate lottery" in judged(other).why
    assert "organised by gate (gate=switch)" in judged(replace(H7, scope={"gate": "switch"})).why
    assert "no query for the metric step_time" in judged(replace(H7, metric="step_time")).why
