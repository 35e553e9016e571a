"""Claims about whole models, judged on rows that are made up."""

from dataclasses import replace

import numpy as np
import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.results.rows import row_of, without_number
from moebench.workloads.load import load_suite

SUITE = load_suite("lancet")
CASES = plan(SUITE, Filters())
CLAIMS = {claim.id: claim for claim in claims_of("lancet")}


def judged(name, times, metric="step_time", lacking=(), **other):
    """The score of a claim where `times(case)` is each case's seconds or its status; None: unsupported.

    Args:
        other: values of further metrics.
    """
    rows = []
    for case in CASES:
        if case.experiment != CLAIMS[name].experiment or case.system in lacking:
            continue
        seconds = times(case)
        if seconds is None or isinstance(seconds, str):
            rows.append(without_number(case, "gpu", seconds or "unsupported", "because"))
            continue
        rows.append(row_of(case, "gpu", "step_time", "s", seconds, draws=(seconds, 0.9 * seconds, 1.1 * seconds)))
        rows.extend(row_of(case, "gpu", key, "1", value(case)) for key, value in other.items())
    return score(CLAIMS[name], SUITE, Evidence(rows))


def by_system(**seconds):
    """Seconds by the first word of a system's name, and the rest where its degree is given."""
    def of(case):
        stem, _, rest = case.system.partition("+degree=")
        if stem == "deepspeed" and case.workload.shape.gate.name == "bpr":
            return None
        return seconds.get(stem + rest, seconds.get(stem.partition("+")[0]))

    return of


def test_the_best_rival_counts_and_of_variants_the_best():
    """Tutel with its best degree is faster than RAF; a mean over all points of a cluster and gate."""
    times = by_system(lancet=1.0, raf=1.4, tutel=1.5, tutel4=1.2, deepspeed=1.3)
    found = judged("lancet-e2e-switch-a100-mean", times)
    assert (found.verdict, found.obtained) == (v.DIRECTION_ONLY if abs(0.2 - 0.17) > 0.0255 else v.REPRODUCED, 1.2)
    bpr = judged("lancet-e2e-bpr-v100-max", times)
    assert [entry["reading"] for entry in bpr.conditions] == ["artifact"]  # the others say the same of V100
    assert bpr.obtained == pytest.approx(1.2)
    assert bpr.verdict == v.DIRECTION_ONLY


def test_readings_are_assumptions():
    """Where the text's batches say otherwise, the verdict depends."""
    def times(case):
        own = by_system(lancet=1.0, raf=1.21, tutel=1.3, deepspeed=1.5)(case)
        return own if own is None or case.system != "lancet" or case.is_default else 2.0

    found = judged("lancet-e2e-switch-a100-max", times)
    assert (found.verdict, found.obtained) == (v.DEPENDS, 1.21)
    assert {entry["reading"] for entry in found.conditions} == {"artifact", "text", "fp32"}


def test_a_reading_may_mean_another_baseline():
    """Where it is faster, the verdict depends; claims that do not name the baseline have no such reading."""
    (own,) = [one for one in SUITE.experiments if one.name == CLAIMS["lancet-e2e-switch-a100-max"].experiment]
    against = [replace(one, name=f"{one.name}-degree-8", instead={"raf": "tutel+degree=8"}) for one in own.readings]
    suite = replace(SUITE, experiments=(replace(own, readings=(*own.readings, *against)),))
    claim = replace(CLAIMS["lancet-e2e-switch-a100-max"], baseline="raf")
    seconds = by_system(lancet=1.0, raf=1.21, tutel=1.5, tutel8=1.02)
    rows = [
        row_of(case, "gpu", "step_time", "s", seconds(case), draws=(seconds(case),) * 3)
        for case in CASES
        if case.experiment == own.name and seconds(case) is not None
    ]
    found = score(claim, suite, Evidence(rows))
    obtained = {entry["reading"]: entry["nominal"] for entry in found.conditions}
    assert (found.verdict, len(obtained)) == (v.DEPENDS, 2 * len(own.readings))
    assert (obtained["text"], obtained["text-degree-8"]) == (1.21, 1.02)
    no_such = score(replace(claim, baseline="deepspeed"), suite, Evidence(rows))
    assert all("degree" not in entry["reading"] for entry in no_such.conditions)


