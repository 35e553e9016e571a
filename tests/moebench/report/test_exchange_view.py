"""The report's section of exchanges: maps, what claims would need, which can be right together."""

import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moebench.claims.evidence import Evidence
from moebench.claims.scoreboard import scoreboard
from moebench.claims.together import holdings
from moebench.report.exchange_figures import FASTER, SAME, SLOWER, condition_map, needs_figure, sign_of
from moebench.report.exchange_points import calls, crossing, speedups
from moebench.report.exchange_view import experiment_view
from moebench.report.render import render
from moebench.report.style import SERIES
from moebench.report.view import METRICS, page
from moebench.results.table import table


@pytest.fixture(scope="module")
def frame(exchange_folder):
    return table(exchange_folder, *METRICS)


@pytest.fixture(scope="module")
def scores(exchange_folder):
    return scoreboard(exchange_folder.suite, exchange_folder)


@pytest.fixture(scope="module")
def shown(exchange_folder):
    """The whole page, drawn once."""
    return page(exchange_folder)


@pytest.fixture(scope="module")
def view(shown):
    return shown["experiments"][0]


def small(frame):
    """Two topologies and three payloads of it: a section of few figures."""
    is_near = frame["topology"].isin(["4x8-titan-rtx", "8x8-titan-rtx"])
    return frame[is_near & frame["payload_bytes"].isin([2**10, 2**20, 2**30])]


def section(folder, frame, scores=()):
    """The section of some rows, without claims unless said."""
    [experiment] = folder.suite.experiments
    return experiment_view(folder, experiment, frame, scores)


def figures(view):
    return {figure.title: figure for figure in view["figures"]}


def test_a_map_has_the_ratio_of_every_two_times(exchange_folder, view):
    """The data behind it: the baseline's time over the exchange's own, the fastest of all marked."""
    times = {(r.topology, r.payload_bytes, r.system): r.value for r in exchange_folder.rows("collective_time")}
    shown = figures(view)["Who is faster, titan-rtx"].table
    assert len(shown.rows) == 4 * 11 * 2
    row = next(row for row in shown.rows if row[:3] == ["64 KiB", "8x8", "2d"])
    flat, leader, two = (times["8x8-titan-rtx", 2**16, name] for name in ("flat", "leader", "2d"))
    assert row[3] == f"{flat / two:.2f}x"
    assert (row[5] == "yes") == (two < min(flat, leader))
    best = [row for row in shown.rows if row[:2] == ["1 KiB", "4x8"] and row[5]]
    assert [row[2] for row in best] == ["leader"]


def test_every_kind_of_node_has_its_map(view):
    """The default one first, then those that others measured on."""
    titles = [title for title in figures(view) if title.startswith("Who is faster")]
    assert titles == [f"Who is faster, {name}" for name in ("titan-rtx", "rtx-2080-ti", "ndm-a100-v4")]


def test_the_finding_says_up_to_which_payload(view, exchange_folder):
    """As the times cross, and what a node sends."""
    text = figures(view)["Who is faster, titan-rtx"].finding
    (found,) = re.findall(r"leader is faster than flat up to [^:]*?(\d+) KiB on 4x8", text)
    times = {(r.topology, r.payload_bytes, r.system): r.value for r in exchange_folder.rows("collective_time")}
    below, above = 2**16, 2**20
    assert below / 1024 < float(found) < above / 1024
    assert times["4x8-titan-rtx", below, "leader"] < times["4x8-titan-rtx", below, "flat"]
    assert times["4x8-titan-rtx", above, "leader"] > times["4x8-titan-rtx", above, "flat"]
    assert "flat 192 of 512 KiB, leader 3 of 32.0 MiB and 2d 24 of 4.00 MiB" in text
    assert "a node sends 96.0 MiB to others" in text


