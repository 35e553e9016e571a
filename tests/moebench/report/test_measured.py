"""What was measured on ranks, in the report: what a processor set is shown and compared with nothing."""

import json
from pathlib import Path

import pytest

from moebench.cases.plan import Filters
from moebench.cli.explain import command as explain
from moebench.report.experiment_view import experiment_view
from moebench.report.steps import steps_of
from moebench.report.view import page
from moebench.results.rows import CPU_BOUND, row_of
from moebench.results.table import table_of
from moebench.run import begin, prepare
from moebench.workloads.load import load_suite

SYSTEMS = ("deepspeed", "hetumoe")


@pytest.fixture
def measure(tmp_path):
    """`measure(hetumoe_ms, deepspeed_ms, bound)`: a folder of rows of two systems, those of `bound` cpu-bound."""

    def measured(times_ms, bound=(), regions_ms=()):
        filters = Filters(experiments=("overall",), gates=("switch",), batch_sizes=(8,), systems=SYSTEMS, quick=True,
                          topologies=("1x8-titan-rtx",))  # fmt: skip
        job = begin(prepare(load_suite("hetu"), filters, "cluster"), tmp_path / "run")
        rows = []
        for case in job.cases:
            value = times_ms[case.system] / 1e3
            detail = {"mark": CPU_BOUND} if case.system in bound else {}
            reason = f"{CPU_BOUND}: all cores were busy" if detail else ""
            interval = {"low": 0.9 * value, "high": 1.1 * value}
            rows.append(row_of(case, "hw", "step_time", "s", value, **interval, reason=reason, detail=detail))
            for region, ms in dict(regions_ms).get(case.system, {}).items():
                rows.append(row_of(case, "hw", "region_time", "s", ms / 1e3, detail={"region": region}))
        with job.folder.writing() as append:
            append(rows)
        return job.folder, table_of(rows)

    return measured


def view_of(folder, frame):
    """The section of the only experiment."""
    [experiment] = [e for e in folder.suite.experiments if e.name == "overall"]
    return experiment_view(folder, experiment, frame, [])


REGIONS = {"deepspeed": {"gate": 3.0, "exchange": 17.0}, "hetumoe": {"gate": 1.0, "exchange": 9.0}}


def test_measured_speedups_have_the_interval_of_their_parts(measure):
    """A ratio is as sure as both of its times; the caption says what it is."""
    view = view_of(*measure({"deepspeed": 20.0, "hetumoe": 10.0}, regions_ms=REGIONS))
    [speedup, breakdown] = view["figures"]
    assert speedup.table.rows[0][6:8] == ["2.00x", "1.64x to 2.44x"]
    assert "what the 95 % intervals of both step times leave possible" in speedup.caption
    assert "of the draws" not in speedup.caption
    assert "10.0 ms more than hetumoe" in view["answer"]
    assert breakdown.table.rows[-1] == ["step", "20.0", "10.0"]


@pytest.mark.parametrize("bound", [("hetumoe",), ("deepspeed",), SYSTEMS])
def test_what_a_processor_set_is_compared_with_nothing(measure, bound):
    """No speedup, no finding and no breakdown from it; the table of cases has it, with the reason."""
    view = view_of(*measure({"deepspeed": 20.0, "hetumoe": 10.0}, bound, REGIONS))
    speedup = view["figures"][0]
    [row] = speedup.table.rows
    assert row[4:8] == ["20.0", "10.0", "–", ""]
    assert row[-1] == f"{' and '.join(bound)} {CPU_BOUND}"
    assert speedup.finding.startswith("There is no point at which both")
    assert not any(name in view["answer"] for name in bound)
    assert "more than" not in view["answer"]
    shown = {row[0].rpartition("/")[2]: row for row in view["cases"].rows}
    assert [shown[name][1] for name in SYSTEMS] == ["20.0", "10.0"]
    assert all((CPU_BOUND in shown[name][-1]) == (name in bound) for name in SYSTEMS)


def test_regions_that_took_longer_than_the_step_say_so(measure):
    """Timed one by one; what they add up to stands beside the step, and they explain no other difference."""
    regions = {"deepspeed": {"exchange": 18.0, "grad-sync": 20.0}, "hetumoe": {"exchange": 18.0, "grad-sync": 3.0}}
    folder, frame = measure({"deepspeed": 20.0, "hetumoe": 18.0}, regions_ms=regions)
    breakdown = view_of(folder, frame)["figures"][-1]
    assert breakdown.table.rows[-2:] == [["all regions", "38.0", "21.0"], ["step", "20.0", "18.0"]]
    assert "timed one by one" in breakdown.caption
    assert breakdown.finding.endswith("timed apart, differ by 17.0 ms and don't say where.")
    steps = steps_of(folder, list(frame["case"].unique()))
    assert {name: step.regions_s["host"] for name, step in steps.items()} == {"deepspeed": 0.0, "hetumoe": 0.0}


def test_the_page_says_how_its_engine_measures(measure):
    """And nothing of engines that were not used."""
    folder, _ = measure({"deepspeed": 20.0, "hetumoe": 10.0})
    said = " ".join(page(folder)["reading"])
    assert "Engine cluster: " in said
    assert CPU_BOUND in said
    assert "Engine sim" not in said


def test_a_list_of_cases_marks_them(measure, capsys):
    """For people and for scripts."""
    folder, _ = measure({"deepspeed": 20.0, "hetumoe": 10.0}, ("hetumoe",))
    explain.main([str(Path(folder.path)), "--json"], standalone_mode=False)
    marks = {entry["name"].rpartition("/")[2]: entry.get("mark") for entry in json.loads(capsys.readouterr().out)}
    assert marks == {"deepspeed": None, "hetumoe": CPU_BOUND}
    explain.main([str(Path(folder.path))], standalone_mode=False)
    assert f"{CPU_BOUND} 10.000 ms" in capsys.readouterr().out
