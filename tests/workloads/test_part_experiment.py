"""Experiments of parts in suite files: read, written again, and refused with file, line and key."""

import json

import pytest

from moebench.results.plain import from_plain, to_plain
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from moebench.workloads.load_suite import check_suite
from moebench.workloads.part import PARTS, SIZES, PartWorkload, StudyWorkload, workload_of
from moebench.workloads.suite import PartReading, Suite
from tests.moebench.part_suite import TEXT, written
from tests.moebench.task_suite import TEXT as TASKS
from tests.moebench.task_suite import written as task_suite


def test_it_is_read_and_survives_a_run_file(tmp_path):
    """Grids in order, systems of all of them; one reading where the file has none."""
    suite = load_suite(written(tmp_path))
    dispatch, _, gradients = suite.experiments
    assert dispatch.parts[0].sizes == {"top_k": (1, 2, 8)}
    assert dispatch.systems == ("all-to-all", "all-gather", "reduce-scatter")
    assert gradients.readings == (PartReading("as printed", {}),)
    again = from_plain(Suite, json.loads(json.dumps(to_plain(suite))))
    assert again == suite
    check_suite(again, "run.json: suite")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('part = "dispatch"', 'part = "despatch"', r"unknown part 'despatch' \(did you mean dispatch\?\)"),
        ("top_k = [1, 2, 8]", "topk = [1]", r"unknown size of part dispatch 'topk' \(did you mean top_k\?\)"),
        ("top_k = [1, 2, 8]", "", r"part dispatch has no top_k under reading '16,384 tokens'; it takes tokens, d_mod"),
        ("tokens = 16384 }", "steps = 3 }", "unknown size of reading '16,384 tokens' 'steps'"),
        ('models = ["mixtral-8x7b"]', "models = []", r"part ag\+scatter\+groupedgemm needs models"),
        ('"mixtral-8x7b", "deep', '"mixtral-8x8b", "deep', r"models: unknown model with a decoder 'mixtral-8x8b'"),
        ("8,192 tokens", "16,384 tokens", "two readings have the same name"),
        ('baseline = "serial"', 'baseline = "eager"', "unknown baseline 'eager'"),
        (', baseline = "serial"', "", "kind = 'part-speedup' needs a baseline"),
        ('"serial", "fused"]', '"serial", "serial"]', r"part qkv\+a2a: the same system or model stands there twice"),
        ("tokens = 8192, prod", "tokens = -1, prod", "greater than or equal to 0"),
    ],
)
def test_a_fault_is_told_with_its_place(tmp_path, old, new, words):
    """What is wrong, and what there is."""
    assert old in TEXT
    with pytest.raises(InputError, match=words) as told:
        load_suite(written(tmp_path, TEXT.replace(old, new, 1)))
    assert "parts.toml, line" in str(told.value)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[[512, 256, 128, 128]]", "[[512, 0]]", "task 2 has no samples: give it at least 1, or leave it out"),
        ("[[512, 256, 128, 128]]", "[[512, -3]]", "task 2 has no samples"),
        ("[[512, 256, 128, 128]]", "[[]]", "at least 1 item"),
        ("batches = [[512, 256, 128, 128]], ", "", "part task-step has no batches under reading 'small'"),
        ("batches = [64, 32, 32]", "batches = [64, 0]", "task 2 has no samples"),
        ('dtype = "fp32"', 'dtype = "fp8"', "unknown dtype of part task-step 'fp8'"),
    ],
)
def test_a_fault_in_tasks_is_told_with_its_place(tmp_path, old, new, words):
    """Tasks without samples, no tasks, a dtype that the part has not."""
    assert old in TASKS
    with pytest.raises(InputError, match=words) as told:
        load_suite(task_suite(tmp_path, TASKS.replace(old, new, 1)))
    assert "tasks.toml, line" in str(told.value)


def test_batches_survive_a_run_file(tmp_path):
    """Of grids and of readings, with the dtype of a reading; equal ones stand together in names."""
    suite = load_suite(task_suite(tmp_path))
    again = from_plain(Suite, json.loads(json.dumps(to_plain(suite))))
    assert again == suite
    check_suite(again, "run.json: suite")
    assert suite.experiments[0].parts[0].batches == ((512, 256, 128, 128),)
    assert suite.experiments[0].readings[1].dtype == "fp32"
    sizes = {"d_model": 8, "layers": 1, "heads": 2, "positions": 4, "recomputed": 0}
    one = workload_of("task-step", sizes, batches=(512, 256, 128, 128))
    assert one.shape == "512-256-2x128-d8-l1-h2-p4-r0"
    assert one.columns["batches"] == "512/256/2x128"


def test_a_part_names_its_cases_and_fills_its_columns():
    """By the model and its sizes; what is studied is another kind of workload."""
    one = workload_of("ag+scatter+groupedgemm", {"tokens": 64, "products": 2, "steps": 3}, "mixtral-8x7b")
    assert one == PartWorkload("ag+scatter+groupedgemm", (("tokens", 64), ("products", 2)), "mixtral-8x7b")
    assert one.labels == (("ag+scatter+groupedgemm", "mixtral-8x7b-t64-p2"), ())
    assert one.columns["model"] == "mixtral-8x7b"
    assert (one.size("products"), one.columns["tokens"]) == (2, 64)
    assert one.problem(1) == "part ag+scatter+groupedgemm needs 2 ranks and more, not 1"
    assert workload_of("dispatch", {"tokens": -8, "d_model": 1, "top_k": 1}).problem(2).startswith("tokens = -8")
    sums = {"attention_mb": 1, "expert_mb": 1, "sent_percent": 100, "of_part": 0}
    assert workload_of("parameter-sync", sums).problem(2) is None
    too_much = workload_of("parameter-sync", sums | {"sent_percent": 900})
    assert too_much.problem(2) == "sent_percent = 900: must be at most 100"
    assert isinstance(workload_of("training", {"steps": 3}, "mixtral-8x7b"), StudyWorkload)


def test_every_part_says_what_it_takes():
    """Sizes that have a letter; its letters tell its shapes apart."""
    for name, part in PARTS.items():
        assert set(part.sizes) <= set(SIZES), name
        assert len({SIZES[size] for size in part.sizes}) == len(part.sizes), name
