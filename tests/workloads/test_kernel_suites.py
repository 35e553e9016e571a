"""Experiments of kernels in suite files: what they mean, and faults in one line."""

import json
import re

import pytest

from moebench.results.plain import from_plain, to_plain
from moebench.workloads.errors import InputError
from moebench.workloads.load import load_suite
from moebench.workloads.load_suite import check_suite
from moebench.workloads.suite import KernelExperiment, Suite
from tests.workloads.files import SUITE_HEAD, suite_text, written

KERNELS = """
[[experiments]]
kind = "kernel"
name = "small"
title = "Small kernels"
question = "Do they load?"
metric = "kernel_time"
node_types = ["titan-rtx"]

[[experiments.kernels]]
op = "topk_gate"
implementations = ["torch", "triton"]
directions = ["forward", "backward"]
shapes = { tokens = [64, 128], experts = [4], top_k = [1, 2] }

[[experiments.kernels]]
op = "quantise_fp8"
implementations = ["reference", "torch"]
dtypes = ["bf16"]
variants = ["column"]
shapes = { tokens = [64], d_model = [256] }

[experiments.figure]
kind = "kernel-speedup"
baseline = "torch"
"""


def test_an_experiment_of_kernels_stands_beside_one_of_layers(tmp_path):
    """Each has its kind; what a file leaves out has the operator's usual value."""
    text = suite_text() + KERNELS
    layer, kernels = load_suite(str(written(tmp_path, text))).experiments
    assert (layer.kind, kernels.kind) == ("layer", "kernel")
    assert isinstance(kernels, KernelExperiment)
    gate, fp8 = kernels.kernels
    assert (gate.dtypes, gate.variants, gate.directions) == (("fp32",), ("",), ("forward", "backward"))
    assert gate.shapes == {"tokens": (64, 128), "experts": (4,), "top_k": (1, 2)}
    assert (fp8.dtypes, fp8.variants, fp8.directions) == (("bf16",), ("column",), ("forward",))
    assert kernels.sizes == ("1x1",)
    assert kernels.systems == ("torch", "triton", "reference")
    assert kernels.figure == {"kind": "kernel-speedup", "baseline": "torch"}


def test_a_suite_of_kernels_survives_a_run_folder(tmp_path):
    """run.json gives back the same suite, and checks it as a file."""
    suite = load_suite(str(written(tmp_path, SUITE_HEAD + KERNELS)))
    again = from_plain(Suite, json.loads(json.dumps(to_plain(suite))))
    assert again == suite
    check_suite(again, "run.json: suite")


def test_a_changed_run_file_is_refused(tmp_path):
    """An operator, a kind or an implementation that nobody has."""
    suite = load_suite(str(written(tmp_path, SUITE_HEAD + KERNELS)))
    data = to_plain(suite)
    data["experiments"][0]["kernels"][0]["implementations"] = ["cuda"]
    with pytest.raises(InputError, match=r"run\.json: suite\.experiments\.small\.implementations: .*'cuda'"):
        check_suite(from_plain(Suite, data), "run.json: suite")
    data["experiments"][0]["kind"] = "weather"
    told = r"experiments\[0\]\.kind: expected one of layer, kernel, .*, found 'weather'"
    with pytest.raises(ValueError, match=told):
        from_plain(Suite, data)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('kind = "kernel"\nname', 'kind = "kernels"\nname', "kind: unknown kind 'kernels' (did you mean kernel?)"),
        ('op = "topk_gate"', 'op = "topk_gat"', "op: unknown op 'topk_gat' (did you mean topk_gate?); choose"),
        ('"torch", "triton"]', '"torch", "tritn"]', "implementations: unknown implementation of topk_gate 'tritn'"),
        ('"torch", "triton"]', '"torch", "torch"]', "implementations: the same implementation stands there twice"),
        ("tokens = [64, 128]", "token = [64, 128]", "unknown dimension of topk_gate 'token' (did you mean tokens?)"),
        ("experts = [4], ", "", "shapes: missing key experts; topk_gate has tokens, experts, top_k"),
        ("top_k = [1, 2]", "top_k = [1, 8]", "top_k = 8 must be between 1 and experts = 4"),
        ("tokens = [64, 128]", "tokens = [-1]", "greater than or equal to 0, got -1"),
        ("tokens = [64, 128]", "tokens = []", "at least 1"),
        ('variants = ["column"]', 'variants = ["diagonal"]', "unknown variant of quantise_fp8 'diagonal'"),
        ('dtypes = ["bf16"]', 'dtypes = ["fp31"]', "unknown dtype of quantise_fp8 'fp31'"),
        ('dtypes = ["bf16"]', 'dtypes = ["bf16"]\ndirections = ["backward"]', "unknown direction of quantise_fp8"),
        ('metric = "kernel_time"', 'metric = "step_time"', "unknown metric 'step_time' (did you mean kernel_time?)"),
        ('node_types = ["titan-rtx"]', 'node_types = ["titan-rtx"]\nsizes = ["2x8"]', "unknown size '2x8'"),
        ('node_types = ["titan-rtx"]', 'node_types = ["titan-rtx"]\ngates = ["switch"]', "unknown key 'gates'"),
        ('baseline = "torch"', 'baseline = "tutel"', "unknown baseline 'tutel'; choose one of: reference"),
        ('title = "Small kernels"\n', "", "missing key title"),
    ],
)
def test_a_fault_is_one_line(tmp_path, old, new, told):
    """File, line, key and what is allowed."""
    text = SUITE_HEAD + KERNELS
    assert old in text
    path = written(tmp_path, text.replace(old, new, 1))
    with pytest.raises(InputError, match=f"^{re.escape(str(path))}.*{re.escape(told)}") as caught:
        load_suite(str(path))
    assert "\n" not in str(caught.value)


def test_a_fault_names_the_line_of_its_key(tmp_path):
    """Of the second kernel of the second experiment too."""
    text = suite_text() + KERNELS.replace("d_model = [256]", "d_modal = [256]")
    path = written(tmp_path, text)
    line = next(n for n, row in enumerate(text.splitlines(), 1) if "d_modal" in row)
    with pytest.raises(InputError, match=rf"line {line}: experiments\[1\]\.kernels\[1\]\.shapes\.d_modal: unknown"):
        load_suite(str(path))


def test_the_kernels_suite_covers_every_operator():
    """Forward everywhere; the sizes of the papers among the others."""
    suite = load_suite("kernels")
    from moebench.workloads.kernel import OPERATIONS

    grids = [grid for experiment in suite.experiments for grid in experiment.kernels]
    assert {grid.op for grid in grids} == set(OPERATIONS)
    assert all("forward" in grid.directions for grid in grids)
    hetu = next(e for e in load_suite("hetu").experiments if e.name == "topk-kernel")
    assert hetu.kernels[0].shapes["tokens"] == (8192, 16384, 32768, 65536)
    with_reference = [grid for grid in grids if "reference" in grid.implementations]
    assert {grid.op for grid in with_reference} >= {"topk_gate", "topk", "layout", "grouped_gemm", "quantise_fp8"}
    assert all(max(grid.shapes["tokens"]) <= 1024 for grid in with_reference)
