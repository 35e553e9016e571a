"""The page of many runs: a line a run, trends with their changes, runs that can't be read, names that are none."""

import re
from dataclasses import replace

import numpy as np

from moebench.compare.history import read_runs
from moebench.compare.trend import trend
from moebench.report.facts import Facts, facts_of
from moebench.report.index_view import index_page, write_index
from moebench.report.trend_lines import MOST_POINTS, trend_line
from tests.moebench.compare.support import case, change_record, exact_rows, pytest_file, write_run
from tests.moebench.report.hostile import TEXTS, complaints


def history(folder, values):
    """Simulated runs of two systems, one an hour, each of its own commit; the second system stays as it is."""
    for number, value in enumerate(values):
        write_run(
            folder / f"r{number}", [exact_rows(case(), step_time=value), exact_rows(case("two"))],
            git={"commit": f"{number:02d}" + "c" * 38, "changed": False},
            created=f"2026-11-01T{number:02}:00:00+00:00",
        )  # fmt: skip
    return folder


def page_of(folder):
    """The view of a folder."""
    return index_page(trend(read_runs(folder)), folder, folder / "index.html")


def test_a_line_a_run_with_its_report(tmp_path):
    """Newest first, with suite, commit, machine, cases, claims as its own report counts them, and a link to it."""
    history(tmp_path, [1e-3, 1e-3])
    (tmp_path / "r1" / "report.html").write_text(
        '<!doctype html>\n<meta name="moebench" content="{&#34;verdicts&#34;: {&#34;reproduced&#34;: 1}}">'
    )
    assert facts_of(tmp_path / "r1") == Facts({"reproduced": 1})
    first, second = page_of(tmp_path)["runs"].rows
    assert first[:4] == ["2026-11-01 01:00", str(tmp_path / "r1"), "smoke", "01ccccccccccc"]
    assert first[4].startswith("Test CPU, 2 cores")
    assert first[5:] == ["2", "1 reproduced", "report"]
    assert first[-1].address == "r1/report.html"
    assert second[-2:] == ["", "no report"]


def test_changes_stand_by_run_by_series_and_in_the_trends(tmp_path):
    """Up at run 2: in the summary, in a line for the run, in the system's panel, in the table of changes."""
    view = page_of(history(tmp_path, [1e-3, 1e-3, 2e-3, 2e-3]))
    assert view["lead"][1] == "Of 2 series, the newest change of each: 1 slower."
    assert [row[:3] for row in view["steps"].rows] == [["2026-11-01 02:00", "01cccccccccc..02cccccccccc", "1"]]
    (group,) = view["groups"]
    (panel,) = group["panels"]
    assert (panel["title"], panel["changes"], panel["range"]) == ("tiny, one", "1 slower", "-29 % to +41 %")
    assert group["constant"] == ["tiny, two (1)"]
    (change,) = view["changes"].rows
    assert change[3:6] == ["1.00 ms", "2.00 ms", "+100 %"]


def test_every_kind_of_folder_has_a_page(tmp_path):
    """None, unfinished runs only, a damaged one, files of pytest-benchmark: each is named, and nothing raises."""
    assert page_of(tmp_path)["lead"] == ["There is no run here."]
    write_run(tmp_path / "part", [exact_rows(case())], finished=False)
    (write_run(tmp_path / "torn", [exact_rows(case())]) / "run.json").write_text("{")
    write_run(tmp_path / "empty", [])
    pytest_file(tmp_path / "p.json", {"x": [1e-3] * 5})
    view = page_of(tmp_path)
    assert {row[1].rpartition("/")[2] for row in view["runs"].rows} == {"part (not finished)", "empty", "p.json"}
    assert len(view["left_out"]) == 1
    write_index(trend(read_runs(tmp_path)), tmp_path, tmp_path / "index.html")
    assert "not a JSON document" in (tmp_path / "index.html").read_text()


def test_edited_files_are_shown_as_they_are_or_left_out(tmp_path):
    """Hostile texts in any field that a page shows, numbers that are none: text, or a reason."""
    for number, text in enumerate(TEXTS):
        path = write_run(tmp_path / f"r{number}", [exact_rows(case())], created=f"2026-11-01T{number:02}:00:00+00:00")
        change_record(path, lambda record, text=text: record["suite"].update(name=text))
        change_record(path, lambda record, text=text: record["environment"].update(cpu=text, git={"commit": text}))
        (path / "report.html").write_text(f'<meta name="moebench" content="{text}">')
    for number, value in enumerate(("NaN", "Infinity", "1e999", '"0.002"')):
        bad = write_run(tmp_path / f"bad{number}", [exact_rows(case())]) / "results.jsonl"
        bad.write_text(bad.read_text().replace('"value": 0.002', f'"value": {value}'))
    write_index(trend(read_runs(tmp_path)), tmp_path, tmp_path / "index.html")
    text = (tmp_path / "index.html").read_text()
    assert complaints(text) == []
    assert len(page_of(tmp_path)["left_out"]) == 4


def test_a_long_line_is_thinned_and_keeps_its_peaks():
    """Of thousands of points as many as can be seen, the lowest and the highest among them; gaps are no points."""
    values = np.ones(5_000)
    values[1234], values[4321], values[17] = 3.0, 0.5, np.nan
    svg = trend_line(values, {2500: "slower"}, "label")
    ys = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", re.search(r'd="M([^"]*)"', svg)[1])]
    assert len(ys) <= MOST_POINTS + 2
    assert (min(ys), max(ys)) == (6, 50)
    assert 'class="m bad"' in svg
    assert trend_line(np.array([np.nan]), {}, "") == ""


def test_lines_with_changes_are_drawn_before_others(tmp_path, monkeypatch):
    """Where there is no room for all, those that only vary go first; how many is said."""
    monkeypatch.setattr("moebench.report.index_view.MOST_PANELS", 1)
    history(tmp_path, [1e-3, 1e-3, 2e-3])
    found = trend(read_runs(tmp_path))
    found.changes[:] = [change for change in found.changes if change.series.key.case.endswith("one")]
    (two,) = [series for series in found.history.series if series.key.case.endswith("two")]
    two.points[0] = replace(two.points[0], value=1.0)
    view = index_page(found, tmp_path, tmp_path / "index.html")
    assert [panel["title"] for group in view["groups"] for panel in group["panels"]] == ["tiny, one"]
    assert view["panels_left_out"] == 1
