"""The report as a file: self-contained, small, escaped, and saying what the rows say."""

import json
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moebench.claims.scoreboard import scoreboard
from moebench.report.claims_view import counts_table
from moebench.report.figures import map_figure, speedup_figure
from moebench.report.html import write_report
from moebench.report.render import render
from moebench.report.style import SERIES, figure_style, standalone, svg_of, themed
from moebench.report.view import page
from moebench.results.store import RunFolder

HOSTILE = "<script>alert(1)</script>\"'\n\u202egnp.exe"


@pytest.fixture(scope="module")
def view(run_folder):
    """What the report's template shows, worked out once more than for the report itself."""
    return page(run_folder)


def test_report_is_one_small_file_without_addresses(report):
    """At most 5 MB, nothing loaded from anywhere: the only addresses are the namespaces of SVG."""
    text = report.read_text(encoding="utf-8")
    assert report.stat().st_size < 5e6
    loaded = re.findall(r'(?:src|href)="([^"#][^"]*)"', text)
    assert [address for address in loaded if not address.startswith(("data:", "#"))] == []
    assert "Content-Security-Policy" in text
    assert "default-src 'none'" in text
    assert "@import" not in text


def test_report_bytes_depend_on_the_run_alone(view, report):
    """Worked out twice, the report is the same."""
    assert render("report", view).encode() == report.read_bytes()


def test_report_says_what_the_scoreboard_says(run_folder, view):
    """Every judged claim stands with its verdict, value and reason; every other one with what it needs."""
    cards = {card["id"]: card for card in view["claims"]}
    others = {row[0]: row for row in view["not_run"].rows}
    for score in scoreboard(run_folder.suite, run_folder):
        if score.obtained is None:
            assert others[score.claim.id][-1].rstrip(".").lower() == score.why.lower()
        else:
            card = cards[score.claim.id]
            assert card["verdict"] == score.verdict
            assert float(card["obtained"].rstrip("x")) == pytest.approx(score.obtained, rel=0.01)
    assert len(cards) + len(others) == len(scoreboard(run_folder.suite, run_folder))


def test_many_claims_are_counted_by_experiment_and_verdict(run_folder):
    """Each column adds up to the claims of that verdict; few claims are only listed."""
    scores = scoreboard(run_folder.suite, run_folder)
    assert counts_table(scores, {}).rows == []
    counted = counts_table(4 * scores, {"overall": "All gates"})
    assert {row[0] for row in counted.rows} > {"All gates"}
    for verdict in {score.verdict for score in scores}:
        place = list(counted.columns).index(verdict)
        assert sum(int(row[place] or 0) for row in counted.rows) == 4 * sum(s.verdict == verdict for s in scores)


