"""docs/statistics.md says what the verdicts are worth: it is what its command writes, and the code still earns it."""

from itertools import islice

import pytest

from benchmarks import verdict_check
from benchmarks.noise import BEYOND_TWO_RUNS, ORDINARY, QUIET, WITHIN_RUNS
from benchmarks.rows_csv import read_rows
from benchmarks.verdict_check import DESIGNS, FIRST, Cell, TrendCell, digest, trend_cell, verdicts
from moebench.compare.judge import ALPHA


@pytest.fixture(scope="module")
def cells():
    """What was measured."""
    return read_rows(Cell, verdict_check.CSV)


def test_the_page_is_what_its_command_writes(cells):
    """From the stored counts, to the letter."""
    found = read_rows(TrendCell, verdict_check.TREND_CSV)
    assert verdict_check.PAGE.read_text() == verdict_check.page(cells, found)


def test_false_alarms_stay_below_the_nominal_rate(cells):
    """Under every noise inside of runs and every design, of thousands of comparisons each."""
    names = {noise.name for noise in WITHIN_RUNS}
    still = [c for c in cells if not c.slowdown and c.noise in names]
    assert len(still) == len(WITHIN_RUNS) * len(DESIGNS)
    assert all(c.trials >= 4_000 and c.called <= ALPHA * c.trials for c in still)
    pooled = [c for c in cells if not c.slowdown and c.noise == BEYOND_TWO_RUNS[-1].name and "5 runs" in c.design]
    assert all(c.called <= ALPHA * c.trials for c in pooled)


def test_power_is_worth_having(cells):
    """Ten per cent is called nearly always by five processes, five per cent by five processes on a quiet machine."""
    power = {(c.noise, c.design, c.slowdown): c.called / c.trials for c in cells}
    for design in DESIGNS[2:]:
        assert power[ORDINARY.name, design.name, 0.1] > 0.95
        assert power[QUIET.name, design.name, 0.05] > 0.95
        assert power[QUIET.name, design.name, 0.02] > 0.8


@pytest.mark.parametrize("noise", [QUIET, ORDINARY, WITHIN_RUNS[5], BEYOND_TWO_RUNS[0]], ids=str)
def test_the_first_verdicts_of_a_cell_are_what_was_counted(cells, noise):
    """Drawn again, the first comparisons say the same: the page belongs to the code as it is."""
    stored = {(c.noise, c.design, c.slowdown): c.first for c in cells}
    for design in DESIGNS[::2] if noise is QUIET else DESIGNS[1::4]:
        assert digest(list(islice(verdicts(noise, design, 0.0), FIRST))) == stored[noise.name, design.name, 0.0]
    if noise is ORDINARY:
        design = DESIGNS[2]
        assert digest(list(islice(verdicts(noise, design, 0.1), FIRST))) == stored[noise.name, design.name, 0.1]


def test_a_cell_of_trends_is_what_was_counted():
    """The shortest series without noise beyond the usual, all 400 again."""
    (stored,) = [c for c in read_rows(TrendCell, verdict_check.TREND_CSV) if c == trend_cell("white", 20, 0.0, 400)]
    assert stored.called <= 8
