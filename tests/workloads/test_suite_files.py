"""Suite files: the packaged ones say what they should, and every fault is one line."""

import re

import numpy as np
import pytest

from moebench.systems.registry import systems
from moebench.workloads.errors import InputError
from moebench.workloads.layer import GateSpec
from moebench.workloads.load import experts_for, gate_spec, load_suite, load_topology, suite_names
from tests.workloads.files import EXPERIMENT, LAYER, suite_text, written


def test_the_hetu_suite_is_the_papers_grid():
    """Gates x batch sizes x sizes of the layer of the authors' scripts, what is unknown swept."""
    overall, breakdown, exchange, *kernels, gates = load_suite("hetu").experiments
    assert gates.name == "gates"
    eight = ["switch", "gshard", "topk-2", "ktop1-2", "base", "hash", "sam-2", "dense-to-sparse"]
    assert [gate.label for gate in gates.gates[:8]] == eight
    assert (breakdown.name, breakdown.systems) == ("breakdown", overall.systems)
    assert [gate.label for gate in breakdown.gates] == ["switch"]
    assert exchange.name == "hierarchical-alltoall"
    assert {"4x8-titan-rtx", "8x8-titan-rtx", "8x4-rtx-2080-ti", "16x8-ndm-a100-v4"} <= set(exchange.topologies)
    assert (min(exchange.payloads_bytes), max(exchange.payloads_bytes)) == (2**10, 2**30)
    assert [e.name for e in kernels] == ["topk-kernel", "layout-transform"]
    assert overall.name == "overall"
    assert {name.partition("+")[0] for name in overall.systems} == set(systems()) - {"reference"}
    papers = ["switch", "gshard", "topk", "ktop1", "base", "hash", "sam", "dense-to-sparse"]
    assert [gate.name for gate in overall.gates] == papers
    assert overall.batch_sizes == (8, 16, 32, 64)
    assert overall.sizes == ("1x8", "2x8", "4x8", "8x8")
    assert overall.node_types[0] == "titan-rtx"
    assert {"v100-pcie", "rtx-2080-ti"} < set(overall.node_types)
    layer = overall.layer
    assert (layer.d_model, layer.d_ffn, layer.sequence) == (2048, 2048, 1024)
    assert (layer.dtype, layer.capacity_factor, layer.activation) == ("fp32", 1.0, "relu")
    assert layer.input_gradient == (True, False)
    assert [experts_for(layer.experts[0], world) for world in (8, 16, 32, 64)] == [16, 16, 32, 64]
    assert overall.conventions == ("common", "as-shipped")


def test_smoke_has_every_system_and_gate():
    """Tiny sizes of a described machine."""
    [tiny] = load_suite("smoke").experiments
    assert {"reference", "deepspeed", "deepspeed_sparse", "hetumoe"} <= set(tiny.systems)
    assert {gate.name for gate in tiny.gates} == {"switch", "gshard", "topk"}
    assert tiny.layer.d_model <= 128


@pytest.mark.parametrize("name", ["hetu", "smoke"])
def test_every_topology_and_workload_of_a_suite_has_a_meaning(name):
    """Each node type has each size, experts divide by ranks, and k is at most the experts."""
    for experiment in (e for e in load_suite(name).experiments if e.kind == "layer"):
        for node_type in experiment.node_types:
            for size in experiment.sizes:
                ranks = load_topology(f"{size}-{node_type}").ranks
                for rule in experiment.layer.experts:
                    experts = experts_for(rule, ranks)
                    assert experts % ranks == 0
                    assert all(gate.top_k <= experts for gate in experiment.gates)


def test_a_suite_of_the_users(tmp_path):
    """By path; what is left out has the defaults of the schema."""
    suite = load_suite(str(written(tmp_path, suite_text())))
    [tiny] = suite.experiments
    assert (suite.name, suite.samples, suite.seed, suite.reported) == ("mine", 256, 0, None)
    assert tiny.gates == (GateSpec("switch", 1), GateSpec("topk", 2))
    assert tiny.conventions == ("common",)
    assert tiny.layer.input_gradient == (True,)
    assert tiny.layer.routing.kind == "iid"
    assert suite.source_path == str(tmp_path / "mine.toml")


