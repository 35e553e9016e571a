"""The measurement of Lancet beside RAF: its arithmetic and page, and its ranks on a model that takes no time."""

import json
from dataclasses import replace

import pytest

from benchmarks import accuracy
from benchmarks.lancet_measured import simulated
from benchmarks.lancet_results import ALONE, LANCET, RAF, Measured, Step, losses, markdown, read, write
from moebench.ranks.run import run_ranks
from moebench.workloads.load import load_topology

MODEL = "gpt2-moe+layers=2+d_model=16+heads=2+sequence=8+vocabulary=32"


def step(pair, system, rank, **parts):
    """A step whose parts are given in seconds."""
    seconds = {"same_s": 0.5, "own_s": 0.2, "launch_s": 0.01, "wait_s": 0.4, "rest_s": 0.0, **parts}
    cpu = {"same_cpu_s": 0.5, "own_cpu_s": 0.2, "launch_cpu_s": 0.01, "wait_cpu_s": 0.0, "others_cpu_s": 0.05}
    return Step(pair, system, rank, step_s=sum(seconds.values()), **seconds, **cpu, sent_bytes=float("nan"))


def measured(behind=0.05):
    """Two pairs on two ranks: Lancet waits 0.3 s less, computes 0.06 s more in parts, 0.04 s more beside exchanges."""
    parts = {
        RAF: {},
        LANCET: {"own_s": 0.28, "same_s": 0.52, "wait_s": 0.1, "launch_s": 0.03},
        RAF + ALONE: {"wait_s": 0.0},
        LANCET + ALONE: {"own_s": 0.26, "wait_s": 0.0},
    }
    steps = [step(pair, name, rank, **own) for pair in range(2) for name, own in parts.items() for rank in range(2)]
    expected = {name: {"step_s": 1.0, "exposed_s": 0.3} for name in (RAF, LANCET)}
    facts = {
        "model": MODEL, "batch_size": 2, "size": "2x1", "nic_rate": "250mbit", "cores": 2,
        "told": ["a to b in 2 parts: 1", "under c: d"],
        "calls": {RAF: 5, LANCET: 9}, "launches": {RAF: 1, LANCET: 3}, "expected": expected,
        "simulated": {**expected, "gain": [0.9, 1.1]},
        "together_s": {"nbytes": 2**20, "all_to_all": 0.03, "all_reduce": 0.06, "behind": behind},
    }  # fmt: skip
    return Measured(steps, facts)


def test_the_gain_is_of_pairs_and_its_loss_is_told_by_cause():
    """What is waited less, less all losses, is the shorter step; the slowest rank counts."""
    found = measured()
    assert found.gain.median == pytest.approx(1.11 / 0.93)
    assert (found.gain.faster, found.gain.pairs) == (2, 2)
    assert [round(seconds, 3) for _, seconds in losses(found)] == [0.06, 0.04, 0.02, 0.0]
    shorter_s = found.mean(RAF, "step_s") - found.mean(LANCET, "step_s")
    waits_s = found.mean(RAF, "wait_s") - found.mean(LANCET, "wait_s")
    assert waits_s - sum(seconds for _, seconds in losses(found)) == pytest.approx(shorter_s)
    assert found.share == pytest.approx(0.4 / 1.11)
    slow = replace(found, steps=[found.steps[0], replace(found.steps[1], step_s=3.0)])
    assert list(slow.slowest(RAF)) == [3.0]


def test_the_page_says_whether_the_aim_is_met_and_whether_collectives_share_the_link():
    """The share of communication; one after another or several at a time; the ranges; all four kinds of steps."""
    text = markdown(measured())
    assert "of RAF's step it is 36 % (aim: 30 % to 50 %, met)" in text
    assert "gloo carries several collectives at a time" in text
    assert text.endswith("\n\n- a to b in 2 parts: 1")
    assert "| waiting for collectives | 400 | 0 | 100 | 0 |" in text
    assert "| the simulator, the very plans | 1000 | 1000 | 1.000 (0.900 to 1.100) | 300 | 300 |" in text
    assert "So collectives go one after another" in markdown(measured(behind=0.09))


def test_steps_and_facts_survive_their_files(tmp_path):
    """CSV and JSON; the page is the same."""
    write(measured(), tmp_path / "lancet-x.csv")
    assert markdown(read(tmp_path / "lancet-x.csv")) == markdown(measured())
    assert json.loads((tmp_path / "lancet-x.json").read_text())["size"] == "2x1"


def test_ranks_time_every_kind_of_call_and_the_simulator_takes_their_plans():
    """Two real ranks, one pair: parts of a step add up, steps without exchanges wait for nothing."""
    first, second = run_ranks("benchmarks.lancet_steps:run_rank", 2, (MODEL, 4, 1, None), timeout_s=120.0)
    steps = [*first["steps"], *second["steps"]]
    assert sorted({s.system for s in steps}) == [LANCET, LANCET + ALONE, RAF, RAF + ALONE]
    for one in steps:
        assert one.same_s + one.own_s + one.launch_s + one.wait_s + one.rest_s == pytest.approx(one.step_s, rel=0.01)
        assert min(one.same_s, one.launch_s, one.wait_s, one.rest_s) > 0
    assert second["plans"] is None
    assert first["launches"][RAF] == sum("_start" in call.target for call in first["plans"][RAF].calls)
    assert set(first["planned"]["expected"]) == {RAF, LANCET}
    (machine,) = accuracy.FOLDER.glob("validation-*/2x1/emulated.toml")
    told = simulated(first["plans"], MODEL, 4, load_topology(str(machine)))
    assert told[RAF]["step_s"] > told[RAF]["exposed_s"] > 0
    assert len(told["gain"]) == 2
