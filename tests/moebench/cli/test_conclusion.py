"""What a run prints at its end, and how its progress is told where there is no terminal."""

from dataclasses import replace
from pathlib import Path

import pytest

from moebench.cases.plan import Filters, plan
from moebench.cli.conclusion import alarms
from moebench.cli.progress import ProgressBar, Share
from moebench.cli.step_table import BOUND, print_times, step_times
from moebench.results.rows import CPU_BOUND, row_of
from moebench.results.store import RunFolder
from moebench.workloads.load import load_suite


@pytest.fixture(scope="module")
def cases():
    """Two points, four systems."""
    return plan(load_suite("smoke"), Filters(gates=("switch",), batch_sizes=(1,), topologies=("1x2", "1x4")))


def rows(cases, **times):
    """Step times in ms by system; None where it runs out of memory."""
    found = []
    for case in cases:
        ms = times.get(case.system, 9.0)
        status = "out-of-memory" if ms is None else "passed"
        found.append(row_of(case, "hw", "step_time", "s", None if ms is None else ms / 1e3, status=status))
    return found


def test_step_times_stand_side_by_side(cases):
    """A line a point, a column a system, the fastest marked, and a word where there is no number."""
    columns, lines = step_times(cases, rows(cases, deepspeed=None, hetumoe=1.25, reference=1234.5))
    assert columns == ["point", "reference", "deepspeed", "deepspeed_sparse", "hetumoe"]
    assert [line[0] for line in lines] == ["tiny/switch/b1/1x2-titan-rtx/e4", "tiny/switch/b1/1x4-titan-rtx/e4"]
    assert [cell.strip() for cell in lines[0][1:]] == ["1,234", "out-of-memory", "9", "1.25*"]


def test_what_does_not_count_is_not_the_fastest(cases):
    """A number that a processor set is shown with its mark; single samples are not shown."""
    found = rows(cases, hetumoe=1.0)
    found = [replace(r, detail={"mark": CPU_BOUND}) if r.system == "hetumoe" else r for r in found]
    found += [replace(r, sample=0, value=1e-9) for r in found]
    _, lines = step_times(cases, found)
    assert lines[0][-1].strip() == f"{CPU_BOUND} 1"
    assert lines[0][1].strip() == "9*"
    found = [replace(r, detail={"mark": CPU_BOUND}) if r.system != "reference" else r for r in rows(cases)]
    assert step_times(cases, found)[1][0][1].strip() == "9"  # the fastest of one


def test_what_does_not_count_is_explained(cases, capsys):
    """Below the table, once; not where every number counts."""
    found = rows(cases)
    print_times(cases, found, "runs/x")
    assert BOUND not in capsys.readouterr().out
    print_times(cases, [replace(r, detail={"mark": CPU_BOUND}) for r in found], "runs/x")
    assert capsys.readouterr().out.count(BOUND) == 1


def test_names_too_long_for_the_width_are_told_above(cases, capsys, monkeypatch):
    """What all share once; letters where that is not enough; a width that takes the names keeps them."""
    named = {"reference": "keep=all", "deepspeed": "attention=tp+keep=all", "hetumoe": "attention=sp+keep=all"}
    own = [replace(case, system=f"a-system+{named[case.system]}") for case in cases if case.system in named]
    shown = {}
    for width in (120, 90, 50):
        monkeypatch.setenv("COLUMNS", str(width))
        print_times(own, rows(own), "runs/x")
        _, *shown[width] = capsys.readouterr().out.splitlines()
    assert shown[120][0].split()[1:] == [f"a-system+{options}" for options in named.values()]
    assert shown[90][0] == "a-system+keep=all, with:"
    assert shown[90][1].split()[1:] == ["nothing", "else", "attention=tp", "attention=sp"]
    assert shown[50][:3] == [f"{letter} = a-system+{options}" for letter, options in zip("ABC", named.values())]
    assert shown[50][3].split() == ["point", "A", "B", "C"]
    assert all([line[:5] for line in lines[-2:]] == ["tiny/"] * 2 for lines in shown.values())