def test_a_rule_for_experts_may_be_a_number(tmp_path):
    """`experts = [16]` needs no quotes."""
    suite = load_suite(str(written(tmp_path, suite_text(layer=LAYER.replace('"max(4, world)"', "16")))))
    assert suite.experiments[0].layer.experts == ("16",)


def test_a_trace_is_found_beside_its_suite(tmp_path):
    """A relative path is read from the suite's folder."""
    layer = LAYER + '[experiments.layer.routing]\nkind = "trace"\npath = "routes.npz"\n'
    path = written(tmp_path, suite_text(layer=layer))
    with pytest.raises(InputError, match=r"mine\.toml, line \d+: .*routing\.path: .*routes\.npz is not there"):
        load_suite(str(path))
    (tmp_path / "routes.npz").write_text("no archive")
    with pytest.raises(InputError, match=r"routes\.npz is not a NumPy \.npz file"):
        load_suite(str(path))
    np.savez(tmp_path / "routes.npz", logits=np.zeros((4, 4)))
    suite = load_suite(str(path))
    assert suite.experiments[0].layer.routing.path == str(tmp_path / "routes.npz")


def test_a_gate_label_names_its_choices():
    """The name alone has the gate's own k."""
    assert gate_spec("switch") == GateSpec("switch", 1)
    assert gate_spec("gshard") == GateSpec("gshard", 2)
    assert gate_spec("topk-4") == GateSpec("topk", 4)
    assert gate_spec("topk-4").label == "topk-4"
    with pytest.raises(InputError, match=r"unknown gate 'swich' \(did you mean switch\?\)"):
        gate_spec("swich")
    with pytest.raises(InputError, match="unknown gate 'topk-0'"):
        gate_spec("topk-0")
    with pytest.raises(InputError, match="unknown gate 'topk-9999999'"):
        gate_spec("topk-9999999")


