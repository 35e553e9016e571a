"""Figures in a suite file: what they name must be there, and every list that varies must be shown."""

import json
import re
from dataclasses import asdict

import pytest

from moebench.results.plain import from_plain, to_plain
from moebench.workloads.errors import InputError
from moebench.workloads.figure_lists import kept_lists, lists_of, stands_for, variants
from moebench.workloads.load import load_suite
from moebench.workloads.load_suite import check_suite
from moebench.workloads.suite import Suite
from tests.workloads.files import EXPERIMENT, LAYER, suite_text, written

TWO = EXPERIMENT.replace('["reference"]', '["reference", "deepspeed"]')
GOOD = """
[[figures]]
name = "one"
title = "One"
experiment = "tiny"
value = "speedup"
baseline = "deepspeed"
x = "batch_size"
series = "gate"
only = { system = ["reference"] }
"""


def load(tmp_path, figures):
    return load_suite(str(written(tmp_path, suite_text(experiment=TWO, layer=LAYER + figures))))


def test_a_figure_says_what_it_shows(tmp_path):
    """Axes are lists of the experiment, narrowed by `only`; the baseline is no value of its own."""
    suite = load(tmp_path, GOOD)
    (figure,) = suite.figures
    assert figure.axes == ("batch_size", "gate")
    assert lists_of(suite.experiments[0])["system"] == ("reference", "deepspeed")
    assert kept_lists(figure, suite.experiments[0])["system"] == ("reference",)
    assert not figure.has_bars


def test_a_run_keeps_the_figures_of_its_suite(tmp_path):
    """Through run.json and back, checked as a file is."""
    for suite in (load(tmp_path, GOOD), load_suite("hetu")):
        again = from_plain(Suite, json.loads(json.dumps(to_plain(suite))))
        assert asdict(again) == asdict(suite)
        check_suite(again, "run.json: suite")


def test_older_runs_have_suites_without_figures(tmp_path):
    """The key may be missing."""
    data = to_plain(load(tmp_path, ""))
    del data["figures"]
    assert from_plain(Suite, data).figures == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('experiment = "tiny"', 'experiment = "tinny"', "experiment: unknown experiment 'tinny' (did you mean tiny?)"),
        ('x = "batch_size"', 'x = "batch"', "x: unknown x 'batch'"),
        ('series = "gate"', 'series = "batch_size"', "x: batch_size is another axis of the figure as well"),
        ('series = "gate"\n', "", "only: 2 values of gate and nothing that tells them apart"),
        ('baseline = "deepspeed"', 'baseline = "tutel"', "baseline: unknown baseline 'tutel'"),
        ('baseline = "deepspeed"', 'baseline = "reference"', "baseline: nothing is left beside the baseline"),
        ('baseline = "deepspeed"', 'baseline = "best-other"', "unknown baseline 'best-other'"),
        ('baseline = "deepspeed"\n', "", "value = 'speedup' or 'reduction' needs a baseline, and no other has one"),
        ('value = "speedup"', 'value = "spedup"', "unknown value 'spedup' (did you mean speedup?)"),
        ('value = "speedup"\nbaseline = "deepspeed"', 'value = "regions"', "a bar a system: x is system, no series"),
        ('["reference"] }', '["refrence"] }', "only.system: unknown system 'refrence' (did you mean reference?)"),
        ("{ system =", "{ sistem =", "only.sistem: unknown list 'sistem' (did you mean system?)"),
        ('x = "batch_size"\n', "", "missing key x, or not_drawn with the reason"),
        ('title = "One"', 'title = "One"\nnot_drawn = "why"', "not_drawn says why there is nothing to draw"),
        ('title = "One"', 'title = "One"\nmetric = "speed"', "unknown metric 'speed'"),
        ('title = "One"', 'title = "One"\nwidth = "poster"', "unknown width 'poster'"),
        ('title = "One"', 'title = "One"\nreported = ["h1"]', "reported: the suite names no reported numbers"),
        ('title = "One"', 'title = "One"\ntitel = "x"', "unknown key 'titel' (did you mean title?)"),
        ('title = "One"', "", "missing key title"),
        (GOOD, GOOD + GOOD, "two figures are named 'one'"),
    ],
)
def test_every_fault_is_one_line(tmp_path, old, new, told):
    """File, line and key, and what there is."""
    assert old in GOOD
    with pytest.raises(InputError) as refused:
        load(tmp_path, GOOD.replace(old, new))
    assert told in str(refused.value)
    assert re.match(r"\S+mine\.toml, line \d+: figures\[\d\]", str(refused.value))
    assert "\n" not in str(refused.value)


def test_models_have_clusters_and_variants():
    """A node type goes by the paper's name; a name without options is each number of chunks; sizes rise."""
    suite = load_suite("lancet")
    experiment = next(e for e in suite.experiments if e.name == "end-to-end")
    lists = lists_of(experiment)
    assert lists["cluster"] == ("a100", "v100")
    assert lists["size"] == ("1x8", "2x8", "4x8", "8x8")
    assert variants(experiment) == ("tutel",)
    stands = [system for system in experiment.systems if stands_for("tutel", system, experiment)]
    assert stands == ["tutel+degree=1", "tutel+degree=2", "tutel+degree=4", "tutel+degree=8"]


def test_a_figure_of_routing_rules_has_no_times(tmp_path):
    """They have no axes; not_drawn says so."""
    suite = load_suite("hetu")
    gates = next(e for e in suite.experiments if e.kind == "gate")
    assert lists_of(gates) == {}
