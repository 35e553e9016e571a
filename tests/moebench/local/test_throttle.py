"""Throttled samples are kept, marked, taken again a few times, and judge nothing."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from moebench.compare.read import read_side
from moebench.local import worker
from moebench.local.engine import Measured
from moebench.local.rows import rows_of_case
from moebench.local.step import Step
from moebench.local.throttle import is_throttled, judged
from tests.moebench.compare.support import noisy, sample_rows, write_run
from tests.moebench.local.test_engine import THIS, case


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    """Nothing is really timed, so nothing is collected before it."""
    monkeypatch.setattr(worker, "quiet_interpreter", nullcontext)


class HotClock:
    """Every third sample is taken at a thermal limit, which costs twice the time; or all of them."""

    regimes = ("hot",)

    def __init__(self, every=3):
        self.every, self.taken = every, 0

    def time_s(self, call, regime="hot", ahead=False):
        self.taken += 1
        hot = self.taken % self.every == 0
        return (2.0 if hot else 1.0), {"throttle_reasons": 0x20 if hot else 0x4}


def times(clock, blocks=4):
    """The messages of one process."""
    sent = []
    request = SimpleNamespace(process=0, blocks=blocks)
    step = Step(lambda: None, ())
    worker._time_blocks([case()], [step], clock, request, lambda **message: sent.append(message))
    return [message for message in sent if "time_s" in message]


def test_a_power_cap_is_no_fault_and_heat_is():
    """NVML's bits: 0x4 is how many GPUs run all day."""
    assert not is_throttled({"throttle_reasons": 0x1 | 0x4})
    assert is_throttled({"throttle_reasons": 0x4 | 0x40})
    assert not is_throttled({})


def test_throttled_samples_are_taken_again():
    """Eight good ones come out of eleven or twelve, each marked or not."""
    samples = times(HotClock())
    marked = [sample for sample in samples if sample.get("mark") == "throttled"]
    assert all((sample["time_s"] == 2.0) == (sample in marked) for sample in samples)
    assert len(samples) - len(marked) == 8
    assert len(marked) in (3, 4)


def test_a_gpu_that_stays_hot_does_not_hold_up_the_run():
    """Retakes are capped by the number of blocks."""
    assert len(times(HotClock(every=1))) == 8 + 4


def test_the_summary_leaves_them_out_and_counts_them():
    """Their rows stay."""
    samples = [sample | {"process": 0} for sample in times(HotClock())]
    rows = rows_of_case(case(), THIS, Measured(samples))
    (summary,) = [row for row in rows if row.sample is None]
    assert summary.value == summary.detail["maximum"] == 1.0
    assert summary.detail["throttled"] == len(samples) - 8
    assert len(rows) == len(samples) + 1
    assert judged([{"mark": "throttled"}]) == [{"mark": "throttled"}]


def test_a_comparison_judges_by_none_of_them(tmp_path):
    """Left out on both sides; where nothing else is there, inconclusive."""
    good, hot = noisy(1, 2), noisy(2, 2, 0.01)
    measured = case()
    rows = sample_rows(measured, good) + sample_rows(measured, hot, mark="throttled")
    (samples,) = read_side(write_run(tmp_path / "a", [rows])).samples.values()
    assert [list(group) for group in samples.processes] == [list(group) for group in good]
    all_hot = write_run(tmp_path / "b", [sample_rows(measured, hot, mark="throttled")])
    (samples,) = read_side(all_hot).samples.values()
    assert samples.problem == "the GPU throttled in every sample"


@pytest.mark.parametrize("reasons", [None, "hot", 1.5])
def test_reasons_that_are_no_number_are_none(reasons):
    """Whatever a driver says."""
    assert not is_throttled({"throttle_reasons": reasons})
