"""Claims about parts: a time under each reading, the k at which two ways meet, bytes, and a gap of losses."""

from dataclasses import replace

import pytest

from moebench.cases.plan import Filters, plan
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.reported import claims_of
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import score
from moebench.results.rows import row_of, without_number
from moebench.workloads.load import load_suite, load_topology
from moebench.workloads.part import PartWorkload
from tests.moebench.part_suite import TEXT, written

CLAIMS = {claim.id.removeprefix("megascale-"): claim for claim in claims_of("megascale")}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(written(tmp_path_factory.mktemp("suite")))


def times_of(case):
    """Seconds by draw: k all-to-alls take as long as k / 4 of either other, of half the tokens half of it."""
    workload = case.workload
    seconds = workload.size("tokens") / 16384 * (workload.size("top_k") / 4 if case.system == "all-to-all" else 1.0)
    return tuple(seconds * 768e-6 * scale for scale in (1, 0.9, 1.1, 1.2))


def evidence(suite, lacking=(), failed=()):
    """Rows of the suite's dispatch, of bytes and of a training."""
    rows = []
    for case in plan(suite, Filters()):
        if case.system in lacking:
            continue
        if case.system in failed:
            rows.append(without_number(case, "h800", "wrong", "because"))
        elif case.experiment == "dispatch-mode":
            drawn = times_of(case)
            rows.append(row_of(case, "h800", "part_time", "s", drawn[0], draws=drawn))
        elif case.workload.part == "gradient-sum":
            sent = 4e6 if case.system.startswith("fp32") else 2e6
            by_tier = {"link": 0.0, "nic": sent}
            rows += [row_of(case, "h800", "link_bytes", "B", n, detail={"tier": tier}) for tier, n in by_tier.items()]
            rows.append(row_of(case, "h800", "part_time", "s", sent / 1e9))
        elif case.workload.part == "training":
            gap = 0.0 if case.system.startswith("fp32") else 0.003
            rows.append(row_of(case, "h800", "deviation", "nats", gap, detail={"trained": "a small model"}))
    return Evidence(rows, {"1x8-h800": load_topology("1x8-h800")})


def test_a_time_is_judged_under_each_reading(suite):
    """The reading's tokens, not those that the reported row infers; the first is the default."""
    found = obtain(CLAIMS["dispatch-a2a-k2"], suite, evidence(suite))
    labels = [c.assumption.labels for c in found.conditions]
    assert labels == [{"reading": "16,384 tokens"}, {"reading": "8,192 tokens"}]
    assert [c.values[0] for c in found.conditions] == pytest.approx([384, 192])
    assert found.conditions[0].cases == ("dispatch-mode/dispatch/t16384-d4096-k2/1x8-h800/all-to-all",)


def test_a_time_for_every_k_must_be_one(suite):
    """All-gather takes the same for all; a claim that left k open of an all-to-all would be about several."""
    claim = CLAIMS["dispatch-ag"]
    assert obtain(claim, suite, evidence(suite)).conditions[0].values[0] == pytest.approx(768)
    assert score(claim, suite, evidence(suite)).verdict == v.DEPENDS
    with pytest.raises(CantAnswer, match="holds 3 cases of different times"):
        obtain(replace(claim, system="all-to-all"), suite, evidence(suite))


def test_the_crossover_is_the_last_k_that_is_no_slower(suite):
    """Of 1, 2 and 8 choices, two; in every draw."""
    found = obtain(CLAIMS["dispatch-crossover"], suite, evidence(suite))
    assert [c.values.tolist() for c in found.conditions] == [[2.0] * 4] * 2
    assert score(CLAIMS["dispatch-crossover"], suite, evidence(suite)).verdict == v.CONTRADICTED


def test_bytes_are_compared_without_draws(suite):
    """Half on every topology."""
    found = score(CLAIMS["dp-compression-bytes"], suite, evidence(suite))
    assert (found.obtained, found.verdict) == (0.5, v.REPRODUCED)