def test_experiments_of_other_systems_have_tables_of_their_own(cases, capsys):
    """No empty columns; those of the same systems share one."""
    few = [replace(case, experiment="few") for case in cases if case.system in ("reference", "hetumoe")]
    more = [replace(case, experiment="more") for case in cases]
    every = [*cases, *few, *more]
    print_times(every, rows(every), "runs/x")
    headings = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("point")]
    assert headings == [["point", "reference", "deepspeed", "deepspeed_sparse", "hetumoe"],
                        ["point", "reference", "hetumoe"]]  # fmt: skip


def test_engines_and_regimes_are_kept_apart(cases):
    """Simulated and measured, cold and hot: lines of their own."""
    found = rows(cases[:4])
    for regime in ("hot", "cold"):
        found += [replace(r, engine="local", detail={"regime": regime}) for r in rows(cases[:4])]
    columns, lines = step_times(cases, found)
    assert columns[1] == "engine"
    told = [(line[0].partition(" ")[2], line[1]) for line in lines]
    assert told == [("", "sim"), ("(hot)", "local"), ("(cold)", "local")]


def test_a_run_of_ones_own_suite_shows_its_step_times(fake, moebench, in_folder):
    """Without a paper the table is the answer; many points are counted, with the way to list them."""
    (in_folder / "mine.toml").write_text(Path(load_suite("smoke").source_path).read_text())
    said = moebench("run", "--suite", "mine.toml", "--out", "out")
    assert said.out.count("tiny/") == 18
    assert "*" in said.out
    said = moebench("run", "--suite", "smoke", "--set", "nic.bandwidth=9GB/s", "--gate", "switch", "--out", "changed")
    assert said.out.startswith("what if nic.bandwidth=9GB/s\n")
    said = moebench("run", "--suite", "hetu", "--quick", "--out", "many")
    assert "110 points, 330 cases: `moebench explain many` lists their collective times" in said.out
    assert "us a call (nominal machine in sim, * the fastest):" in said.out
    assert said.out.count("topk-kernel/") == 8
    cases = RunFolder.open(Path("many")).record["cases"]
    assert len(moebench("explain", "many").out.splitlines()) == 1 + cases


def test_a_wrong_system_is_told_last_and_loudly(fake, moebench, in_folder, monkeypatch):
    """The last lines name system and reason; the exit status stays 0, since the run ran."""
    from types import SimpleNamespace

    def check(cases):
        for case in cases:
            wrong = case.system == "hetumoe"
            yield SimpleNamespace(status="wrong" if wrong else "passed", reason="differs by 0.3" if wrong else "")

    monkeypatch.setattr("moebench.run._check", lambda: check)
    said = moebench("run", "--suite", "smoke", "--gate", "switch", "--out", "out")
    assert said.status == 0
    last = said.err.splitlines()[-1]
    assert last.startswith("!! hetumoe is WRONG: it does not compute what the reference computes. 6 cases without")
    assert last.endswith("differs by 0.3")
    assert "wrong" in said.out


def test_alarms_are_counted_by_system_and_reason(cases):
    """One line each; what is unsupported or out of memory is no alarm."""
    found = rows(cases, deepspeed=None)
    assert alarms(found) == []
    found = [replace(r, status="failed", reason="killed", value=None) if r.system == "reference" else r for r in found]
    (line,) = alarms(found)
    assert "reference is FAILED" in line
    assert "2 cases" in line


@pytest.mark.parametrize("total", [1, 3, 10, 19, 100, 816])
def test_redirected_progress_is_ten_lines_at_most(capsys, total):
    """The last line says that all is done."""
    with ProgressBar() as bar:
        bar.phase("engine sim", total)
        for _ in range(total):
            bar.step("x")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == min(total, 10)
    assert lines[-1] == f"engine sim: {total}/{total}"


def test_redirected_calibration_tells_its_progress(capsys):
    """A line at each tenth, whatever the steps."""
    with Share("calibrating") as share:
        for step in range(1, 38):
            share(step / 37)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "calibrating: 100 %"
