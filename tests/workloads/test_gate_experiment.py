"""Experiments of routing rules in suite files: read, written again, and refused with file, line and key."""

import json

import pytest

from moebench.results.plain import from_plain, to_plain
from moebench.workloads.errors import InputError
from moebench.workloads.gate import GateTraining, GateWorkload
from moebench.workloads.gates.registry import gate
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import load_suite
from moebench.workloads.load_suite import check_suite
from moebench.workloads.suite import Suite

TEXT = """
schema_version = 1
title = "Rules"
paper = "none"

[[experiments]]
kind = "gate"
name = "rules"
title = "Rules"
question = "Are they even?"
metric = "supported"
systems = ["reference"]
gates = ["switch", "sigmoid-8"]
tokens = 64
experts = 16
node_types = ["titan-rtx"]

[experiments.training]
steps = 5
gates = { sigmoid-8 = "sigmoid-2+rate=0.01" }
"""


@pytest.fixture
def write(tmp_path):
    def writer(text=TEXT):
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return str(path)

    return writer


def test_it_is_read_with_its_defaults_and_survives_a_run_file(write):
    """Logits iid and zipf, one rank; the rule in the training by the gate's label."""
    suite = load_suite(write())
    (experiment,) = suite.experiments
    assert experiment.topologies == ("1x1-titan-rtx",)
    assert experiment.routings == ("iid", "zipf")
    assert experiment.training == GateTraining(steps=5)
    assert experiment.in_training == {"sigmoid-8": gate("sigmoid", 2, rate=0.01)}
    again = from_plain(Suite, json.loads(json.dumps(to_plain(suite))))
    assert again == suite
    check_suite(again, "run.json: suite")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"switch", "sigmoid-8"', '"switch", "switch"', "trained gate 'sigmoid-8'"),
        ('["switch", "sigmoid-8"]', '["switch", "sigmoid-8", "switch"]', "line 13.*the same gate stands there twice"),
        ("rate=0.01", "rat=0.01", "line 20.*unknown option of gate sigmoid 'rat'"),
        ("steps = 5", "steps = 5\nclusters = 20", "clusters = 20: at most d_model = 16"),
        ("tokens = 64", "tokens = 0", "line 14.*tokens"),
        ('["titan-rtx"]', '["titan-rtx", "h100"]', "line 16.*node_types"),
        ('metric = "supported"', 'metric = "step_time"', "line 11.*supported"),
    ],
)
def test_faults_are_one_line(write, old, new, told):
    """The key, and what is allowed."""
    assert TEXT.count(old) == 1
    with pytest.raises(InputError, match=told):
        load_suite(write(TEXT.replace(old, new)))


def test_workloads_say_what_has_no_meaning():
    """Ranks, sizes, clusters without room."""
    rule = GateWorkload(GateSpec("switch"), 8, 4)
    assert rule.problem(1) is None
    assert rule.labels == (("switch",), ("t8-e4",))
    assert "one rank" in (rule.problem(2) or "")
    for bad in (
        GateWorkload(GateSpec("switch"), 0, 4),
        GateWorkload(GateSpec("topk", 5), 8, 4),
        GateWorkload(GateSpec("switch"), 8, 4, capacity_factor=0.0),
        GateWorkload(GateSpec("switch"), 8, 4, training=GateTraining(0)),
        GateWorkload(GateSpec("switch"), 8, 4, training=GateTraining(1, clusters=17)),
    ):
        assert bad.problem(1)