def test_numbers_lead_to_their_rows(run_folder, report):
    """Every link has its target; the row of a case says in which lines of the results file its rows stand."""
    text = report.read_text(encoding="utf-8")
    ids = set(re.findall(r'id="?([^"\s>]+)', text))
    links = re.findall(r'href="#([^"]+)"', text)
    assert set(links) <= ids
    rows = run_folder.results.read_text().splitlines()
    listed = re.findall(r"<tr id=(c[0-9a-f]{8})><th scope=row>([^<]*)<td.*?<td class=n>(\d+)–(\d+)</tr>", text)
    assert {anchor for anchor, *_ in listed} >= {link for link in links if re.fullmatch("c[0-9a-f]{8}", link)}
    for _, case, first, last in listed[:: len(listed) // 10]:
        own = {number for number, row in enumerate(rows, 1) if f'"case": "{case}"' in row}
        assert own == set(range(int(first), int(last) + 1))
    claim = text[text.index('id="claim-hetu-h1"') :]
    assert "overall/switch/b32/1x8-titan-rtx/e16/hetumoe</a>" in claim[: claim.index("</li>")]


def test_breakdown_adds_up_to_the_step(view):
    """The regions of each bar, the host's waiting included, are the step time of the case's row."""
    figures = {f.title: f for e in view["experiments"] for f in e["figures"]}
    named = [title for title in figures if title.startswith("Where the time goes")]
    places = [f"{nodes}x8-titan-rtx/e{max(16, 8 * nodes)}" for nodes in (1, 4, 8)]
    assert [title.partition("b32/")[2] for title in named] == places  # the claim's own point is one of them
    for table in (figures[title].table for title in named):
        assert len(table.columns) == 1 + 3
        for column in range(1, len(table.columns)):
            *parts, total = [float(row[column].replace(",", "").replace("–", "0")) for row in table.rows]
            assert sum(parts) == pytest.approx(total, rel=0.01)


def test_hostile_names_are_escaped(view):
    """Text that came from a file stays text."""
    first, *rest = view["experiments"]
    figures = [
        replace(figure, finding=HOSTILE, svg=themed('<svg viewBox="0 0 1 1"></svg>', HOSTILE, HOSTILE, "x"))
        for figure in first["figures"]
    ]
    names = dict.fromkeys(("title", "headline", "command"), HOSTILE)
    text = render("report", {**view, **names, "experiments": [{**first, "figures": figures}, *rest]})
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text


def test_a_report_may_be_drawn_once(run_folder, view, tmp_path):
    """In half the time, for a first look: the same figures without the narrow ones, and the page says so."""
    scores = scoreboard(run_folder.suite, run_folder)
    text = write_report(run_folder, tmp_path / "once.html", scores, for_phones=False).read_text(encoding="utf-8")
    whole = render("report", view)
    assert text.count('class="once"') == whole.count('class="wide"') == whole.count('class="narrow"') > 0
    assert 'class="narrow"' not in text
    assert "drawn once here" in text
    assert "drawn once here" not in whole


def test_unfinished_run_says_so(run_folder, tmp_path):
    """A report of a run that was interrupted names how many cases it has."""
    part = tmp_path / "part"
    part.mkdir()
    record = json.loads((run_folder.path / "run.json").read_text())
    record["finished"] = None
    (part / "run.json").write_text(json.dumps(record))
    lines = run_folder.results.read_text().splitlines(keepends=True)
    (part / "results.jsonl").write_text("".join(lines[: len(lines) // 2]))
    text = write_report(RunFolder.open(part)).read_text()
    assert "unfinished" in text


def test_run_without_any_row_has_a_report(run_folder, tmp_path):
    """Nothing obtained is not an error: every claim says what it needs."""
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "run.json").write_bytes((run_folder.path / "run.json").read_bytes())
    assert "what it would need" in write_report(RunFolder.open(empty)).read_text()


def test_figures_draw_what_is_missing_as_text():
    """A point without a number is named where it would be; no bar is invented."""
    points = pd.DataFrame(
        [
            {"gate": "switch", "batch_size": 8, "size": "1x8", "value": 2.0, "low": 1.5, "high": 2.5, "note": ""},
            {"gate": "switch", "batch_size": 16, "size": "1x8", "value": None, "low": None, "high": None,
             "note": "baseline out of memory"},
        ]
    )  # fmt: skip
    svg = speedup_figure(points, pd.DataFrame(columns=["gate", "batch_size", "value", "label"]), "speedup")
    assert "baseline out of memory" in " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", svg))
    conditions = pd.DataFrame(
        [{"label": "only", "group": "gpu", "median": float("nan"), "low": None, "high": None, "note": "no ratio"}]
    )
    assert "no ratio" in map_figure(conditions, 8.1, 1.0, "speedup")


def test_colours_become_variables_or_light_values():
    """No sentinel colour is left on a page or in a file."""
    svg = f'<svg viewBox="0 0 10 10" xmlns="http://www.w3.org/2000/svg"><path id="a" style="fill: {SERIES[0]}"/></svg>'
    assert SERIES[0] not in themed(svg, "t", "d", "k")
    first, second = (re.findall(r'<path id="(\w+-a)"', themed(svg, "t", "d", key)) for key in ("k", "l"))
    assert len({*first, *second}) == 2  # several figures share a page
    assert "#0072b2" in standalone(svg)


def test_a_drawing_says_each_style_once():
    """Ids that nothing refers to go, digits too fine to see, and styles that occur often become classes of one name."""
    import matplotlib.pyplot as plt

    def drawn(hatch):
        with figure_style():
            figure, axis = plt.subplots()
            axis.bar(range(6), np.arange(6) + 1 / 3, color=SERIES[0], hatch=hatch)
            return svg_of(figure)

    plain, hatched = drawn(""), drawn("///")
    assert "figure_1" not in plain
    assert not re.search(r"\d\.\d{3}", plain)
    [name] = set(re.findall(rf"\.(s\w+){{fill: {SERIES[0]}", plain))
    assert plain.count(f'class="{name}"') == 6
    referred = set(re.findall(r"url\(#([^)]+)", hatched))
    assert referred
    assert all(f'id="{name}"' in hatched for name in referred)
    assert hatched.count('style="fill: url(#') == 6  # a pattern is the figure's own


def test_every_column_has_its_name_on_a_narrow_page(report):
    """Beside each cell, from the table's own style; a name is text whatever it holds."""
    text = report.read_text(encoding="utf-8")
    tables = re.findall(r'<table class="sortable" style="([^"]*)"><thead><tr>(.*?)</tr></thead>', text, re.S)
    rules = set(re.findall(r"content: var\((--c\d+)\)", text))
    assert tables
    for style, heads in tables:
        names = re.findall(r"(--c\d+):", style)
        assert len(names) == heads.count("<th ")
        assert {*names} <= rules
