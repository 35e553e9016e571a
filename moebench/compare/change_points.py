"""Where a series of noisy values changes its level: a piecewise constant fit, then a test of each step.

The fit is ruptures' PELT with a penalty for each step (R. Killick et al., Optimal detection of changepoints with a
linear computational cost, 2012). A level lasts at least two runs: a single odd run is no change.
"""

import math

import numpy as np

SHORTEST = 2  # runs of a level
PENALTY = 5.0  # of a step, times the logarithm of the number of values, in variances of the noise
CLIPPED = 3.0  # standard deviations beyond which a single value counts no more
_NEIGHBOURS = 4  # on each side, whose median a value is held against


def change_points(values: np.ndarray) -> list[int]:
    """Indices at which a new level begins, of values whose noise is alike everywhere (logarithms of times)."""
    if values.size < 2 * SHORTEST or values.min() == values.max():
        return []
    scale = noise_of(values)
    from ruptures import KernelCPD

    signal = _without_spikes(values / scale)
    algorithm = KernelCPD(kernel="linear", min_size=SHORTEST).fit(signal.reshape(-1, 1))
    return [int(index) for index in algorithm.predict(pen=PENALTY * math.log(values.size))[:-1]]


def noise_of(values: np.ndarray) -> float:
    """Standard deviation of single values about their level, by the differences of neighbours, which steps don't move.

    At least a thousandth of a thousandth: what is exactly constant has no noise to divide by.
    """
    differences = np.abs(np.diff(values))
    robust = 1.4826 * float(np.median(differences)) / math.sqrt(2)
    return max(robust, float(differences.mean()) / 10, 1e-6)


def _without_spikes(values: np.ndarray) -> np.ndarray:
    """Values held to within CLIPPED of the median of their neighbourhood."""
    padded = np.pad(values, _NEIGHBOURS, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * _NEIGHBOURS + 1)
    middle = np.median(windows, axis=1)
    return np.clip(values, middle - CLIPPED, middle + CLIPPED)
