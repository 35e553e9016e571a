"""Model files, and suites that take their layers from one."""

import pytest

from moebench.cases.plan import Filters, plan
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_model, load_suite, model_names
from tests.workloads.files import EXPERIMENT, suite_text, written

MODEL = """schema_version = 1
title = "Ours"
source = "a test"
d_model = 96
d_ffn = 160
experts = 8
gate = "topk-3"
activation = "swiglu"
dtype = "bf16"
notes = ["One thing is left out."]
"""
LAYER = '\n[experiments.layer]\nmodel = "./ours.toml"\nsequence = 16\n'
NO_GATES = EXPERIMENT.replace('gates = ["switch", "topk-2"]\n', "")


def test_a_suite_takes_from_the_model_what_it_leaves_out(tmp_path):
    """Sizes, activation, dtype, experts and gate; what the model's layer has not stands among the caveats."""
    written(tmp_path, MODEL, "ours.toml")
    (experiment,) = load_suite(str(written(tmp_path, suite_text(NO_GATES, LAYER), "mine.toml"))).experiments
    layer = experiment.layer
    assert (layer.d_model, layer.d_ffn, layer.activation, layer.dtype) == (96, 160, "swiglu", "bf16")
    assert layer.experts == ("8",)
    assert [gate.label for gate in experiment.gates] == ["topk-3"]
    assert experiment.caveats == ("Ours: One thing is left out.",)


def test_what_the_suite_says_itself_wins(tmp_path):
    """Key by key; its cases are planned with both."""
    written(tmp_path, MODEL, "ours.toml")
    layer = LAYER + 'd_ffn = 32\nexperts = ["16"]\ndtype = "fp32"\n'
    suite = load_suite(str(written(tmp_path, suite_text(layer=layer), "mine.toml")))
    workloads = [case.workload for case in plan(suite, Filters())]
    assert {w.gate.label for w in workloads} == {"switch", "topk-2"}
    assert {(w.d_model, w.d_ffn, w.experts, w.dtype, w.activation) for w in workloads} == {
        (96, 32, 16, "fp32", "swiglu")
    }


@pytest.mark.parametrize("name", model_names())
def test_every_packaged_model_runs(tmp_path, name):
    """A suite with its layer plans a case on a node of eight GPUs, or as many as it has experts for."""
    layer = f'\n[experiments.layer]\nmodel = "{name}"\nsequence = 128\n'
    suite = load_suite(str(written(tmp_path, suite_text(NO_GATES.replace("1x2", "1x8"), layer), "mine.toml")))
    (case,) = plan(suite, Filters())
    assert case.workload.gate.label == load_model(name).gate


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("ours.toml", "theirs.toml"), r"mine.toml, line 16: experiments\[0\].layer.model: no model file .*theirs"),
        (("./ours.toml", "mixtrl-8x7b"), r"unknown model 'mixtrl-8x7b' \(did you mean mixtral-8x7b\?\)"),
        (('"./ours.toml"', "3"), "layer.model: 3 is no model; write a name or a path in quotes"),
    ],
)
def test_a_model_that_is_not_there_is_told(tmp_path, change, told):
    """File, line and key, and what there is."""
    written(tmp_path, MODEL, "ours.toml")
    with pytest.raises(InputError, match=told):
        load_suite(str(written(tmp_path, suite_text(NO_GATES, LAYER.replace(*change)), "mine.toml")))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("d_model = 96", "d_model = 0"), "line 4: d_model: .*greater than or equal to 1"),
        (('gate = "topk-3"', 'gate = "topk-9"'), "line 7: gate: top_k = 9 is above experts = 8"),
        (('gate = "topk-3"', 'gate = "tpk-3"'), "line 7: gate: unknown gate 'tpk'"),
        (('"swiglu"', '"silu"'), "line 8: activation: unknown activation 'silu'.*choose one of: gelu, relu, swiglu"),
        (("experts = 8", "expert = 8"), r"line 6: expert: unknown key 'expert' \(did you mean experts\?\)"),
        (('source = "a test"\n', ""), "missing key source"),
    ],
)
def test_a_fault_in_a_model_is_told(tmp_path, change, told):
    """One line with file, line, key and what is allowed."""
    with pytest.raises(InputError, match=told):
        load_model(str(written(tmp_path, MODEL.replace(*change), "ours.toml")))