def test_a_gap_of_losses_says_whose_it_is(suite):
    """Counted, not simulated; of a model that is not the paper's."""
    found = score(CLAIMS["dp-compression-loss"], suite, evidence(suite))
    assert (found.obtained, found.engine, found.verdict) == (0.003, "count", v.CONTRADICTED)
    assert "0.003 nats against at most 0.002 nats (a small model; the paper trains 7B)" in found.why


@pytest.mark.parametrize(
    ("name", "change", "lacking", "failed", "words"),
    [
        ("dispatch-ag", {}, ("all-gather",), (), "needs all-gather at t16384-d4096-k1 on 1x8-h800, not part of"),
        ("dispatch-ag", {}, (), ("all-gather",), "is wrong: because"),
        ("dispatch-ag", {"scope": {"gpus": "64"}}, (), (), "no case of the claim's scope"),
        ("dispatch-ag", {"scope": {"colour": "red"}}, (), (), "organised by colour"),
        ("dispatch-ag", {"metric": "heat"}, (), (), "no query for the metric heat yet"),
        ("sync-dp4-384-tp", {}, (), (), "experiment parameter-sync is not built yet"),
        ("intraop-qkv+a2a-mixtral-8x7b-fused", {}, (), (), "no results yet of this experiment"),
    ],
)
def test_what_can_not_be_answered_says_what_it_needs(suite, name, change, lacking, failed, words):
    """Nothing is judged by less than the claim is about."""
    with pytest.raises(CantAnswer, match=words):
        obtain(replace(CLAIMS[name], **change), suite, evidence(suite, lacking, failed))


def test_every_reported_part_has_its_case_in_the_suite():
    """Of each of the 81 numbers, under every reading, in the suite that comes with the package."""
    from moebench.claims.part_query import points_of

    own, counted = load_suite("megascale"), 0
    experiments = {e.name: e for e in own.experiments if e.kind == "part"}
    for claim in CLAIMS.values():
        if claim.experiment in experiments:
            experiment = experiments[claim.experiment]
            for reading in experiment.readings:
                for _, workload in points_of(claim, experiment, reading):
                    assert not isinstance(workload, PartWorkload) or workload.problem(8) is None
            counted += 1
    assert counted == 11 + 48 + 22 + 2


SYNC = """
[[experiments]]
kind = "part"
name = "parameter-sync"
title = "Sums"
question = "What does it cost?"
metric = "part_time"
sizes = ["4x8", "8x8"]
node_types = ["h800"]
parts = [
    { part = "parameter-sync", systems = ["tp-attention", "sp-attention"], sizes = { attention_mb = [384, 512] } },
]
readings = [{ name = "all", sizes = { expert_mb = 100, sent_percent = 100, of_part = 0 } }]
"""


def test_an_overhead_is_of_all_points_the_largest_or_the_smallest(tmp_path):
    """By draw, over both sizes and both numbers of replicas; a bound on either side."""
    suite = load_suite(written(tmp_path, TEXT + SYNC))
    longer = {("384", "4x8"): 1.01, ("384", "8x8"): 1.02, ("512", "4x8"): 1.05, ("512", "8x8"): 1.03}
    rows = []
    for case in plan(suite, Filters(experiments=("parameter-sync",))):
        factor = longer[str(case.workload.size("attention_mb")), case.size] if case.system == "sp-attention" else 1.0
        drawn = (0.1 * factor, 0.2 * factor, 0.3 * factor, 0.4 + (factor - 1) / 10)
        rows.append(row_of(case, "h800", "part_time", "s", drawn[0], draws=drawn))
    found = Evidence(rows, {})
    largest, smallest = (obtain(CLAIMS[f"sync-overhead-{which}"], suite, found) for which in ("max", "min"))
    assert largest.conditions[0].values == pytest.approx([0.05, 0.05, 0.05, 0.0125])
    assert smallest.conditions[0].values == pytest.approx([0.01, 0.01, 0.01, 0.0025])
    assert len(largest.conditions[0].cases) == 8
