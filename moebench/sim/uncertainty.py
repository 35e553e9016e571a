"""Draws of a machine's uncertain parameters, and which of them moves a result most.

Apart from the replay because every engine that prices a program reads the same draws: draw i is the same machine for
every system, gate and batch size, so ratios between systems are taken machine by machine.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from moebench.workloads.machine import Hardware, Parameter
from moebench.workloads.workload import Workload

Values = Mapping[str, np.ndarray]


def draw(parameters: Mapping[str, Parameter], samples: int, seed: int) -> dict[str, np.ndarray]:
    """A Latin hypercube over the ranges, as one array of length `samples` + 1 a parameter; index 0 is nominal.

    Half of the samples of a parameter lie below its value and half above, evenly between low, value and high
    (on a log scale where low is positive). A parameter's stream depends on its name and `seed` only, so that it is
    drawn alike in every topology that has it.
    """
    if samples < 0:
        raise ValueError(f"samples = {samples}: may not be negative")
    return {name: _draw_one(name, parameter, samples, seed) for name, parameter in parameters.items()}


def seen_by(workload: Workload, hardware: Hardware, values: Values) -> Values:
    """The values under which a workload is replayed: the host of a GPU costs nothing where it has issued all ahead.

    A CPU runs the operators itself, so that issuing them is part of any call.
    """
    if not workload.issued_ahead or hardware.kind != "gpu":
        return values
    return {name: np.zeros_like(v) if name.startswith("host.issue.") else v for name, v in values.items()}


def nominal(parameters: Mapping[str, Parameter]) -> dict[str, np.ndarray]:
    """Every parameter at its value: the draw without uncertainty."""
    return draw(parameters, 0, 0)


def influence(parameters: Mapping[str, Parameter], values: Values, outcome: np.ndarray) -> dict[str, float]:
    """Rank correlation of every uncertain parameter with `outcome` over the draws, strongest first.

    The nominal draw is left out. A constant outcome is moved by nothing: the mapping is empty.
    """
    drawn = np.asarray(outcome, dtype=float)[1:]
    if drawn.size < 3 or np.ptp(drawn) == 0:
        return {}
    ranks = _centred_ranks(drawn)
    found = {
        name: float(_centred_ranks(values[name][1:]) @ ranks)
        for name, parameter in parameters.items()
        if parameter.is_uncertain
    }
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def _draw_one(name: str, parameter: Parameter, samples: int, seed: int) -> np.ndarray:
    values = np.full(samples + 1, float(parameter.value))
    if samples == 0 or not parameter.is_uncertain:
        return values
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    random = np.random.default_rng(int.from_bytes(digest[:16], "little"))
    quantiles = (random.permutation(samples) + random.random(samples)) / samples
    points = np.array([parameter.low, parameter.value, parameter.high], dtype=float)
    if parameter.low > 0:
        drawn = np.exp(np.interp(quantiles, (0, 0.5, 1), np.log(points)))
    else:
        drawn = np.interp(quantiles, (0, 0.5, 1), points)
    values[1:] = np.clip(drawn, parameter.low, parameter.high)
    return values


def _centred_ranks(sample: np.ndarray) -> np.ndarray:
    """Ranks (ties share their mean) with mean 0 and norm 1, so that a dot product is Spearman's correlation."""
    _, group, counts = np.unique(sample, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    ranks = (last - (counts - 1) / 2)[group]
    ranks = ranks - ranks.mean()
    return ranks / np.sqrt(ranks @ ranks)
