import gzip
import json
import re

import pytest

from moebench.cases.plan import Filters
from moebench.cli import main
from moebench.results.rows import row_of
from moebench.run import begin, prepare, resume
from moebench.sim.engine import trace_key
from moebench.trace.serialise import programs_to_json
from moebench.workloads.load import load_suite
from tests.moebench.sim.sim_machines import ProgramBuilder, all_to_all


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of two systems on one point, with hand-made programs in place of recorded ones."""
    filters = Filters(
        systems=("deepspeed", "hetumoe"),
        gates=("switch",),
        batch_sizes=(8,),
        topologies=("1x8-titan-rtx",),
        quick=True,
    )
    ready = prepare(load_suite("hetu"), filters)
    job = begin(ready, tmp_path_factory.mktemp("run") / "run")
    job.folder.traces.mkdir()
    for case in job.cases:
        builder = ProgramBuilder(0, 8)
        if case.system == "deepspeed":
            builder.product(8192, 2048, 8192, region="dispatch")
        builder.wait(builder.start(all_to_all(range(8), 10**6)))
        builder.product(2048, 2048, 2048)
        path = job.folder.traces / f"{trace_key(case, job.topologies[case.topology])}.json.gz"
        path.write_bytes(gzip.compress(programs_to_json([builder.program()]).encode()))
    return job.folder.path


def moebench(capsys, *arguments):
    """Run the command line; returns exit status, standard output, standard error."""
    with pytest.raises(SystemExit) as left:
        main([str(a) for a in arguments])
    return left.value.code, *capsys.readouterr()


def test_explain_one_case(run_folder, capsys):
    """Sentences, then regions and operators."""
    status, out, _ = moebench(capsys, "explain", run_folder, "deepspeed", "--top", 1)
    assert status == 0
    assert "overall/switch/b8/1x8-titan-rtx/e16/deepspeed takes " in out
    assert "aten::bmm  dispatch, forward" in out
    assert "3 operators more: --top 4 lists all" in out


def test_a_row_that_other_code_made_is_told(run_folder, capsys):
    """With what it says and how far off that is; an equal one is not."""
    _, out, _ = moebench(capsys, "explain", run_folder, "deepspeed", "--json")
    step_s = json.loads(out)["step_s"]
    job = resume(run_folder)
    case = next(case for case in job.cases if case.system == "deepspeed")
    for value, is_told in ((step_s, False), (1.25 * step_s, True)):
        path = run_folder / "results.jsonl"
        kept = path.read_text() if path.exists() else ""
        with job.folder.writing() as append:
            append([row_of(case, "titan-rtx", "step_time", "s", value)])
        _, one, _ = moebench(capsys, "explain", run_folder, "deepspeed")
        _, both, _ = moebench(capsys, "explain", run_folder, "deepspeed", "hetumoe")
        path.write_text(kept)
        for out in (one, both):
            said = " ".join(out.split())  # where lines break depends on the folder's name
            assert ("(+25.00%): it was made with other code than explains it here" in said) is is_told


def test_explain_two_cases(run_folder, capsys):
    """What one does that the other doesn't."""
    status, out, _ = moebench(capsys, "explain", run_folder, "deepspeed", "hetumoe")
    assert status == 0
    assert "times as long as hetumoe" in out
    assert "Only deepspeed runs operators worth" in out
    assert "not run" in out


@pytest.mark.parametrize("width", [80, 90, 100])
@pytest.mark.parametrize("cases", [("deepspeed",), ("deepspeed", "hetumoe")])
def test_a_narrow_output_drops_columns_and_breaks_no_name(run_folder, capsys, monkeypatch, width, cases):
    """COLUMNS holds in a pipe too; operators stay whole, and what was left out is named."""
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = moebench(capsys, "explain", run_folder, *cases)
    assert max(map(len, out.splitlines())) <= width
    assert re.search(r"^aten::bmm  ?(in )?dispatch, forward ", out, re.MULTILINE)
    assert ("left out here: compute" in out) == (len(cases) == 1)
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = moebench(capsys, "explain", run_folder, *cases)
    assert "left out" not in out


def test_without_a_case_the_cases_are_listed(run_folder, capsys):
    """Names to copy, and what became of them."""
    status, out, _ = moebench(capsys, "explain", run_folder)
    assert status == 0
    assert out.splitlines()[1].split() == [
        "overall/switch/b8/1x8-titan-rtx/e16/deepspeed", "sim", "not", "run", "yet",
    ]  # fmt: skip
    _, out, _ = moebench(capsys, "explain", run_folder, "--json")
    assert [entry["name"].rpartition("/")[2] for entry in json.loads(out)] == ["deepspeed", "hetumoe"]


def test_explain_as_json(run_folder, capsys):
    """One document with the words and the numbers behind them."""
    status, out, _ = moebench(capsys, "explain", run_folder, "deepspeed", "hetumoe", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["words"][0].startswith("deepspeed takes")
    assert found["first"]["step_s"] > found["second"]["step_s"] > 0
    status, out, _ = moebench(capsys, "explain", run_folder, "hetumoe", "--json")
    assert {part["region"] for part in json.loads(out)["regions"]} == {"exchange", "experts"}


def test_trace_writes_a_timeline(run_folder, tmp_path, capsys):
    """A file that Perfetto opens."""
    status, out, _ = moebench(capsys, "trace", run_folder, "hetumoe", "-o", tmp_path / "t.json")
    assert (status, out.strip()) == (0, str(tmp_path / "t.json"))
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["otherData"]["case"] == "overall/switch/b8/1x8-titan-rtx/e16/hetumoe"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("explain", "nowhere", "x"), "no run here"),
        (("explain", "{run}", "nothing-like-it"), "no case matches 'nothing-like-it'; none of the 2 cases is near"),
        (("explain", "{run}", "switch"), "2 cases match 'switch'"),
        (("explain", "{run}", ""), "2 cases match ''"),
        (("explain", "{run}", "hetumoe", ""), "2 cases match ''"),
        (("trace", "{run}", "hetumoe", "-o", "{tmp}/missing/t.json"), "can't write"),
        (("trace", "{run}", "hetumoe"), "Missing option '-o'"),
    ],
)
def test_bad_input_says_what_is_wrong(run_folder, tmp_path, capsys, arguments, text):
    """Exit status 2, one line, nothing on standard output."""
    filled = [a.format(run=run_folder, tmp=tmp_path) for a in arguments]
    status, out, err = moebench(capsys, *filled)
    assert (status, out) == (2, "")
    assert text in err