def test_what_the_claims_need_is_what_the_search_found(exchange_folder, view):
    """Every claim, payload and parameter in the table; the default payload's in the sentence."""
    shown = figures(view)["What the claims would need: nic.message"]
    claims = [s.claim for s in scoreboard(exchange_folder.suite, exchange_folder)]
    found = holdings(claims, exchange_folder.suite, Evidence.of(exchange_folder), exchange_folder.topologies)
    assert len(shown.table.rows) == sum(len(holding.needs) for holding in found)
    h3 = next(h for h in found if h.claim.id == "hetu-h3" and h.choice.is_default)
    nearest = h3.needs["nic.message"].nearest * 1e6
    assert f"at 16 MiB it needs nic.message of {nearest:.3g} us to" in shown.finding
    row = next(r for r in shown.table.rows if r[:3] == ["hetu-h3", "16 MiB", "nic.bandwidth"])
    assert (row[5], row[6]) == ("what no value gives", "–")
    assert row[7].endswith("GB/s")


def test_claims_are_compared_two_by_two(view):
    """Each pair of the four with whether both can be right, and none is called possible without a value."""
    together = figures(view)["What the claims would need: nic.message"].below
    assert len(together.rows) == 6
    answers = {row[0]: row[2] for row in together.rows}
    assert answers["hetu-h3 and hetu-c2"].startswith("they are about machines with other links")
    assert answers["hetu-h3 and hetu-c1"].startswith("not ")


def test_the_plane_says_whether_numbers_can_be_right_together(view):
    """As described the costs of the other search; the table and the sentence from the same search."""
    shown = figures(view)["What the claims would need: the nodes and the messages"]
    single = figures(view)["What the claims would need: nic.message"].table
    alone = next(row[5] for row in single.rows if row[:3] == ["hetu-h3", "16 MiB", "nic.message"])
    told = re.search(r"hetu-h3 .*? holds with (\d+) to (\d+) us a message in nodes as described", shown.finding)
    low, high = told.groups()
    assert [float(low), float(high)] == pytest.approx([float(x.split()[0]) for x in alone.split(" to ")], rel=0.01)
    assert shown.table.rows[0][:3] == ["hetu-h3", "1", "4.24"]
    assert shown.table.rows[0][4] == f"{low} to {high} us"
    assert "No speed of the nodes and no cost of a message gives hetu-h3 and hetu-h4 at once." in shown.finding
    told = re.search(r"a fabric.share for flat of ([\d.]+ to [\d.]+) on titan-rtx", shown.finding)
    [row] = shown.below.rows
    assert row[:2] == ["titan-rtx", "0.8 (0.3 to 1)"]
    assert row[-2] == told.group(1)
    assert row[-1].endswith("to 1 GiB")
    assert "titan-rtx, rtx-2080-ti" in shown.svg
    assert "ndm-a100-v4" not in shown.svg  # of eight NICs a node


def test_the_answer_counts_who_is_fastest(view):
    """All pairs of topology and payload of the default node type."""
    assert "of 44 pairs of topology and payload on titan-rtx, flat is the fastest at" in view["answer"]
    counts = [int(n) for n in re.findall(r"at (\d+)", view["answer"])]
    assert sum(counts) == 44


def test_every_case_is_listed(exchange_folder, view):
    """With what a node sends, and its peak of memory."""
    assert len(view["cases"].rows) == exchange_folder.record["cases"]
    row = next(r for r in view["cases"].rows if r[0] == "hierarchical-alltoall/16MiB/4x8-titan-rtx/leader")
    assert row[4:7] == ["3", "96.0 MiB", "272 MiB"]


def test_the_page_holds_the_section_and_the_claims(shown):
    """Findings are words on their cards; the map of conditions is of the first claim with a number."""
    cards = {card["id"]: card for card in shown["claims"]}
    assert cards["hetu-c1"]["obtained"] in ("mixed", "slower", "faster")
    assert (cards["hetu-c1"]["error"], cards["hetu-c1"]["own_interval"]) == ("", "")
    assert cards["hetu-h3"]["own_interval"]
    assert shown["map"]["claim"] == "hetu-h3"
    text = render("report", shown)
    assert FASTER in text
    assert SLOWER in text
    assert not any(colour in text for colour in SERIES)


