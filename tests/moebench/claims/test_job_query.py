"""Claims about training jobs, judged on rows that are made up."""

from functools import cache

import pytest

from moebench.cases.jobs import job_of
from moebench.cases.plan import Filters, plan
from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence
from moebench.claims.job_query import obtain
from moebench.claims.reported import claims_of
from moebench.claims.scoreboard import score
from moebench.results.rows import row_of, without_number
from moebench.workloads.load import load_suite

CLAIMS = {claim.id: claim for claim in claims_of("megascale")}
JOBS = ("strong-scaling", "weak-scaling", "gpu-generations", "ablation", "parallelism-strategy")
EXPERIMENTS = (*JOBS, "selective-rematerialisation")

BASELINE = ("megatron_0.10", "megatron_0.10+expert=2", "megatron_0.10+dispatcher=allgather+recompute=moe")


@cache
def suite():
    """The suite of the paper."""
    return load_suite("megascale")


@cache
def cases(experiment):
    """The cases of one experiment."""
    return plan(suite(), Filters(experiments=(experiment,)))


def judged(name, times, lacking=(), **other):
    """The score of a claim where `times(case)` is each case's seconds, or its status.

    Args:
        lacking: systems without rows; other: values of further metrics, as functions of a case and its seconds.
    """
    rows = []
    for case in cases(CLAIMS[name].experiment):
        if case.system in lacking:
            continue
        found = times(case)
        if isinstance(found, str):
            rows.append(without_number(case, "h800", found, "because"))
            continue
        rows.append(row_of(case, "h800", "iteration_time", "s", found, draws=(found, 0.99 * found, 1.01 * found)))
        rows += [row_of(case, "h800", key, "1", value(case, found)) for key, value in other.items()]
    return score(CLAIMS[name], suite(), Evidence(rows))


def by_stem(**seconds):
    """Seconds by the name of a system without options, of 240 GPUs; fewer on more."""
    def of(case):
        nodes = int(case.size.partition("x")[0])
        return seconds[case.system.partition("+")[0].replace(".", "_")] * 30 / nodes

    return of


def test_a_time_is_the_systems_own_and_a_speedup_that_over_the_fastest_baseline():
    """What the paper calls megatron is several settings here, the fastest of which counts; another system does not."""
    times = by_stem(megascale=21.61, megatron_0_10=39.94, megatron_modern=10.0)
    found = judged("megascale-strong-megascale-240-iter", times)
    assert (found.verdict, found.obtained) == (v.REPRODUCED, pytest.approx(21.61))
    assert judged("megascale-strong-240-speedup", times).obtained == pytest.approx(39.94 / 21.61)

    def twice(case):
        return times(case) * (0.5 if case.system.endswith("expert=2") else 1.0)

    assert judged("megascale-strong-240-speedup", twice).obtained == pytest.approx(39.94 / 21.61 / 2)
    of_both = ["one-sequence", "two-chunks", "four-chunks", "two-sequences"]
    assert [entry["reading"] for entry in found.conditions] == of_both
    late = judged("megascale-strong-megascale-1440-iter", times)
    assert late.obtained == pytest.approx(21.61 / 6)


def test_the_null_model_stands_beside_a_speedup():
    """No difference: contradicted."""
    found = judged("megascale-strong-240-speedup", by_stem(megascale=1.0, megatron_0_10=1.0, megatron_modern=1.0))
    assert found.verdict == v.CONTRADICTED
    assert found.null_verdict == v.CONTRADICTED


def test_what_does_not_fit_is_said_and_the_other_setting_counts():
    """A setting out of memory drops out; with all of them out there is no ratio."""
    times = by_stem(megascale=10.0, megatron_0_10=20.0, megatron_modern=1.0)

    def without(*systems):
        return lambda case: "out-of-memory" if case.system in systems else times(case)

    one = judged("megascale-strong-240-speedup", without("megatron_0.10"))
    assert one.obtained == pytest.approx(2.0)
    every = judged("megascale-strong-240-speedup", without(*BASELINE))
    assert every.obtained is None
    failed = judged("megascale-strong-megascale-240-iter", lambda case: "failed")
    assert failed.verdict == v.NOT_RUN
    assert "is failed: because" in failed.why


def test_a_quantity_that_a_run_does_not_have_is_not_out_of_memory():
    """Its case ran, and says nothing of it."""
    found = judged("megascale-gpus-max-mfu-gain", by_stem(megascale=1.0, megatron_0_10=1.5, megatron_modern=1.0))
    assert found.verdict != v.NOT_RUN  # of times
    name = next(name for name, claim in CLAIMS.items() if claim.metric == "mfu")
    found = judged(name, by_stem(megascale=1.0, megatron_0_10=1.5, megatron_modern=1.0))
    assert (found.verdict, found.why.startswith("the run says no mfu of ")) == (v.NOT_RUN, True)


def test_a_reading_of_the_baseline_is_one_of_claims_about_it():
    """Its own setting alone counts there; one that the baseline lacks altogether is none, not out of memory."""
    def times(case):
        return 10.0 if case.system == "megascale" else 40.0 if "recompute" in case.system else 20.0

    found = judged("megascale-strong-240-speedup", times)
    by_reading = {entry["reading"]: entry["nominal"] for entry in found.conditions}
    assert by_reading["one-sequence"] == by_reading["baseline-experts-on-16"] == pytest.approx(2.0)
    assert by_reading["baseline-recomputes"] == by_reading["baseline-tensor-2"] == pytest.approx(4.0)
    lacking = judged(
        "megascale-strong-240-speedup", lambda case: "unsupported" if "tensor=2" in case.system else times(case)
    )
    assert {entry["reading"] for entry in lacking.conditions} == by_reading.keys() - {"baseline-tensor-2"}
    assert "out of memory" not in lacking.why


