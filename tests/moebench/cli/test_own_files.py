"""Files of the user's own in any folder: found by name with --workloads, by path, and judged by their own numbers."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from moebench.workloads.places import VARIABLE
from tests.workloads.files import SUITE_HEAD, hardware_text, suite_text, topology_text, written

FORMATS = (Path(__file__).parents[3] / "docs/formats.md").read_text(encoding="utf-8")
CLAIMS = """id,experiment,metric,relation,system,baseline,config,value,unit,evidence,where,note
ours-1,tiny,step_speedup,equal,hetumoe,reference,gate=switch,20,ratio,secondary,our notes,
ours-2,tiny,step_speedup,equal,hetumoe,reference,gate=switch,3,ratio,secondary,our notes,
"""


@pytest.fixture
def workloads(in_folder):
    """A folder with one file of each kind, each naming the others by name."""
    folder = in_folder / "my"
    written(folder / "hardware", hardware_text(), "our-gpu.toml")
    written(folder / "topologies", topology_text().replace('"titan-rtx"', '"our-gpu"'), "our-node.toml")
    written(folder / "reported", CLAIMS, "our-paper.csv")
    text = suite_text(head=SUITE_HEAD + 'reported = "our-paper"\n').replace("titan-rtx", "our-node")
    written(folder / "suites", text.replace('["reference"]', '["reference", "hetumoe"]'), "ours.toml")
    return folder


def blocks(language):
    """The page's examples in a language."""
    return re.findall(rf"```{language}\n(.*?)```", FORMATS, flags=re.S)


def test_a_folder_of_ones_own_is_found_by_name(moebench, workloads):
    """Suite, node type, hardware and claims, by every verb; afterwards nothing of it is left."""
    for kind, name in (("suites", "ours"), ("hardware", "our-gpu"), ("claims", "ours-1")):
        listed = json.loads(moebench("--workloads", workloads, "list", kind, "--json").out)
        assert name in {entry["name"] for entry in listed}
    said = moebench("--workloads", workloads, "run", "--suite", "ours", "--dry-run")
    assert said.status == 0
    assert "1x2-our-node" in said.out
    assert VARIABLE not in os.environ
    assert "unknown suite 'ours'" in moebench.refused("run", "--suite", "ours")


def test_a_run_is_judged_by_the_users_own_numbers_wherever_it_goes(fake, moebench, workloads):
    """Reported beside obtained; once the user's files are gone, by the run's own copy, resumed too."""
    said = moebench("--workloads", "my", "run", "--suite", "ours", "--out", "out")
    assert said.status == 0
    verdicts = {s["id"]: s["verdict"] for s in json.loads(moebench("claims", "out", "--json").out)}
    assert verdicts == {"ours-1": "reproduced", "ours-2": "direction only"}
    for path in workloads.rglob("*.csv"):
        path.unlink()
    again = {s["id"]: s["verdict"] for s in json.loads(moebench("claims", "out", "--json").out)}
    assert again == verdicts
    assert moebench("run", "--resume", "out").status == 0


def test_numbers_may_lie_beside_the_suite(fake, moebench, workloads):
    """`reported = "./ours.csv"` is read from the suite's folder, whatever the working folder is."""
    suite = workloads / "suites/ours.toml"
    suite.write_text(suite.read_text().replace('"our-paper"', '"../reported/our-paper.csv"'))
    moebench("--workloads", "my", "run", "--suite", suite, "--out", "out")
    assert {s["id"] for s in json.loads(moebench("claims", "out", "--json").out)} == {"ours-1", "ours-2"}
    (workloads / "reported/our-paper.csv").write_text(CLAIMS.replace("3,ratio", "three,ratio"))
    said = moebench.refused("--workloads", "my", "run", "--suite", suite, "--out", "again")
    assert "our-paper.csv, line 3, column value: 'three' is not a number" in said
    assert not Path("again").exists()


@pytest.mark.parametrize(
    ("folder", "words"),
    [("nowhere", "--workloads: no folder"), ("my/suites", "has none of the folders hardware/, topologies/, suites/")],
)
def test_a_folder_without_meaning_is_refused(moebench, workloads, folder, words):
    """Before the verb runs."""
    assert words in moebench.refused("--workloads", folder, "list", "suites")