def test_without_the_baseline_there_is_no_map(exchange_folder, frame):
    """The times are drawn all the same, and the cases listed."""
    alone = section(exchange_folder, small(frame[frame["system"] == "leader"]))
    assert not [f for f in alone["figures"] if f.title.startswith("Who is faster")]
    assert [f for f in alone["figures"] if f.title.startswith("Time by payload")]
    assert alone["answer"] == ""


def test_a_measured_run_says_what_its_times_are(exchange_folder, frame):
    """No draws and no replays: times of ranks, with a caveat."""
    measured = small(frame[frame["metric"] == "collective_time"]).assign(engine="cluster")
    measured["draws"] = [np.array([])] * len(measured)
    view = section(exchange_folder, measured)
    assert any("Measured" in caveat for caveat in view["caveats"])
    assert "measured" in figures(view)["Who is faster, titan-rtx"].caption


def test_what_does_not_fit_is_a_dash(exchange_folder, frame):
    """And no ratio of nothing."""
    frame = small(frame)
    large = (frame["system"] == "leader") & (frame["payload_bytes"] == 2**30)
    gone = frame.copy()
    gone.loc[large & (frame["metric"] == "collective_time"), ["value", "low", "high"]] = np.nan
    gone.loc[large, "status"] = "out-of-memory"
    points = speedups(calls(gone), ("flat", "leader", "2d"), "flat")
    assert points[(points["exchange"] == "leader") & (points["payload_bytes"] == 2**30)]["value"].isna().all()
    view = section(exchange_folder, gone)
    row = next(r for r in view["cases"].rows if r[0].endswith("1GiB/4x8-titan-rtx/leader"))
    assert row[1] == "out-of-memory"
    assert ">–<" in figures(view)["Who is faster, titan-rtx"].svg


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([4.0, 2.0, 0.5], 2**10.5),
        ([0.5, 0.5, 0.5], 0.0),
        ([2.0, 2.0, 2.0], np.inf),
        ([0.5, 2.0, 0.5], 2**10.5),
        ([np.nan, 2.0, 0.5], 2**10.5),
    ],
)
def test_crossings(values, expected):
    """Above it the exchange is slower for good; straight lines in logarithms of both."""
    points = pd.DataFrame({"payload_bytes": [2.0**9, 2.0**10, 2.0**11], "value": values})
    assert crossing(points) == pytest.approx(expected)


def test_signs():
    """Within 3 % is the same, either way."""
    assert [sign_of(x) for x in (1.5, 1.02, 1.0, 0.98, 0.5)] == [FASTER, SAME, SAME, SAME, SLOWER]


def test_figures_are_the_same_every_time(view, frame, exchange_folder):
    """The same rows, the same bytes; wide and narrow."""
    [experiment] = exchange_folder.suite.experiments
    points = speedups(calls(small(frame)), experiment.exchanges, "flat")
    own = points.assign(size=lambda f: f["size"].astype(str))
    for narrow in (False, True):
        assert condition_map(own, "flat", narrow) == condition_map(own, "flat", narrow)
    bars = pd.DataFrame([{"machine": "m", "payload": "1 KiB", "claim": "c", "low": 1.0, "high": 2.0}])
    known = pd.DataFrame([{"machine": "m", "own": 1.0, "low": 0.5, "high": 3.0}])
    svg = needs_figure(bars, known, ["c"], "cost, us")
    assert "as described: 1.00" in svg
    empty = bars.assign(low=np.nan, high=np.nan)
    assert "1 KiB" in needs_figure(empty, known, ["c"], "cost, us", narrow=True)


def test_a_claim_of_another_experiment_needs_nothing_here(exchange_folder, frame, scores):
    """Scores of other experiments are left out."""
    others = [replace(score, claim=replace(score.claim, experiment="overall")) for score in scores]
    view = section(exchange_folder, small(frame), others)
    assert not [f for f in view["figures"] if f.title.startswith("What the claims")]
