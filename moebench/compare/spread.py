"""How much processes of the same program differ: of one quantity, and what all quantities of two runs say about it.

Two processes a run leave two degrees of freedom, on which hardly any change can be proved. A run holds many cases, and
their processes differ by amounts of a like size; so each variance is drawn towards what the others show, as far as they
agree (G. K. Smyth, Linear models and empirical Bayes methods, 2004, section 6.2).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import digamma, polygamma

FEWEST = 8  # quantities below which nothing is learnt from others
MOST_FREEDOM = 30.0  # that others may add: no number of them makes a variance certain
LEAST_VARIANCE = 1e-12  # of logarithms: a millionth; clocks see no less


@dataclass(frozen=True)
class Variance:
    """Variance of the logarithm of a process's median, with its degrees of freedom."""

    value: float
    freedom: float


@dataclass(frozen=True)
class Prior:
    """What the other quantities of the same runs say about a variance."""

    value: float
    freedom: float

    def moderate(self, own: Variance) -> Variance:
        """The variance drawn towards the prior, by the degrees of freedom of both."""
        freedom = own.freedom + self.freedom
        return Variance((own.freedom * own.value + self.freedom * self.value) / freedom, freedom)


NO_PRIOR = Prior(0.0, 0.0)


def pooled(groups: Sequence[np.ndarray]) -> Variance:
    """Variance inside of some groups, each about its own mean."""
    freedom = sum(group.size - 1 for group in groups)
    if freedom <= 0:
        return Variance(0.0, 0.0)
    total = sum(float(np.square(group - group.mean()).sum()) for group in groups)
    return Variance(max(total / freedom, LEAST_VARIANCE), float(freedom))


def learn(variances: Sequence[Variance]) -> Prior:
    """The prior of many quantities' variances: a scaled inverse chi-square, fitted by the moments of their logarithms.

    Where they agree no better than their few degrees of freedom allow, its freedom is large; where some quantities are
    quiet and others not, it is small and every quantity stands for itself.
    """
    known = [v for v in variances if v.freedom > 0]
    if len(known) < FEWEST:
        return NO_PRIOR
    half = np.array([v.freedom for v in known]) / 2.0
    e = np.log([v.value for v in known]) - digamma(half) + np.log(half)
    mean = float(e.mean())
    excess = float(np.square(e - mean).sum() / (len(known) - 1) - polygamma(1, half).mean())
    if excess <= 0:
        return Prior(math.exp(mean), MOST_FREEDOM)
    prior_half = _trigamma_inverse(excess)
    value = math.exp(mean + float(digamma(prior_half)) - math.log(prior_half))
    return Prior(value, min(2.0 * prior_half, MOST_FREEDOM))


def _trigamma_inverse(x: float) -> float:
    """The y with trigamma(y) = x, by Newton's method on 1 / trigamma, which is nearly straight (ibid., appendix)."""
    if x > 1e7:
        return x**-0.5
    if x < 1e-6:
        return 1.0 / x
    y = 0.5 + 1.0 / x
    for _ in range(50):
        trigamma = float(polygamma(1, y))
        step = trigamma * (1.0 - trigamma / x) / float(polygamma(2, y))
        y += step
        if -step / y < 1e-8:
            break
    return y