def test_one_name_twice_is_refused(moebench, workloads):
    """In two folders of the user's; and moebench's own names are taken."""
    written(workloads.parent / "other/topologies", topology_text(), "our-node.toml")
    both = ("--workloads", "my", "--workloads", "other")
    assert "have the same name; rename one" in moebench.refused(*both, "run", "--suite", "ours", "--dry-run")
    written(workloads.parent, CLAIMS, "hetu.csv")
    suite = workloads / "suites/ours.toml"
    suite.write_text(suite.read_text().replace('"our-paper"', '"../../hetu.csv"'))
    said = moebench.refused("--workloads", "my", "run", "--suite", "ours", "--dry-run")
    assert "hetu is the name of a paper of moebench's own; rename the file" in said


def test_validate_takes_many_files_and_names_each_fault(moebench, workloads):
    """A line for what is valid, one on standard error for each that is not, status 2."""
    np.savez(workloads / "good.npz", logits=np.zeros((6, 3), np.float32), about="nothing")
    np.savez(workloads / "bad.npz", logits=np.array([[0.0], [np.inf]]))
    np.savez(workloads / "other.npz", weights=np.zeros(3))
    (workloads / "no.npz").write_text("text")
    good = [workloads / "good.npz", workloads / "reported/our-paper.csv", workloads / "hardware/our-gpu.toml"]
    said = moebench("validate", *good)
    assert said.status == 0
    assert "good.npz: recorded routing, 6 tokens, 3 experts; nothing" in said.out
    assert [entry["kind"] for entry in json.loads(moebench("validate", *good, "--json").out)] == [
        "recorded routing", "reported numbers", "hardware"
    ]  # fmt: skip
    bad = [workloads / f"{name}.npz" for name in ("bad", "other", "no", "missing")]
    said = moebench("validate", *good, *bad)
    assert (said.status, len(said.out.splitlines())) == (2, 3)
    for words, line in zip(
        ("logits, row 1: not all finite", "has no array `logits` of shape [tokens, experts]; it has weights",
         "not a NumPy .npz file", "no such file"), said.err.splitlines(), strict=True,
    ):  # fmt: skip
        assert words in line
    assert moebench("validate", *good, *bad, "--json").out == ""


def test_a_recorded_routing_that_can_not_serve_is_refused_before_the_run(moebench, workloads):
    """Too few tokens, another number of experts: file, experiment and numbers."""
    np.savez(workloads / "mine.npz", logits=np.zeros((16, 4), np.float32))
    suite = written(
        workloads, suite_text() + 'routing = { kind = "trace", path = "./mine.npz" }\n', "traced.toml"
    )
    assert "needs 32 tokens in all, the recorded routing" in moebench.refused("validate", suite)
    np.savez(workloads / "mine.npz", logits=np.zeros((32, 5), np.float32))
    assert "experts = 4, the recorded routing" in moebench.refused("run", "--suite", suite, "--dry-run")


def test_the_examples_of_the_page_are_valid(moebench, in_folder):
    """Model, suites, the routing that its Python writes, the suite with it, and the claims."""
    model, suite, jobs, parts, layer = blocks("toml")
    (numbers,), (python,) = blocks("csv"), blocks("python")
    exec(python, {})
    experiment = suite_text(layer="").replace('["switch", "topk-2"]', '["topk-2"]') + layer
    files = [
        written(in_folder, model, "our-model.toml"),
        written(in_folder, suite, "ours.toml"),
        written(in_folder, jobs, "jobs.toml"),
        written(in_folder, parts, "parts.toml"),
        in_folder / "my-routing.npz",
        written(in_folder, experiment, "traced.toml"),
        written(in_folder, numbers, "mine.csv"),
    ]
    said = moebench("validate", *files)
    assert said.err == ""
    kinds = [line.partition(": ")[2].partition(",")[0].partition(" ")[0] for line in said.out.splitlines()]
    assert kinds == ["model", "suite", "suite", "suite", "recorded", "suite", "reported"]
