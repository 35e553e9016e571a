"""Further processes go where intervals are widest, until they are narrow or the time is over; nothing is lost."""

from dataclasses import replace

import numpy as np
import pytest

from moebench import spend
from moebench.local import engine
from moebench.local.engine import Measured, run_cases
from moebench.local.warm_up import FEWEST_STEPS, MOST_STEPS, SETTLED_STEPS, warm_up
from moebench.spending import Spending, seconds_of, spending_of
from moebench.workloads.errors import InputError
from tests.moebench.local.test_engine import SUITE, THIS, TINY, case

NOISY, QUIET, MIDDLE = (case(workload=replace(TINY, batch_size=size)) for size in (1, 2, 3))
SPREAD = {NOISY.hash: 0.3, MIDDLE.hash: 0.05, QUIET.hash: 0.0001}
COST_S = 10.0  # of a process


@pytest.fixture
def clock(monkeypatch):
    """Time that goes on only when something is measured; the points measured, in order."""
    now, asked = [0.0], []

    def measure_points(points, kind, processes=2, blocks=7, threads=None, first=0, found=None):
        found = {c.hash: Measured() for point in points for c in point} if found is None else found
        for process in range(first, first + processes):
            for point in points:
                now[0] += COST_S
                asked.append((point[0].workload.batch_size, process))
                random = np.random.default_rng((point[0].workload.batch_size, process))
                for value in np.exp(random.normal(0, SPREAD[point[0].hash], 14)):
                    found[point[0].hash].samples.append({"time_s": value, "regime": "hot", "process": process})
                if (stop := clock.stop_at) is not None and now[0] >= stop:
                    raise KeyboardInterrupt
        return found

    def clock():
        return now[0]

    clock.stop_at, clock.asked = None, asked
    for module in ("moebench.local.engine.monotonic", "moebench.spend.time.monotonic"):
        monkeypatch.setattr(module, clock)
    monkeypatch.setattr(engine, "measure_points", measure_points)
    monkeypatch.setattr(engine, "rows_of_case", lambda case, topology, measured: [(case, measured)])
    return clock


def run(spending, cases=(NOISY, QUIET, MIDDLE)):
    """What the engine yields, in its order."""
    return [rows[0] for rows in run_cases(cases, {THIS.name: THIS}, SUITE, spending=spending)]


def test_without_a_budget_every_point_has_its_minimum(clock):
    """Two processes each, in order, nothing held back."""
    assert [row[0] for row in run(None)] == [NOISY, QUIET, MIDDLE]
    assert clock.asked == [(1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]


def test_time_goes_where_intervals_are_widest(clock):
    """The quiet point is done at once; what is left of the budget goes to the widest, and not a second beyond it."""
    found = run(Spending(0.01, until_s=120.0))
    assert found[0][0] == QUIET
    more = clock.asked[6:]
    assert len(more) == 6
    assert clock() == 120.0
    assert {size for size, _ in more} <= {1, 3}
    assert more[0] == (1, 2)
    assert sum(size == 1 for size, _ in more) > sum(size == 3 for size, _ in more)
    processes = {row[0].workload.batch_size: len({s["process"] for s in row[1].samples}) for row in found}
    assert sum(processes.values()) == 12


def test_an_interval_that_is_narrow_enough_ends_it(clock):
    """Without a budget: as long as it takes, but no more than so many processes."""
    found = {row[0].hash: row[1] for row in run(Spending(0.2))}
    assert engine.width_of((NOISY,), found) <= 0.2
    assert len({s["process"] for s in found[QUIET.hash].samples}) == 2
    ((_, measured),) = run(Spending(1e-6), [NOISY])
    assert len({s["process"] for s in measured.samples}) == spend.MOST_PROCESSES


def test_points_that_the_budget_never_reaches_are_skipped(clock):
    """Two of three have their minimum; the third says why it has none."""
    found = run(Spending(0.5, until_s=30.0))
    assert [row[0] for row in found] == [NOISY, QUIET, MIDDLE]
    assert found[2][1].status == "skipped"
    assert "time budget was spent" in found[2][1].reason


@pytest.mark.parametrize("at_s", [50.0, 80.0])
def test_an_interrupt_keeps_what_was_measured(clock, at_s):
    """In the minimum of the last point, or in a process beyond it: the rows of every whole process come first."""
    clock.stop_at = at_s
    rows = []

    def consume():
        for one in run_cases((NOISY, QUIET, MIDDLE), {THIS.name: THIS}, SUITE, spending=Spending(0.01)):
            rows.append(one[0])

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert QUIET in [row[0] for row in rows]
    for _, measured in rows:
        counts = np.bincount([sample["process"] for sample in measured.samples])
        assert set(counts[counts > 0]) == {14}


def test_durations_and_shares():
    """As people write them; anything else is an error that says how."""
    assert [seconds_of(text) for text in ("90s", "10m", "1.5h", "2 min")] == [90, 600, 5400, 120]
    for bad in ("", "10", "0s", "-1m", "infs", "1e9h", "ten minutes"):
        with pytest.raises(InputError, match="90s, 10m or"):
            seconds_of(bad)
    assert spending_of(None, None) is None
    assert spending_of(None, "2 %") == Spending(0.02, None)
    assert 500 < spending_of("10m", None).left_s <= 600
    for bad in ("0", "150%", "wide"):
        with pytest.raises(InputError, match="--interval"):
            spending_of("1m", bad)


def test_warm_up_ends_when_steps_get_no_faster():
    """A step that settles at its sixth run: three more, and it says that it settled."""
    times = iter([10, 8, 6, 4, 2, 1, 1.0, 1.0, 1.01, 1.0])
    assert warm_up(lambda: next(times)).steps == 6 + SETTLED_STEPS
    assert warm_up(lambda: 1.0).steps == 1 + SETTLED_STEPS


def test_warm_up_is_capped():
    """By steps where it never settles, by time where steps are long; never below three steps."""
    times = iter(0.9**n for n in range(1000))
    found = warm_up(lambda: next(times))
    assert (found.steps, found.settled) == (MOST_STEPS, False)
    times = iter(0.9**n for n in range(1000))
    assert warm_up(lambda: next(times), most_s=0.0).steps == FEWEST_STEPS
