"""Whether measured samples of two runs differ, by four questions that all must say yes.

1. Rank test (Mann-Whitney, two-sided, p < 0.002) on the samples: do they differ at all?
2. Effect: is the change larger than the metric's threshold?
3. Processes: is it larger than what processes of one run differ by, again at p < 0.002? Samples of one process share
   its memory layout and its minute, so that thousands of them agree and prove nothing about the next process.
4. Each process: does every process of both runs show it by itself, and are the runs further apart than the processes
   of one run are from each other? A machine that drifts through both runs fails here.

What the questions are worth is measured on synthetic noise: docs/statistics.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import stdtr, stdtrit

from moebench.compare.comparison import FASTER, INCONCLUSIVE, SAME, SLOWER
from moebench.compare.rank_test import rank_p
from moebench.compare.rules import BOTH, EFFECT, TEST, Threshold, thresholds_text
from moebench.compare.side import Samples
from moebench.compare.spread import NO_PRIOR, Prior, Variance, pooled

ALPHA = 0.002
CLOCK_TOLERANCE = 0.02  # share by which a GPU's clocks may differ before times say more about them than about the code
STEPS_APART = 1.0  # the runs must be further apart than so many steps between neighbouring processes of one run
DRIFT_ERRORS = 3.5  # standard errors that must be left of a change when a drift is taken off
RUNS_AS_UNITS = 4  # from so many pooled runs on, their own spread is known and counts


@dataclass(frozen=True)
class Judged:
    """What the samples of two sides say.

    Attributes:
        change: head over base minus one, of the mean logarithm of the processes' medians; low, high: its 95 % interval
            over processes, None where there are too few.
        p_value: of the rank test. detectable: the smallest change that the processes could have shown.
        base, head: typical values, whose ratio is the change.
    """

    verdict: str
    reason: str
    base: float | None = None
    head: float | None = None
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p_value: float | None = None
    detectable: float | None = None


@dataclass(frozen=True)
class Levels:
    """Logarithms of the processes' medians, and of the runs' means, of both sides."""

    base: np.ndarray
    head: np.ndarray
    base_runs: np.ndarray

    @property
    def gap(self) -> float:
        """Mean of the head over mean of the base, as a logarithm."""
        return float(self.head.mean() - self.base.mean())

    @property
    def has_runs(self) -> bool:
        """Whether the base pools enough runs to know what runs differ by."""
        return len(self.base_runs) >= RUNS_AS_UNITS


def levels_of(base: Samples, head: Samples) -> Levels:
    """The levels of two sides whose samples are all finite and above zero."""
    logs = [np.log([np.median(group) for group in side.processes]) for side in (base, head)]
    runs = np.array(base.runs)
    return Levels(logs[0], logs[1], np.array([logs[0][runs == run].mean() for run in dict.fromkeys(base.runs)]))


def variance_of(levels: Levels) -> Variance:
    """Variance of one unit: of a run where the base pools enough of them, else of a process."""
    return pooled([levels.base_runs]) if levels.has_runs else pooled([levels.base, levels.head])


def judge(base: Samples, head: Samples, threshold: Threshold, prior: Prior = NO_PRIOR) -> Judged:
    """The verdict on one quantity.

    Args:
        prior: what the other quantities of the same two sides say about its variance.
    """
    problem = _problem(base, head)
    if problem:
        return Judged(INCONCLUSIVE, problem)
    if _are_equal(base, head):
        value = math.exp(levels_of(base, head).base.mean())
        return Judged(SAME, "the samples are the same", value, value, 0.0, 0.0, 0.0, 1.0)
    levels = levels_of(base, head)
    base_value, head_value = math.exp(levels.base.mean()), math.exp(levels.head.mean())
    change = _share(levels.gap)
    p_value = rank_p(np.concatenate(base.processes), np.concatenate(head.processes))
    found = Judged(INCONCLUSIVE, "", base_value, head_value, change, p_value=p_value)
    is_large = abs(change) > threshold.relative and abs(head_value - base_value) > threshold.absolute
    direction = SLOWER if levels.gap > 0 else FASTER
    own = variance_of(levels)
    variance = prior.moderate(own) if own.freedom and prior.freedom else own
    if own.freedom:
        found = _with_interval(found, levels, variance)
    if threshold.by == EFFECT:
        if is_large:
            return replace(found, verdict=direction, reason="the effect is above the threshold; the rule asks no more")
        return replace(found, verdict=SAME, reason=f"the effect is not above {thresholds_text(threshold, base.unit)}")
    against = _against(levels, base, head, found, threshold, variance)
    is_enough = is_large or threshold.by == TEST
    if is_enough and not against:
        return replace(found, verdict=direction, reason=f"p = {p_value:.1g}, and every process shows it")
    return _unproved(found, threshold, against if is_enough else "")


def _are_equal(base: Samples, head: Samples) -> bool:
    """Whether a run stands beside itself."""
    return len(base.processes) == len(head.processes) and all(map(np.array_equal, base.processes, head.processes))


def _problem(base: Samples, head: Samples) -> str:
    """Why nothing can be said, or empty."""
    for name, side in (("base", base), ("head", head)):
        if side.problem:
            return f"{name}: {side.problem}"
        if side.count < 2:
            return f"{name}: {side.count} sample{'s' * (side.count != 1)}; one repetition proves nothing"
    if base.unit != head.unit:
        return f"base is in {base.unit}, head in {head.unit}"
    clocks = base.clock_mhz, head.clock_mhz
    if clocks[0] and clocks[1] and abs(clocks[1] / clocks[0] - 1) > CLOCK_TOLERANCE:
        return f"the GPU ran at {clocks[0]:.0f} MHz for base and at {clocks[1]:.0f} MHz for head"
    return ""


def _standard_error(levels: Levels, variance: Variance) -> float:
    """Of the gap between the sides."""
    units = (len(levels.base_runs), 1) if levels.has_runs else (levels.base.size, levels.head.size)
    return math.sqrt(variance.value * (1.0 / units[0] + 1.0 / units[1]))


def _with_interval(found: Judged, levels: Levels, variance: Variance) -> Judged:
    """With the interval of the change, and the smallest one that could have been shown."""
    error = _standard_error(levels, variance)
    half = float(stdtrit(variance.freedom, 0.975)) * error
    needed = float(stdtrit(variance.freedom, 1 - ALPHA / 2)) * error
    return replace(
        found, low=_share(levels.gap - half), high=_share(levels.gap + half), detectable=_share(needed)
    )


def _share(log_ratio: float) -> float:
    """A change from its logarithm, however large."""
    return math.expm1(min(log_ratio, 700.0))


def _against(
    levels: Levels, base: Samples, head: Samples, found: Judged, threshold: Threshold, variance: Variance
) -> str:
    """What speaks against a change, or empty."""
    assert found.p_value is not None
    if found.p_value >= ALPHA:
        return f"the rank test allows it to be chance (p = {found.p_value:.2g})"
    if min(levels.base.size, levels.head.size) < 2:
        side = "base" if levels.base.size < 2 else "head"
        return f"{side} is a single process, and another one must confirm it"
    p_process = 2.0 * float(stdtr(variance.freedom, -abs(levels.gap) / _standard_error(levels, variance)))
    if p_process >= ALPHA:
        units = "pooled runs" if levels.has_runs else "processes of one run"
        return f"{units} differ so much that no change below {100 * (found.detectable or 0):.2g} % can be proved"
    sign = 1.0 if levels.gap > 0 else -1.0
    least = math.log1p(threshold.relative) if threshold.by == BOTH else 0.0
    if _nearest(levels, sign) <= STEPS_APART * _step(levels):
        return "processes of one run are as far apart as the runs are"
    # Pooled runs that drift differ by it, which the question before has asked.
    if not levels.has_runs and _without_drift(levels, max(variance.value, _within(base, head)), sign) <= 0:
        return "the machine drifted during the runs, and the change may be its continuation"
    if not _each_process(base.processes, head.processes, sign, least):
        return "not every process shows it by itself"
    return ""


def _nearest(levels: Levels, sign: float) -> float:
    """How far the nearest processes of the two sides are apart; negative where they overlap."""
    low, high = (levels.base, levels.head) if sign > 0 else (levels.head, levels.base)
    return float(high.min() - low.max())


def _step(levels: Levels) -> float:
    """Mean distance of neighbours, when the processes of a side are put in order."""
    steps = levels.base.size + levels.head.size - 2
    return float(np.ptp(levels.base) + np.ptp(levels.head)) / steps


def _within(base: Samples, head: Samples) -> float:
    """Variance of the logarithm of a process's median that its own samples explain, by their absolute deviations."""
    groups = [np.log(group) for group in (*base.processes, *head.processes)]
    spreads = [1.4826 * float(np.median(np.abs(group - np.median(group)))) for group in groups]
    return float(np.mean([math.pi / 2 * spread**2 / group.size for spread, group in zip(spreads, groups)]))


