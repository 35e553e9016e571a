"""The figure and the tables of a comparison with whoever is fastest."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from moebench.claims import rivals
from moebench.claims.reported import Claim, Reading
from moebench.claims.scoreboard import Score
from moebench.report.rivals_view import best_other_figures, step_time_tables
from tests.moebench.suites import small_overall

CLAIM = Claim("h", "p", "overall", "min_step_speedup", "at-least", "hetumoe", "best-other", 1.15, "ratio", "printed")
TIMES = {  # gate -> system -> ms, or a status
    "switch": {"deepspeed": 9.0, "deepspeed_sparse": 3.0, "hetumoe": 2.0},
    "gshard": {"deepspeed": "unsupported", "deepspeed_sparse": 4.0, "hetumoe": 8.0},
    "topk-4": {"deepspeed": "unsupported", "deepspeed_sparse": "out-of-memory", "hetumoe": 5.0},
}


def frame(times):
    rows = []
    for gate, by_system in times.items():
        for batch in (8, 32, 64):
            for system, value in by_system.items():
                passed = not isinstance(value, str)
                draws = np.full(5, value / 1e3) if passed else np.empty(0)
                rows.append(
                    {"gate": gate, "batch_size": batch, "size": "1x8", "topology": "1x8-t", "system": system,
                     "is_default": True, "conventions": "common", "status": "passed" if passed else value,
                     "value": value / 1e3 if passed else np.nan, "draws": draws, "case": f"{gate}/{batch}/{system}",
                     "detail": {}}
                )  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def experiment():
    return small_overall().experiments[0]


def test_the_best_other_is_found_point_by_point(experiment, monkeypatch):
    """The fastest rival that has the gate and fits; a point where none does says so."""
    monkeypatch.setattr(rivals, "readings", lambda paper: (Reading("own", ("deepspeed", "deepspeed_sparse"), ""),))
    (found,) = best_other_figures(experiment, frame(TIMES), [Score(CLAIM, "contradicted", "")])
    assert "0.500x to 1.50x as fast as the best other: least with gshard" in found.finding
    assert "It is ahead at 3 of 6 points" in found.finding
    cells = {(row[0], row[1]): row[3:] for row in found.table.rows}
    assert cells["switch", "32"][:4] == ["deepspeed_sparse", "3.00", "2.00", "1.50x"]
    assert cells["topk-4", "8"] == ["–", "–", "–", "–", "the others out of memory"]


@pytest.mark.parametrize("status", ["out-of-memory", "failed", "wrong"])
def test_a_point_without_a_number_says_whose_and_why(experiment, monkeypatch, status):
    """The own system's, or a rival's that might have been the fastest; one without memory is only slower than any."""
    monkeypatch.setattr(rivals, "readings", lambda paper: (Reading("own", ("deepspeed", "deepspeed_sparse"), ""),))
    times = TIMES | {"gshard": TIMES["switch"] | {"hetumoe": status}, "topk-4": TIMES["switch"] | {"deepspeed": status}}
    (found,) = best_other_figures(experiment, frame(times), [Score(CLAIM, "contradicted", "")])
    cells = {row[0]: row[-1] for row in found.table.rows}
    lost = "out of memory" if status == "out-of-memory" else "has no number"
    assert cells["gshard"] == f"hetumoe {lost}"
    assert cells["topk-4"] == ("1.50x to 1.50x" if status == "out-of-memory" else f"deepspeed {lost}")


def test_each_reading_of_the_rivals_has_its_figure(experiment, monkeypatch):
    """One figure a reading whose systems ran; none where nobody claims it."""
    own, other, absent = (Reading(n, names, "") for n, names in
                          (("a", ("deepspeed",)), ("b", ("deepspeed_sparse",)), ("c", ("tutel",))))  # fmt: skip
    monkeypatch.setattr(rivals, "readings", lambda paper: (own, other, absent))
    found = best_other_figures(experiment, frame(TIMES), [Score(CLAIM, "contradicted", "")])
    assert [f.title.rpartition(": ")[2] for f in found] == ["a", "b"]
    assert best_other_figures(experiment, frame(TIMES), [Score(replace(CLAIM, baseline="x"), "not run", "")]) == []


def test_tables_show_who_lacks_a_gate(experiment):
    """Every system at one batch size, the fastest marked, what is missing in words."""
    (table,) = step_time_tables(experiment, frame(TIMES))
    assert list(table.columns) == ["size", "system", "switch", "gshard", "topk-4"]
    assert [list(row) for row in table.rows] == [
        ["1x8", "deepspeed", "9.00", "no gate", "no gate"],
        ["1x8", "deepspeed_sparse", "3.00", "4.00 *", "out of memory"],
        ["1x8", "hetumoe", "2.00 *", "8.00", "5.00 *"],
    ]
    assert "batch size 32" in table.caption