def test_reductions_compare_with_the_variant_that_is_fastest():
    """Exposed communication of the variant with the least step time, not the least exposed one."""
    times = by_system(lancet=1.0, raf=1.4, tutel=1.5, tutel8=1.2)

    def exposed(case):
        return {"lancet": 0.1, "raf": 0.4, "tutel+degree=8": 0.3}.get(case.system, 0.11)

    raf = judged("lancet-comm-raf-v100", times, exposed_communication=exposed)
    assert raf.obtained == pytest.approx(0.75)
    assert raf.verdict == v.REPRODUCED
    tutel = judged("lancet-comm-tutel-a100", times, exposed_communication=exposed)
    assert tutel.obtained == pytest.approx(1 - 1 / 3)
    assert tutel.verdict == v.REPRODUCED


def test_quantities_of_one_system():
    """The largest number of parts, the mean prediction error, the median time, the largest ratio of one cluster."""
    times = by_system(lancet=1.0, tutel=2.0, deepspeed=2.5)
    large = {"gpt2-l-moe": 6.0}
    parts = judged("lancet-partitions", times, best_partition_count=lambda case: large.get(case.workload.model, 2.0))
    assert (parts.verdict, parts.obtained) == (v.CONTRADICTED, 6.0)
    error = judged("lancet-prediction-error", times, prediction_error=lambda case: len(case.size) * 0.01)
    assert error.obtained == pytest.approx(0.03)
    took = judged("lancet-opt-time", times, optimisation_time=lambda case: 60.0)
    assert (took.verdict, took.obtained) == (v.REPRODUCED, 1.0)

    def ratio(case):
        return 9.0 if "p4de" in case.topology else 4.0 if case.system == "deepspeed" else 3.4

    found = judged("lancet-motivation-ratio", times, alltoall_over_expert_time=ratio)
    assert (found.verdict, found.obtained) == (v.REPRODUCED, 3.4)
    share = judged("lancet-motivation-share", times, alltoall_share_of_step=lambda case: 0.5)
    assert (share.verdict, share.obtained) == (v.DIRECTION_ONLY, 0.5)


def test_findings_are_words():
    """Both passes against either alone, the deeper model's loss, and who runs out of memory."""
    base = {"lancet": 1.0, "lancet+parts=false": 1.1, "raf": 1.3}

    def times(loss_of_small):
        return lambda case: base.get(case.system, 1.2 if case.workload.model == "gpt2-l-moe" else loss_of_small)

    assert judged("lancet-ablation", times(1.1)).verdict == v.REPRODUCED
    assert "does not lose more" in judged("lancet-ablation", times(1.25)).obtained
    assert judged("lancet-ablation", times(0.9)).obtained == "both better than either at 2 of 4 cases"
    fits = judged("lancet-oom", by_system(lancet=1.0, raf=1.0, tutel=1.0, deepspeed=1.0))
    assert (fits.verdict, fits.obtained) == (v.CONTRADICTED, "fits")
    out = judged("lancet-oom", by_system(lancet=1.0, raf=1.0, tutel=1.0, deepspeed="out-of-memory"))
    assert (out.verdict, out.obtained) == (v.REPRODUCED, "out-of-memory")  # the gate that it lacks says nothing


