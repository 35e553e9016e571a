"""The report's section of kernels: every call with its distance from the floor, and what a simulated time is worth."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moebench.claims.scoreboard import scoreboard
from moebench.report.html import write_report
from moebench.report.kernel_figures import kernel_figure
from moebench.report.kernel_view import experiment_view
from moebench.report.style import SERIES
from moebench.report.view import METRICS, page
from moebench.results.store import RunFolder
from moebench.results.table import table, table_of


@pytest.fixture(scope="module")
def view(kernel_folder):
    """The section of the layout transform."""
    return section(kernel_folder, "layout-transform", table(kernel_folder, *METRICS))


def section(folder, name, frame):
    experiment = next(e for e in folder.suite.experiments if e.name == name)
    return experiment_view(folder, experiment, frame, scoreboard(folder.suite, folder))


def rows_of(folder, metric, **columns):
    return [r for r in folder.rows(metric) if all(getattr(r, k) == value for k, value in columns.items())]


def test_a_figure_an_operator_with_the_data_behind_it(kernel_folder, view):
    """Times over the floor of each operator; its table has every call of the device with the numbers of the rows."""
    floors = [figure for figure in view["figures"] if " against " not in figure.title]
    assert [figure.title for figure in floors] == ["layout", "layout_inverse"]
    lines = {(row[0], row[1]): row for row in floors[0].table.rows}
    calls = rows_of(kernel_folder, "kernel_time", experiment="layout-transform", op="layout")
    assert len(lines) == len(calls)
    for call in calls:
        assert lines[call.shape, call.system][2].replace(",", "") == (
            "out-of-memory" if call.value is None else _three(call.value * 1e6)
        )
    (ratio,) = rows_of(kernel_folder, "floor_ratio", case=calls[0].case)
    assert lines[calls[0].shape, calls[0].system][5] == f"{_three(ratio.value)}x"


def _three(value):
    from moebench.report.parts import number

    return number(value).replace(",", "")


def test_a_summary_stands_above(view):
    """A line an operator and implementation, medians over the shapes."""
    (summary,) = view["tables"]
    assert {row[0] for row in summary.rows} == {"layout, forward", "layout_inverse, forward"}
    assert {"triton", "hetu", "tutel", "deepspeed"} <= {row[1] for row in summary.rows}


def test_it_says_what_a_simulated_time_is_worth(kernel_folder, view):
    """No reader takes a declared number for a measured one."""
    assert any("no claim about a kernel is judged by it" in caveat for caveat in view["caveats"])
    frame = table_of([replace(row, engine="local") for row in kernel_folder.rows(*METRICS)])
    told = section(kernel_folder, "layout-transform", frame)["caveats"]
    assert not any("Simulated" in caveat for caveat in told)
    assert any("Measured" in caveat for caveat in told)


def test_a_measured_device_comes_first(kernel_folder):
    """Where a run has both, the figures show what was measured; hot, and cold in the table of cases."""
    simulated = kernel_folder.rows(*METRICS)
    here = {"engine": "local", "topology": "1x1-here", "hardware": "here"}
    local = [
        replace(row, **here, detail={"regime": regime}, case=f"here/{row.case}")
        for row in simulated
        for regime in ("hot", "cold")
    ]
    told = section(kernel_folder, "topk-kernel", table_of([*simulated, *local]))
    assert "here (measured)" in told["answer"]
    assert len(told["figures"][0].table.rows) == 24
    assert sum(row[0].endswith("(cold)") for row in told["cases"].rows) == 24


def test_speedups_carry_what_is_reported(view, kernel_folder):
    """Against the figure's baseline; the claim's number is drawn where the claim is about that operator."""
    told = {figure.title: figure for figure in view["figures"]}
    assert "reported 1.26x" in told["layout against tutel"].svg
    assert "reported" not in told["layout_inverse against tutel"].svg
    topk = section(kernel_folder, "topk-kernel", table(kernel_folder, *METRICS))
    assert any("reported 1.25x" in figure.svg for figure in topk["figures"])


def test_what_has_no_point_says_why_in_the_figure(view):
    """Dense masks at 32 sequences do not fit into 24 GB: the note stands where the mark would."""
    layout = view["figures"][0]
    assert "deepspeed out-of-memory" in layout.svg
    assert "deepspeed is out-of-memory at" in layout.finding


def test_the_page_holds_kernels(kernel_folder, tmp_path):
    """Written as a file, with the claims that need a GPU among those not run."""
    text = write_report(kernel_folder, tmp_path / "report.html").read_text(encoding="utf-8")
    assert 'id="experiment-topk-kernel"' in text
    assert "Needs times measured on a GPU" in text
    rows = {row[0]: row for row in page(kernel_folder)["not_run"].rows}
    assert "hetumoe-topk moves" in rows["hetu-h5"][-1]


def test_rows_without_any_number_still_make_a_section(kernel_folder):
    """Everything unsupported: a section that says so, and no crash."""
    bare = [
        replace(row, value=None, low=None, high=None, draws=(), status="unsupported", reason="no GPU")
        for row in kernel_folder.rows("kernel_time")
    ]
    told = section(kernel_folder, "topk-kernel", table_of(bare))
    assert told["answer"] == ""
    assert "has a number here" in told["figures"][0].finding
    assert all(row[1] == "unsupported" for row in told["cases"].rows)


@pytest.mark.parametrize("narrow", [False, True])
def test_colours_belong_to_implementations(narrow):
    """The same one in every figure, whoever else is drawn; a row a shape, a panel a direction."""
    points = pd.DataFrame(
        {
            "shape": ["t8", "t16", "t8"],
            "direction": ["forward", "forward", "backward"],
            "implementation": ["triton", "triton", "triton"],
            "value": [1.5, 2.0, np.nan],
            "low": [1.2, 1.9, np.nan],
            "high": [1.9, 2.2, np.nan],
            "note": ["", "", "unsupported"],
        }
    )
    svg = kernel_figure(points, "time over the floor", ("torch", "triton"), {"reported 1.25x": 1.25}, narrow)
    assert SERIES[1] in svg
    assert SERIES[0] not in svg
    for text in ("t8", "t16", "forward", "backward", "triton unsupported", "reported 1.25x"):
        assert text in svg


def test_the_rows_of_a_run_folder_hold_kernels_and_layers(kernel_folder):
    """Columns of kernels are in the file, those of layers left out."""
    folder = RunFolder.open(kernel_folder.path)
    line = json.loads(folder.results.read_text().splitlines()[0])
    assert {"op", "shape", "direction", "tokens"} <= set(line)
    assert not {"gate", "batch_size", "input_gradient"} & set(line)