@pytest.mark.parametrize("label", ["switch-3", "switch-1", "gshard-3"])
def test_a_gate_of_a_fixed_k_takes_no_number(label):
    """Its name would be that of the usual gate, and two cases would share it."""
    with pytest.raises(InputError, match=f"unknown gate '{label}': [a-z]+ takes no number; topk does, such as topk-"):
        gate_spec(label)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('gates = ["switch", "topk-2"]', 'gates = ["swich"]', "unknown gate 'swich' (did you mean switch?)"),
        ('gates = ["switch", "topk-2"]', 'gates = ["topk", "topk-2"]', "the same gate stands there twice"),
        ('gates = ["switch", "topk-2"]', "gates = []", "at least 1"),
        ('gates = ["switch", "topk-2"]', 'gates = ["switch-3"]', "switch takes no number"),
        ("d_model = 64", f"d_model = {10**30}", "1048576"),
        ("d_ffn = 64", "d_ffn = 2000000", "less than or equal to 1048576, got 2000000"),
        ("sequence = 16", "sequence = 10000000000", "less than or equal to 16777216"),
        ("batch_sizes = [1]", "batch_sizes = [10000000]", "less than or equal to 1048576"),
        ("d_ffn = 64", "d_ffn = 64\ncapacity_factor = 1e300", "less than or equal to 1000"),
        ('"max(4, world)"', '"1000000*world"', "gives 1000000 experts on 1 rank; at most 65536"),
        ('"max(4, world)"', "100000", "gives 100000 experts on 1 rank; at most 65536"),
        ('"max(4, world)"', f'"{"9" * 5000}"', "is not understood"),
        ('sizes = ["1x2"]', f'sizes = ["1x{"9" * 5000}"]', "is not a size"),
        ("d_model = 64", f"d_model = {'9' * 5000}", "cannot be read"),
        ("d_model = 64", f"d_model = {'[' * 3000}", "is nested too deeply"),
        ('metric = "step_time"', 'metric = "speed"', "unknown metric 'speed'; choose one of: step_time"),
        ("[experiments.layer]", '[experiments.figure]\nkind = "pie"\nbaseline = "reference"\n[experiments.layer]',
         "unknown figure 'pie'; choose one of: breakdown, speedup"),
        ("[experiments.layer]", '[experiments.figure]\nkind = "speedup"\nbaseline = "tutel"\n[experiments.layer]',
         "unknown baseline 'tutel'; choose one of: reference"),
        ("[experiments.layer]", '[experiments.figure]\nkind = "speedup"\ncolour = "red"\n[experiments.layer]',
         "unknown key 'colour'"),
        ("batch_sizes = [1]", "batch_sizes = [-1]", "greater than or equal to 0, got -1"),
        ("batch_sizes = [1]", 'batch_sizes = ["1"]', "valid integer, got '1'"),
        ("batch_sizes = [1]", "batch_size = [1]", "unknown key 'batch_size' (did you mean batch_sizes?)"),
        ('systems = ["reference"]', 'systems = ["tutel+degree"]', "'tutel+degree' is not a system"),
        ('sizes = ["1x2"]', 'sizes = ["1x0"]', "'1x0' is not a size"),
        ('sizes = ["1x2"]', "", "missing key sizes"),
        ("d_model = 64", "d_model = 0", "greater than or equal to 1, got 0"),
        ("d_model = 64", "d_model = true", "valid integer, got True"),
        ("d_ffn = 64", 'd_ffn = 64\ndtype = "fp31"', "unknown dtype 'fp31'"),
        ("d_ffn = 64", "d_ffn = 64\ncapacity_factor = nan", "finite number"),
        ("d_ffn = 64", "d_ffn = 64\ncapacity_factor = 0", "greater than 0, got 0"),
        ("d_ffn = 64", 'd_ffn = 64\nactivation = "tanh"', "choose one of: gelu, relu, swiglu"),
        ('"max(4, world)"', '"world - 1"', "experts rule 'world - 1' is not understood"),
        ('"max(4, world)"', "1.5", "1.5 is neither a rule in quotes nor a number"),
        ("sequence = 16", 'sequence = 16\nrouting.kind = "trace"', "path is the recorded file of kind = 'trace'"),
        ("sequence = 16", 'sequence = 16\nrouting.kind = "random"', "unknown routing 'random'"),
        ('paper = "none"', 'paper = "none"\nsamples = 0', "greater than or equal to 1, got 0"),
        ('paper = "none"', 'paper = "none"\nreported = "../etc"', "'../etc' is not reported numbers: a name"),
        ("batch_sizes = [1]", 'batch_sizes = [1]\nconventions = ["usual"]', "unknown conventions 'usual'"),
        ("batch_sizes = [1]", 'batch_sizes = [1]\nsweep_gates = ["gshard"]', "unknown sweep gate 'gshard'"),
    ],
)
def test_a_fault_in_a_suite_is_one_line(tmp_path, old, new, told):
    """File, key and what is allowed."""
    text = suite_text()
    assert old in text
    path = written(tmp_path, text.replace(old, new))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}.*{re.escape(told)}") as caught:
        load_suite(str(path))
    assert "\n" not in str(caught.value)


def test_two_experiments_of_one_name_are_refused(tmp_path):
    """Case names would clash."""
    path = written(tmp_path, suite_text() + EXPERIMENT + LAYER)
    with pytest.raises(InputError, match="two experiments are named 'tiny'"):
        load_suite(str(path))


def test_the_line_of_a_fault_in_the_second_experiment(tmp_path):
    """Arrays of tables are counted."""
    text = suite_text() + EXPERIMENT.replace('"tiny"', '"other"') + LAYER.replace("d_model = 64", "d_model = -1")
    path = written(tmp_path, text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if row == "d_model = -1")
    with pytest.raises(InputError, match=rf"line {line}: experiments\[1\]\.layer\.d_model: .*got -1"):
        load_suite(str(path))


def test_what_a_suite_has_not_built_says_what_it_would_take(tmp_path):
    """By experiment or claim; an experiment that is there needs nothing."""
    suite = load_suite(str(written(tmp_path, suite_text() + '[needs]\nlarge = "a cluster"\n')))
    assert suite.needs == {"large": "a cluster"}
    with pytest.raises(InputError, match="needs says what 'tiny' would take, and the suite has that experiment"):
        load_suite(str(written(tmp_path, suite_text() + '[needs]\ntiny = "a cluster"\n')))


def test_unknown_suite_lists_what_there_is():
    """With the nearest name first."""
    known = "choose one of: hetu, kernels, lancet, megascale, moesys, smoke"
    with pytest.raises(InputError, match=rf"unknown suite 'hettu' \(did you mean hetu\?\); {known}"):
        load_suite("hettu")
    assert {"hetu", "smoke"} <= set(suite_names())
