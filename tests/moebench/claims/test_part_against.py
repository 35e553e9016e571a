"""Claims about two ways to do a part: a curve is judged at its knee, under each reading."""

from dataclasses import replace

import pytest

from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.part_against import LONGER, Variant, curve, knee
from moebench.claims.reported import claims_of
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import score
from tests.moebench.ring_suite import loaded, rows_of

CLAIMS = {claim.id.removeprefix("moesys-"): claim for claim in claims_of("moesys")}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("suite"))


def test_the_knee_is_the_least_memory_of_which_more_gains_little():
    """Whatever the order; not one that a larger one beats by more; what does not fit is none."""
    found = knee([Variant("c", 3.0, 9.8), Variant("a", 1.0, 12.0), Variant("b", 2.0, 10.0)])
    assert found.name == "b"
    assert knee([Variant("a", 1.0, 10.4), Variant("b", 2.0, 10.0)]).name == "a"
    assert knee([Variant("a", 1.0, float("nan")), Variant("b", 2.0, 3.0)]).name == "b"
    with pytest.raises(CantAnswer, match="a runs out of memory"):
        knee([Variant("a", 1.0, float("nan"))])


def test_a_curve_is_made_of_variants_that_differ_in_one_number():
    """Layers that stay are another way."""
    names = ["no-offload", "ring+slots=1", "ring+slots=2+keep=1", "ring+slots=2"]
    assert curve(names, "ring") == ["ring+slots=1", "ring+slots=2"]
    assert curve(names, "no-offload") == ["no-offload"]
    assert curve(names, "other") == []


def test_memory_and_time_are_judged_at_the_knee_of_each_reading(suite):
    """Two slots for tokens, of which the first gains a sixth; one for prompts; all of them is no offload."""
    evidence = Evidence(rows_of(suite))
    memory = obtain(CLAIMS["ring-memory"], suite, evidence)
    assert [one.values[0] for one in memory.conditions] == pytest.approx([0.3, 0.32])
    assert memory.detail == "30.0% with tokens; 32.0% with prompts; the knee is moesys+slots=2 or moesys+slots=1"
    time = obtain(CLAIMS["ring-time"], suite, evidence)
    assert [list(one.words) for one in time.conditions] == [
        [LONGER] * 3, ["almost equal time", "almost equal time", LONGER],
    ]  # fmt: skip
    assert score(CLAIMS["ring-memory"], suite, evidence).verdict == v.REPRODUCED
    assert score(CLAIMS["ring-time"], suite, evidence).verdict == v.DEPENDS


def test_a_gain_is_the_mean_over_the_places(suite):
    """Of the baseline's time over ours, less 1."""
    found = obtain(CLAIMS["infer"], suite, Evidence(rows_of(suite)))
    assert [one.values[0] for one in found.conditions] == pytest.approx([0.1, 0.3])
    assert (found.points, found.conditions[0].topologies) == (2, ("1x8-a100-40", "2x8-a100-40"))


def test_what_a_run_lacks_is_said(suite):
    """A side, its memory, and a model of another size."""
    rows = rows_of(suite)
    with pytest.raises(CantAnswer, match="needs no-offload at gpt-58b-moe-b1"):
        obtain(CLAIMS["ring-memory"], suite, Evidence([row for row in rows if row.system != "no-offload"]))
    with pytest.raises(CantAnswer, match="the run says no memory of no-offload"):
        obtain(CLAIMS["ring-memory"], suite, Evidence([row for row in rows if row.metric == "part_time"]))
    other = replace(CLAIMS["ring-memory"], scope={"params": "52e9"})
    with pytest.raises(CantAnswer, match="no case of the claim's scope"):
        obtain(other, suite, Evidence(rows))