def test_a_finding_is_one_of_every_draw():
    """What holds on the nominal machine alone is no reproduction; nor does a baseline that fits there alone decide."""
    base = {"lancet": (1.0, 1.0, 1.0), "lancet+parts=false": (1.1, 0.9, 1.1), "raf": (1.3, 1.3, 1.3)}

    def draws_of(case):
        return base.get(case.system) or ((1.2,) * 3 if case.workload.model == "gpt2-l-moe" else (1.1,) * 3)

    own = [case for case in CASES if case.experiment == "ablation"]
    rows = [row_of(case, "gpu", "step_time", "s", draws_of(case)[0], draws=draws_of(case)) for case in own]
    found = score(CLAIMS["lancet-ablation"], SUITE, Evidence(rows))
    assert (found.verdict, found.shares) == (v.DEPENDS, {v.CONTRADICTED: 0.5, v.REPRODUCED: 0.5})
    assert found.obtained == CLAIMS["lancet-ablation"].value
    gone = [case for case in CASES if case.experiment == "end-to-end"]
    rows = [row_of(case, "gpu", "step_time", "s", 1.0, draws=(1.0, np.nan, np.nan)) for case in gone]
    assert score(CLAIMS["lancet-oom"], SUITE, Evidence(rows)).shares == {v.REPRODUCED: 1.0}


def test_half_of_the_cases_are_no_finding():
    """Of one model nothing is said about the other, and the claim is not judged."""
    rows = [
        row_of(case, "gpu", "step_time", "s", 1.0 if case.system == "lancet" else 2.0)
        for case in CASES
        if case.experiment == "ablation" and case.workload.model == "gpt2-s-moe"
    ]
    found = score(CLAIMS["lancet-ablation"], SUITE, Evidence(rows))
    assert (found.verdict, found.obtained) == (v.NOT_RUN, "both better than either; of one model only")
    assert "needs 4 cases" in found.why


@pytest.mark.parametrize("name", ["lancet-e2e-switch-a100-max", "lancet-ablation", "lancet-oom"])
@pytest.mark.parametrize("system", ["lancet", "raf", "deepspeed"])
def test_what_is_wrong_is_no_result(name, system):
    """A system or a rival that computes something else is neither beaten nor out of memory."""
    times = by_system(**{"lancet": 1.0, "raf": 1.4, "tutel": 1.5, "deepspeed": 1.3, system: "wrong"})
    found = judged(name, times)
    matters = {"lancet-ablation": ("lancet", "raf"), "lancet-oom": ("deepspeed",)}.get(name, (system,))
    assert ("is wrong: because" in found.why) == (system in matters)


def test_a_rival_that_lacks_a_model_is_not_out_of_memory():
    """It steps aside where others have it; where none has, or its rows are not there yet, the claim says so."""
    name = "lancet-e2e-switch-a100-max"
    times = by_system(lancet=1.0, raf=1.4, tutel=1.5, deepspeed=1.3)
    lacks = judged(name, lambda case: None if "lancet" not in case.system else times(case))
    assert lacks.why.startswith("no baseline has it: ")
    some = judged(name, lambda case: None if case.size == "2x8" and "lancet" not in case.system else times(case))
    assert (some.obtained, "memory" in some.why) == (pytest.approx(1.3), False)
    rows = [
        row_of(case, "gpu", "step_time", "s", times(case), draws=(times(case),))
        for case in CASES
        if times(case) and case.experiment == "end-to-end" and (case.system, case.size) != ("raf", "2x8")
    ]
    found = score(CLAIMS[name], SUITE, Evidence(rows))
    assert (found.verdict, "this run has" in found.why) == (v.NOT_RUN, True)


def test_what_is_not_there_is_said():
    """A system that did not run, a metric without a query, a scope that no experiment has, no rows."""
    times = by_system(lancet=1.0, raf=1.1, tutel=1.2, deepspeed=1.3)
    assert "needs raf" in judged("lancet-e2e-switch-a100-max", times, lacking=("raf",)).why
    assert "needs lancet" in judged("lancet-e2e-switch-a100-max", times, lacking=("lancet",)).why
    claim = CLAIMS["lancet-e2e-switch-a100-max"]
    assert "no results yet" in score(claim, SUITE, Evidence()).why
    rows = [row_of(case, "gpu", "step_time", "s", 1.0) for case in CASES if case.experiment == "end-to-end"]
    for other, says in (
        (replace(claim, metric="max_happiness"), "no query for the metric"),
        (replace(claim, scope={"gate": "lottery"}), "no case of the claim's scope"),
        (replace(claim, scope={"colour": "red"}), "organised by colour"),
    ):
        assert says in score(other, SUITE, Evidence(rows)).why
