"""`--time-budget` on real ranks: more starts where intervals are widest; throttled samples don't count."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from moebench.cluster import engine
from moebench.cluster.host import Host
from moebench.cluster.lab import LabError
from moebench.cluster.rows import Measured, merge, rows_of_case, times_s
from moebench.cluster.worker import Report, Sample
from moebench.spending import Spending
from moebench.stopping import CannotGoOn
from moebench.workloads.load import load_suite
from tests.moebench.cluster.engine_functions import some_cases, this_machine

HERE, SUITE = this_machine(2), load_suite("smoke")
START_S = 10.0
[ONE] = some_cases(2, systems=("reference",))
QUIET, NOISY = (replace(ONE, workload=replace(ONE.workload, batch_size=size)) for size in (1, 2))
SPREAD = {1: 1e-4, 2: 0.3}


class Noisy:
    """A launcher whose starts take ten seconds of a made-up clock; ranks of batch size 2 repeat badly."""

    counters = None

    def __init__(self):
        self.now_s, self.starts, self.stop_at_s, self.error = 0.0, [], float("inf"), KeyboardInterrupt()

    def run(self, target, args, timeout_s, silence_s):
        [request] = args
        size = request.cases[0].workload.batch_size
        self.now_s += START_S
        self.starts.append((size, request.process))
        if self.now_s >= self.stop_at_s:
            raise self.error
        spans_s = np.exp(np.random.default_rng((size, request.process)).normal(0, SPREAD[size], 14))
        samples = tuple(Sample(0, 0, place, 3, 0.0, span, 0.01, 0.01) for place, span in enumerate(spans_s))
        return [Report(Host("clock", 2, "cpu"), samples)] * 2


@pytest.fixture
def ranks(monkeypatch):
    """Ranks on a made-up clock."""
    fake = Noisy()

    @contextmanager
    def launcher_of(topology, session):
        yield fake

    monkeypatch.setattr(engine, "launcher_of", launcher_of)
    for name in ("moebench.cluster.engine.monotonic", "moebench.spend.time.monotonic"):
        monkeypatch.setattr(name, lambda: fake.now_s)
    return fake


def summaries(spending, rows=None):
    """The summary row of each case, in order; kept in `rows` should the engine stop in between."""
    rows = [] if rows is None else rows
    for of_case in engine.run_cases([NOISY, QUIET], {HERE.name: HERE}, SUITE, spending=spending):
        rows.append(next(row for row in of_case if row.sample is None))
    return rows


def test_the_rest_of_the_time_goes_to_the_widest(ranks):
    """Two starts each; then the noisy point until the budget is spent, and no second longer."""
    quiet, noisy = summaries(Spending(0.01, until_s=90.0))
    assert (quiet.batch_size, quiet.detail["processes"]) == (1, 2)
    assert (noisy.batch_size, noisy.detail["processes"]) == (2, 7)
    assert ranks.starts == [(2, 0), (2, 1), (1, 0), (1, 1), *((2, process) for process in range(2, 7))]


def test_a_width_alone_ends_it(ranks):
    """Without a budget: as long as it takes."""
    found = summaries(Spending(0.25))
    assert all((row.high - row.low) / row.value <= 0.25 for row in found)
    assert len(ranks.starts) > 4


def test_what_the_time_does_not_reach_says_so(ranks):
    """A point whose turn never came is skipped."""
    noisy_first = summaries(Spending(0.9, until_s=15.0))
    assert [(row.batch_size, row.status) for row in noisy_first] == [(2, "passed"), (1, "skipped")]
    assert "time budget was spent" in noisy_first[1].reason


@pytest.mark.parametrize("at_s", [40.0, 70.0])
def test_what_was_measured_outlives_an_interrupt_and_a_lost_cluster(ranks, at_s):
    """In the minimum of another point, or in a start beyond it: the whole starts stay."""
    for error, raised in ((KeyboardInterrupt(), KeyboardInterrupt), (LabError("no bridge"), CannotGoOn)):
        ranks.now_s, ranks.stop_at_s, ranks.error = 0.0, at_s, error
        rows = []
        with pytest.raises(raised):
            summaries(Spending(0.01), rows)
        noisy = next(row for row in rows if row.batch_size == 2)
        assert noisy.detail["count"] == 14 * noisy.detail["processes"]


def test_throttled_samples_are_kept_marked_and_not_judged():
    """The slowest GPU's clocks stand beside the time; where every sample is throttled, all are judged."""
    fast = {"sm_clock_mhz": 9, "memory_clock_mhz": 1, "throttle_reasons": 0x4}
    hot = {"sm_clock_mhz": 5, "memory_clock_mhz": 1, "throttle_reasons": 0x20}
    own = Measured()
    for clocks in (fast, fast, hot):
        seen = [Sample(0, 0, 0, 1, 0.0, 2.0 if clocks is hot else 1.0, 0.1, 0.1, clocks=c) for c in (fast, clocks)]
        found = merge(seen, [Report(Host("a", 2, "H"), ())] * 2, HERE)
        own.samples.setdefault(0, []).append(found)
    assert found.detail["sm_clock_mhz"] == 5
    assert found.detail["throttle_reasons"] == 0x24
    rows = rows_of_case(ONE, HERE, own)
    assert [row.detail.get("mark") for row in rows if row.sample is not None] == [None, None, "throttled"]
    assert next(row for row in rows if row.metric == "step_time" and row.sample is None).value == 1.0
    assert times_s(Measured(samples={0: [found]})) == [[2.0]]
