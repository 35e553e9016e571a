"""The examples of workloads/README.md are files that load."""

import re
from pathlib import Path

import pytest

import moebench.workloads
from moebench.cases.plan import Filters, plan
from moebench.workloads.load import load_suite
from moebench.workloads.validate import validate
from tests.workloads.files import SUITE_HEAD, written

README = Path(moebench.workloads.__file__).parent / "README.md"
EXAMPLES = re.findall(r"```toml\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
KINDS = ("hardware", "topology", "suite", "kernels", "exchanges", "gates", "parts")


@pytest.mark.parametrize(("kind", "text"), list(zip(KINDS, EXAMPLES, strict=True)), ids=KINDS)
def test_an_example_is_valid(tmp_path, kind, text):
    """As a reader would paste it; experiments of kernels, exchanges, rules and parts into a suite."""
    if kind in ("kernels", "exchanges", "gates", "parts"):
        kind, text = "suite", SUITE_HEAD + text
    assert f": {kind}" in validate(written(tmp_path, text))


def test_the_suite_runs_all_that_it_lists(tmp_path):
    """Every size, node type, batch size, gate and experts rule of the example has cases, as many as the text says."""
    suite = load_suite(str(written(tmp_path, EXAMPLES[KINDS.index("suite")])))
    (experiment,) = suite.experiments
    cases = plan(suite, Filters())
    assert {case.size for case in cases} == set(experiment.sizes)
    assert {case.assumptions["gpu"] for case in cases} == set(experiment.node_types)
    assert {case.assumptions["experts"] for case in cases} == set(experiment.layer.experts)
    assert {case.workload.gate for case in cases} == set(experiment.gates)
    assert experiment.figure["baseline"] in experiment.systems
    swept = sum(not case.is_default for case in cases)
    told = " ".join(README.read_text(encoding="utf-8").split())
    assert f"has {len(cases)} cases: {len(cases) - swept} under the defaults, {swept} of `topk-2`" in told
