"""What a list of measured times says: median, quartiles, bootstrap interval, marks.

Apart from the engine because the calibration summarises its repeats with the same functions, and so that their
properties can be tested without timing anything.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2000
OUTLIER_DEVIATIONS = 5.0


@dataclass(frozen=True, slots=True)
class Summary:
    """Samples of one quantity, never summarised by the mean alone.

    Attributes:
        low, high: bootstrap 95 % interval of the median, over processes and over the samples in each.
        processes: independent processes behind the samples.
    """

    median: float
    q1: float
    q3: float
    minimum: float
    maximum: float
    low: float
    high: float
    count: int
    processes: int


def summarise(samples_by_process: Sequence[Sequence[float]], seed: int = 0) -> Summary:
    """The Summary of samples that came from several processes.

    Raises:
        ValueError: no samples.
    """
    groups = [np.asarray(group, dtype=np.float64) for group in samples_by_process if len(group)]
    if not groups:
        raise ValueError("no samples to summarise")
    pooled = np.concatenate(groups)
    q1, median, q3 = np.quantile(pooled, (0.25, 0.5, 0.75))
    low, high = bootstrap_interval(groups, seed=seed)
    return Summary(
        median=float(median),
        q1=float(q1),
        q3=float(q3),
        minimum=float(pooled.min()),
        maximum=float(pooled.max()),
        low=low,
        high=high,
        count=pooled.size,
        processes=len(groups),
    )


def bootstrap_interval(
    groups: Sequence[np.ndarray], confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the pooled median, resampling processes first and the samples of each second.

    Samples of one process share its memory layout and its neighbours, so two processes that differ widen the
    interval to cover both; resampling the pooled samples would call that difference noise.
    """
    random = np.random.default_rng(seed)
    chosen = random.integers(len(groups), size=(resamples, len(groups)))
    drawn = np.full((resamples, len(groups), max(group.size for group in groups)), np.nan)
    for number, group in enumerate(groups):
        here = chosen == number
        picks = random.integers(group.size, size=(int(here.sum()), group.size))
        drawn[here, : group.size] = group[picks]
    medians = np.nanmedian(drawn.reshape(resamples, -1), axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, (tail, 1.0 - tail))
    return float(low), float(high)


def outliers(samples: Sequence[float]) -> list[bool]:
    """Which samples lie more than five scaled median absolute deviations from the median; marked, never dropped."""
    values = np.asarray(samples, dtype=np.float64)
    if not values.size:
        return []
    distance = np.abs(values - np.median(values))
    spread = 1.4826 * float(np.median(distance))
    return [bool(d > OUTLIER_DEVIATIONS * spread) and spread > 0.0 for d in distance]


def balanced_order(count: int, random: np.random.Generator) -> list[int]:
    """A random order of `count` items followed by its mirror, so that a linear drift adds the same to each."""
    order = [int(i) for i in random.permutation(count)]
    return order + order[::-1]
