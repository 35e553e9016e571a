"""Claims about steps of several tasks: rates, gains, memory and the time of a training, by reading and variant."""

from dataclasses import replace

import pytest

from moebench.claims import verdict as v
from moebench.claims.evidence import Evidence, obtain
from moebench.claims.reported import claims_of
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import score
from moebench.claims.task_query import planned_of
from moebench.workloads.load import load_suite
from tests.moebench.task_suite import rows_of, written

CLAIMS = {claim.id.removeprefix("moesys-"): claim for claim in claims_of("moesys")}


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return load_suite(written(tmp_path_factory.mktemp("suite")))


def told(suite, name, **change):
    """Name and nominal value of each condition."""
    found = obtain(replace(CLAIMS[name], **change), suite, Evidence(rows_of(suite)))
    return [(c.assumption.name, round(float(c.values[0]), 6)) for c in found.conditions]


def test_a_rate_is_of_the_tasks_gpus(suite):
    """A GPU a task is 4 of them, 4/2/1/1 are 8; each reading, then each other variant of the system."""
    assert told(suite, "elastic-imbalanced") == [
        ("small", 64.0), ("small by moesys+rows=stay", 128.0), ("wide", 32.0), ("wide by moesys+rows=stay", 64.0),
    ]  # fmt: skip
    assert told(suite, "elastic-balanced")[0] == ("small", 80.0)
    assert score(CLAIMS["elastic-imbalanced"], suite, Evidence(rows_of(suite))).verdict == v.DEPENDS


def test_the_gain_is_of_a_gpu_of_eight_over_one_of_four(suite):
    """80 over 64, in every reading."""
    assert {value for _, value in told(suite, "elastic-gain")} == {0.25}


def test_what_is_compared_with_is_called_otherwise_here(suite):
    """PyTorch's is ddp, the first variant the default; times the other way round, memory as a share, draw by draw."""
    assert told(suite, "ufo-throughput") == [("four", 0.5), ("four by ddp+by=task", 2.0)]
    assert told(suite, "ufo-memory") == [("four", 0.2), ("four by ddp+by=task", round(1 - 4 / 6, 6))]
    assert told(suite, "ufo-ips")[0] == ("four", 64.0)
    assert told(suite, "ufo-ips-pytorch") == [("four", round(128 / 3, 6)), ("four by ddp+by=task", round(128 / 6, 6))]
    assert told(suite, "ufo-mem-pytorch")[0] == ("four", 50.0)
    assert score(CLAIMS["ufo-memory"], suite, Evidence(rows_of(suite))).obtained == pytest.approx(0.2)


def test_a_training_takes_its_iterations(suite):
    """60,000 of 11.52 s are 8 days; of the model whose parameters are near the paper's."""
    assert told(suite, "ufo-run") == [("as printed", 8.0)]
    assert score(CLAIMS["ufo-run"], suite, Evidence(rows_of(suite))).obtained == pytest.approx(8.0)


def test_who_is_out_of_memory_is_told(suite):
    """The baseline has no time, so that there is no gain; its memory stands all the same."""
    evidence = Evidence(rows_of(suite, out=("ddp",)))
    found = obtain(CLAIMS["ufo-throughput"], suite, evidence)
    assert found.conditions[0].missing[0] == v.BASELINE_OUT
    assert obtain(CLAIMS["ufo-mem-pytorch"], suite, evidence).conditions[0].values[0] == 50.0
    neither = Evidence(rows_of(suite, out=("moesys", "ddp")))
    assert obtain(CLAIMS["ufo-throughput"], suite, neither).conditions[0].missing[0] == v.BOTH_OUT
    assert obtain(CLAIMS["ufo-ips"], suite, neither).conditions[0].missing[0] == v.SYSTEM_OUT


@pytest.mark.parametrize(
    ("name", "change", "lacking", "words"),
    [
        ("ufo-ips", {}, ("moesys",), "is unsupported: because"),
        ("ufo-ips", {"system": "megatron"}, (), "needs megatron, which experiment ufo does not run"),
        ("ufo-ips", {"scope": {"gpus": "16"}}, (), "no topology of 16 GPUs"),
        ("ufo-ips", {"scope": {"gpus": "many"}}, (), "gpus = many is no number"),
        ("ufo-ips", {"scope": {"colour": "red"}}, (), "organised by colour"),
        ("ufo-ips", {"metric": "heat"}, (), "no query for the metric heat"),
        ("ufo-run", {"scope": {"gpus": "48"}}, (), "needs the number of iterations"),
        ("ufo-run", {"scope": {"gpus": "48", "params": "1e9", "iterations": "3"}}, (), "no reading of the claim's"),
        ("elastic-balanced", {"scope": {"gpus": "2/2/2/2"}}, (), "gives the tasks 4/2/1/1 GPUs, not 2/2/2/2"),
    ],
)
def test_what_can_not_be_answered_says_what_it_needs(suite, name, change, lacking, words):
    """Nothing is judged by less than the claim is about."""
    with pytest.raises(CantAnswer, match=words):
        obtain(replace(CLAIMS[name], **change), suite, Evidence(rows_of(suite, lacking)))


def test_every_reported_number_has_its_cases_in_the_suite():
    """Of the suite that comes with the package, under every reading."""
    own = {experiment.name: experiment for experiment in load_suite("moesys").experiments}
    counted = 0
    for claim in CLAIMS.values():
        if claim.experiment in ("elastic", "ufo", "ufo-run"):
            assert len(list(planned_of(claim, own[claim.experiment]))) >= len(own[claim.experiment].readings), claim.id
            counted += 1
    assert counted == 10