def test_weak_scaling_is_relative_to_the_first_size():
    """Of a GPU; the batch grows with them, so that equal times are 1."""
    def times(case):
        return 12.0 if case.system == "megascale" else 24.0

    assert judged("megascale-weak-megatron-960", times).obtained == pytest.approx(0.5)
    assert judged("megascale-weak-megascale-1440", times).obtained == pytest.approx(1.0)
    slower = judged("megascale-weak-megascale-1440", lambda case: 12.0 * (1.25 if case.size == "180x8" else 1.0))
    assert slower.obtained == pytest.approx(0.8)


def test_node_types_by_their_names_in_the_paper():
    """The A100 of the paper is a node type here; the largest ratio is over all three."""
    def times(case):
        gain = {"4x8-h800": 1.6, "4x8-a100-80": 1.3, "4x8-h20": 1.0}[case.topology]
        return 10.0 * (gain if case.system != "megascale" else 1.0)

    assert judged("megascale-gpus-a100-megatron-iteration_time", times).obtained == pytest.approx(13.0)
    assert judged("megascale-gpus-max-mfu-gain", times).obtained == pytest.approx(1.6)
    exposed = judged("megascale-gpus-h800-megascale-exposed_comm", times, exposed_comm=lambda case, s: 0.06 * s)
    assert exposed.obtained == pytest.approx(0.6)


@pytest.mark.parametrize("best", ["h800", "a100-80", "h20"])
def test_a_largest_value_names_the_machine_that_it_is_of_first(best):
    """What is said of its parameters is said of that machine's."""
    name, rows = "megascale-gpus-max-mfu-gain", []
    for case in cases("gpu-generations"):
        gain = 1.0 if case.system == "megascale" else 1.6 if case.topology == f"4x8-{best}" else 1.2
        rows.append(row_of(case, "h800", "iteration_time", "s", gain, draws=(gain, gain)))
    found = obtain(CLAIMS[name], suite(), Evidence(rows))
    assert [one.topologies[0] for one in found.conditions] == [f"4x8-{best}"] * len(found.conditions)
    assert len(found.conditions[0].topologies) == 3


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("megascale-ablation-inter", 1.25), ("megascale-strategy-tp+ep-phi-3.5-moe", 0.8)],
)
def test_settings_of_one_system_by_what_the_claim_calls_them(name, wanted):
    """Normalised to what the suite says."""
    def times(case):
        slow = "attention=tp" in case.system
        return 12.5 if slow else 10.0

    assert judged(name, times).obtained == pytest.approx(wanted)


def test_a_reading_may_take_other_systems():
    """Steps of the ablation with the experts' rows by all-to-all, where the paper's rule has it."""
    def times(case):
        return 10.0 if "attention=tp" in case.system else 5.0 if "experts=ep" in case.system else 8.0

    found = judged("megascale-ablation-inter", times)
    assert found.obtained == pytest.approx(1.25)
    by_reading = {entry["reading"]: entry["nominal"] for entry in found.conditions}
    assert by_reading == {"one-sequence": 1.25, "by-rule": 2.0, "two-chunks": 1.25, "two-sequences": 1.25}
    last = judged("megascale-ablation-intra", times)
    # By the rule the last step is the same.
    assert [entry["reading"] for entry in last.conditions] == ["one-sequence", "two-chunks", "two-sequences"]


def test_reductions_of_memory():
    """Off against on, of either model."""
    held = {"mixtral-8x7b": 0.6, "mixtral-8x22b": 0.25}

    def activations(case, _):
        return 10e9 * (held[job_of(case).model] if case.system == "megascale" else 1.0)

    found = judged("megascale-sar-mixtral-8x7b-activation-cut", lambda case: 1.0, memory_activations=activations)
    assert found.obtained == pytest.approx(0.4)
    off = judged("megascale-sar-mixtral-8x22b-off-activations", lambda case: 1.0, memory_activations=activations)
    assert off.obtained == pytest.approx(10.0)


def test_a_system_that_did_not_run_is_asked_for():
    """Not run, with what it would need."""
    times = by_stem(megascale=10.0, megatron_0_10=20.0, megatron_modern=1.0)
    found = judged("megascale-strong-240-speedup", times, lacking=BASELINE)
    assert found.verdict == v.NOT_RUN


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_reported_number_has_a_query(experiment):
    """With a time for every case, none is left unjudged but those that are true by definition."""
    metrics = ("throughput", "mfu", "exposed_comm", "attention_and_gemm", "other")
    memory = ("memory_activations", "memory_model_states", "memory_other", "memory_total")
    rows = []
    for case in cases(experiment):
        rows.append(row_of(case, "h800", "iteration_time", "s", 1.0))
        rows += [row_of(case, "h800", name, "1", 1.0) for name in (*metrics, *memory)]
    evidence = Evidence(rows)
    own = [claim for claim in CLAIMS.values() if claim.experiment == experiment and not claim.is_definition]
    assert own
    left = [(claim.id, found.why) for claim in own if (found := score(claim, suite(), evidence)).obtained is None]
    assert not left