def _without_drift(levels: Levels, variance: float, sign: float) -> float:
    """What is left of the gap when a straight drift through the processes of both sides is taken off, less its error.

    The drift is what the processes of one side show in the order in which they ran; that of both sides is the same.
    """
    times = [np.arange(side.size, dtype=float) for side in (levels.base, levels.head)]
    times[1] += levels.base.size
    apart = [time - time.mean() for time in times]
    square = sum(float(np.square(own).sum()) for own in apart)
    drift = sum(float(own @ side) for own, side in zip(apart, (levels.base, levels.head))) / square
    distance = float(times[1].mean() - times[0].mean())
    error = math.sqrt(variance * (1 / levels.base.size + 1 / levels.head.size + distance**2 / square))
    return sign * (levels.gap - drift * distance) - DRIFT_ERRORS * error


def _each_process(base: Sequence[np.ndarray], head: Sequence[np.ndarray], sign: float, least: float) -> bool:
    """Whether each process differs from the other side's samples by a rank test and by at least `least`."""
    for own, other, direction in ((base, head, -sign), (head, base, sign)):
        theirs = np.concatenate(other)
        middle = math.log(float(np.median(theirs)))
        for group in own:
            if direction * (math.log(float(np.median(group))) - middle) <= least or rank_p(group, theirs) >= ALPHA:
                return False
    return True


def _unproved(found: Judged, threshold: Threshold, against: str) -> Judged:
    """`same` where nothing points to a change and the interval leaves none of a size that matters; else nothing."""
    if found.low is None or found.high is None:
        return replace(found, reason=against or "one process a side has no interval")
    interval = f"the change lies between {100 * found.low:+.2g} and {100 * found.high:+.2g} %"
    within = max(threshold.same_within, threshold.relative)
    if not against and -within <= found.low and found.high <= within:
        return replace(found, verdict=SAME, reason=interval)
    return replace(found, reason=f"{against}; {interval}" if against else interval)
