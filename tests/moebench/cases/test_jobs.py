"""Planning of jobs: readings, node types, filters, refusals, and what a suite's file may say."""

from dataclasses import replace

import pytest

from moebench.cases.jobs import job_of, refusal, together, workload_of
from moebench.cases.plan import Filters, Machines, plan
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite, load_topology

SUITE = '''
schema_version = 1
title = "Own"
paper = "none"
samples = 8

[[experiments]]
kind = "job"
name = "layouts"
title = "Layouts"
question = "Which one?"
metric = "throughput"
systems = ["megascale", "megatron_modern"]
models = ["mixtral-8x7b"]
sizes = ["2x8", "4x8"]
node_types = ["h800", "h20"]

[[experiments.readings]]
name = "one"
global_batches = [16, 32]
stages = [2]

[[experiments.readings]]
name = "two"
global_batches = [32]
stages = [1]
layers = [8]
instead = { megascale = "megascale+keep=all" }
'''


@pytest.fixture
def own(tmp_path):
    """Loads the suite with some text of it replaced."""
    def load(*pairs):
        text = SUITE
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "own.toml"
        path.write_text(text)
        return load_suite(str(path))

    return load


def test_readings_times_places_times_systems(own):
    """The first reading on the first node type is the default; batches by size; another system under a reading."""
    found = plan(own(), Filters())
    assert len(found) == 2 * 2 * 2 * 2
    default = [case for case in found if case.is_default]
    assert {(case.topology, job_of(case).global_batch) for case in default} == {("2x8-h800", 16), ("4x8-h800", 32)}
    assert {case.system for case in found if case.assumptions["reading"] == "two"} == {
        "megascale+keep=all", "megatron_modern"
    }  # fmt: skip
    assert {job_of(case).decoder.layers for case in found} == {32, 8}
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert "layouts/mixtral-8x7b/b32/2x8-h20/pp1/l8/megascale+keep=all" in names


def test_filters_narrow_and_quick_has_the_defaults(own):
    """By system, options too, batch size, node type; another topology takes a batch in proportion."""
    suite = own()
    assert {case.system for case in plan(suite, Filters(systems=("megascale+overlap=none",)))} == {
        "megascale+overlap=none"
    }
    assert {job_of(case).global_batch for case in plan(suite, Filters(batch_sizes=(16,)))} == {16}
    assert all(case.is_default for case in plan(suite, Filters(quick=True)))
    elsewhere = plan(suite, Filters(topologies=("8x8-h100",)))
    assert {job_of(case).global_batch for case in elsewhere} == {64, 32}
    with pytest.raises(InputError, match="unknown system 'tutel'"):
        plan(suite, Filters(systems=("tutel",)))
    with pytest.raises(InputError, match="no case is left"):
        plan(suite, Filters(experiments=("layouts",), systems=("megascale",), batch_sizes=(16,), topologies=("4x8",)))


def test_cases_with_the_same_micro_batches_go_together(own):
    """Whatever their batch and machine; other systems and layouts go apart."""
    found = plan(own(), Filters())
    assert len({together(case) for case in found}) == 4


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("stages = [2]", "stages = [3]", "stages = 3: world = 16 ranks can't be divided among them"),
        ("stages = [1]", "stages = [1, 2]", "stages has 2 numbers, there are 1 models"),
        ("[16, 32]", "[16, 32, 64]", "global_batches has 3 numbers, there are 2 sizes"),
        ('name = "two"', 'name = "one"', "two readings are named 'one'"),
        ("mixtral-8x7b", "mixtral-8x8b", r"unknown model 'mixtral-8x8b' \(did you mean mixtral-8x22b|mixtral-8x7b"),
        ('"megatron_modern"', '"megatron_modern+tensor=3"', "unknown tensor of system megatron_modern '3'"),
        ("{ megascale =", "{ raf =", "unknown system of reading two 'raf'"),
        ('metric = "throughput"', 'metric = "speed"', "unknown metric 'speed'"),
        ("layers = [8]", "layers = [8]\nskew = 9.0", "skew: input should be less than or equal to 4"),
        ("layers = [8]", "layers = [8192]", "layers.*: input should be less than or equal to 4096"),
        ('"h800", "h20"', '"h800", "h900"', r"own.toml: experiment layouts: unknown topology '2x8-h900'"),
        ("layers = [8]", "layers = [7]\nchunks = 2", "layers = 7 can't be divided among stages = 1 with chunks = 2"),
    ],
)
def test_bad_input_is_one_clear_error(own, old, new, told):
    """File or experiment, key, and what is allowed."""
    with pytest.raises(InputError, match=told):
        plan(own((old, new)), Filters())


def test_real_ranks_run_no_whole_job(own):
    """A reason, before anything is started."""
    case = plan(own(), Filters())[0]
    status, reason = refusal(case, load_topology("2x8-h800"))
    assert status == "unsupported"
    assert "composed" in reason


def test_plain_models_are_their_sizes():
    """What the layer does not express is left out; the model's own layers stay where nothing cuts them."""
    suite = load_suite("megascale")
    experiment = next(one for one in suite.experiments if one.name == "parallelism-strategy")
    for model in experiment.models:
        workload = workload_of(experiment, experiment.readings[0], model, "1x8")
        assert workload.decoder.not_expressed == ()
        assert workload.decoder.layers == 4
    whole = replace(experiment, plain=False)
    assert workload_of(whole, experiment.readings[0], "phi-3.5-moe", "1x8").decoder.not_expressed
    assert Machines()("1x8-h800").ranks == 8


def test_a_paper_sets_up_all_of_its_models_alike(own):
    """Vocabulary and positions of an experiment stand in place of the models' own; without them these stay."""
    line = 'node_types = ["h800", "h20"]\n'
    (first, *_) = plan(own((line, line + "vocabulary = 65536\nsequence = 2048\n")), Filters())
    (plain, *_) = plan(own(), Filters())
    assert (first.workload.decoder.vocabulary, first.workload.decoder.sequence) == (65536, 2048)
    assert replace(first.workload.decoder, vocabulary=32000, sequence=8192) == plain.workload.decoder


def test_megascale_has_its_papers_vocabulary_and_positions():
    """65,536 words and 8,192 positions, of every model in every experiment that the paper has."""
    jobs = [one for one in load_suite("megascale").experiments if one.kind == "job"]
    found = [workload_of(one, one.readings[0], model, one.sizes[0]).decoder for one in jobs for model in one.models]
    assert {(one.vocabulary, one.sequence) for one in found} == {(65536, 8192)}
