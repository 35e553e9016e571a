"""The Mann-Whitney test of two samples: scipy's, whose wrapping costs a hundred times its sums.

A comparison makes some ten tests a quantity, so what scipy would compute for more than a few samples is computed here,
by the same formula; a test holds the two against each other.
"""

import math

import numpy as np
from scipy.special import ndtr

FEW = 8  # samples of the smaller side up to which scipy counts the arrangements, where none are equal


def rank_p(base: np.ndarray, head: np.ndarray) -> float:
    """Two-sided p; 1 where all samples are equal."""
    both = np.sort(np.concatenate([base, head]))
    if both[0] == both[-1]:
        return 1.0
    same = both[1:] == both[:-1]
    has_ties = bool(same.any())
    if min(base.size, head.size) <= FEW and not has_ties:
        from scipy.stats import mannwhitneyu

        return float(mannwhitneyu(base, head, alternative="two-sided", method="exact").pvalue)
    n, m = base.size, head.size
    ordered = np.sort(base)
    below = np.searchsorted(ordered, head, "left").sum() + np.searchsorted(ordered, head, "right").sum()
    u = below / 2.0
    ties = _ties(both) if has_ties else 0.0
    total = n + m
    variance = n * m / 12.0 * (total + 1 - ties / (total * (total - 1)))
    z = (max(u, n * m - u) - n * m / 2.0 - 0.5) / math.sqrt(variance)
    return float(min(2.0 * ndtr(-z), 1.0))


def _ties(ordered: np.ndarray) -> float:
    """Sum of t^3 - t over the groups of t equal values."""
    edges = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1], [True]]))
    counts = np.diff(edges).astype(np.float64)
    return float((counts**3 - counts).sum())
