"""Links from timed collectives: rates and latencies of a described node, scaled until the network model fits the log.

Two numbers are fitted to the logs of one node, and two to those of several: a factor on rates, and one on times. How
times are shared out among start, latency and messages stays as the described node has it: a log of one collective on
one number of GPUs can't tell them apart. What is priced is the collective itself, by the network model that `sim` uses,
so that the errors of the fit are those of the predictions that are made with it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moebench.imports.nccl_log import Log, Point
from moebench.local.fit import Range, range_of
from moebench.program import Collective
from moebench.sim.network import collective_time_s
from moebench.workloads.machine import Topology

# Of the links inside a node, and between nodes.
RATES = (("link.bandwidth", "link.eager.bandwidth", "bridge.bandwidth"), ("nic.bandwidth",))
TIMES = (("collective.fixed", "link.latency", "link.message", "link.eager.latency"), ("nic.latency", "nic.message"))
FABRIC = "fabric.share"
_SPAN = (np.log(100.0), np.log(1000.0))  # either way, of a rate and of a time
_GRID, _ZOOMS = 33, 4


@dataclass(frozen=True)
class Fitted:
    """What a fit found.

    Attributes:
        parameters: of the topology, those that were fitted; errors: by log, of the model at each of its sizes.
    """

    parameters: Mapping[str, Range]
    errors: Sequence[np.ndarray]


@dataclass
class _Values:
    """The parameters of a topology, one set after another replaced by what was fitted."""

    topology: Topology
    fitted: dict[str, float] = field(default_factory=dict)

    def scaled(self, names: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Draws: every parameter, those that are named times their factors."""
        draws = len(next(iter(names.values()))) if names else 1
        found = {}
        for name, parameter in self.topology.parameters().items():
            value = np.full(draws, self.fitted.get(name, parameter.value))
            found[name] = value * names[name] if name in names else value
        return found


def fit_links(logs: Sequence[Log], topology_of: Mapping[tuple[int, int], Topology]) -> Fitted:
    """Fit the links to logs; those of one node first, which the others then build upon.

    Args:
        topology_of: the described cluster for each log's nodes and GPUs a node.
    """
    values: dict[str, float] = {}
    ranges: dict[str, Range] = {}
    for between in (False, True):
        own = [log for log in logs if (log.nodes > 1) == between]
        if not own:
            continue
        rates, times = _names(between, alone=len(own) == len(logs))
        if between:
            values[FABRIC] = 1.0  # it is in the rate of the NICs, all of which were busy
            ranges[FABRIC] = Range(1.0, 1.0, 1.0)
        whole = _factors(own, topology_of, values, rates, times)
        parts = [_factors(part, topology_of, values, rates, times) for part in _parts(own)]
        base = topology_of[own[0].nodes, own[0].gpus_per_node].parameters()
        for names, place in ((rates, 0), (times, 1)):
            for name in names:
                if name in base:
                    ranges[name] = _range(base[name].value, whole[place], [part[place] for part in parts])
                    values[name] = base[name].value * whole[place]
    errors = [_predicted(log, _Values(_of(log, topology_of), values), {})[0] / _seconds(log) - 1 for log in logs]
    return Fitted(ranges, errors)


def _names(between: bool, alone: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rates and times that are fitted; where only several nodes were timed, the start of a collective too."""
    times = (*TIMES[1], "collective.fixed") if between and alone else TIMES[between]
    return RATES[between], times


def _range(base: float, whole: float, parts: Sequence[float]) -> Range:
    found = range_of([base * factor for factor in (whole, *parts)])
    return Range(base * whole, min(found.low, base * whole), max(found.high, base * whole))


def _parts(logs: Sequence[Log]) -> list[list[Log]]:
    """Every other size, and each column: fits to these differ as much as the next measurement would."""
    parts = []
    columns = min(len(point.seconds) for log in logs for point in log.points)
    for column in range(columns):
        for first in (0, 1):
            parts.append([_part(log, first, column) for log in logs])
    return parts


def _part(log: Log, first: int, column: int) -> Log:
    points = tuple(Point(p.size_bytes, (p.seconds[column],)) for p in log.points[first::2])
    return Log(log.path, log.collective, log.nodes, log.gpus_per_node, log.gpu, points)


def _factors(
    logs: Sequence[Log],
    topology_of: Mapping[tuple[int, int], Topology],
    known: Mapping[str, float],
    rates: Sequence[str],
    times: Sequence[str],
) -> tuple[float, float]:
    """The factors on rates and times with the least mean error in the logarithm: a grid, then finer ones around it.

    Of factors that fit equally well the ones nearest to 1 are taken.
    """
    middle, span = np.zeros(2), np.array(_SPAN)
    for _ in range(_ZOOMS):
        axes = [np.linspace(m - s, m + s, _GRID) for m, s in zip(middle, span)]
        rate, time = (axis.ravel() for axis in np.meshgrid(*axes))
        factors = {name: np.exp(rate) for name in rates} | {name: np.exp(time) for name in times}
        errors = [
            np.abs(np.log(_predicted(log, _Values(_of(log, topology_of), dict(known)), factors) / _seconds(log)))
            for log in logs
        ]
        loss = np.concatenate(errors, axis=1).mean(axis=1) + 1e-6 * (np.abs(rate) + np.abs(time))
        best = int(np.argmin(loss))
        middle, span = np.array([rate[best], time[best]]), 2 * span * 2 / (_GRID - 1)
    return float(np.exp(middle[0])), float(np.exp(middle[1]))


def _of(log: Log, topology_of: Mapping[tuple[int, int], Topology]) -> Topology:
    return topology_of[log.nodes, log.gpus_per_node]


def _seconds(log: Log) -> np.ndarray:
    """The median of each size's columns [points]."""
    return np.array([np.median(point.seconds) for point in log.points])


def _predicted(log: Log, values: _Values, factors: Mapping[str, np.ndarray]) -> np.ndarray:
    """Seconds of each size under every draw [draws, points]."""
    draws = values.scaled(factors)
    whole = log.collective == "all_reduce"  # nccl-tests state the buffer of a rank, moebench one rank's part of others
    found = []
    for point in log.points:
        size = point.size_bytes if whole else max(1, point.size_bytes // log.ranks)
        collective = Collective(log.collective, "world", range(log.ranks), size)
        found.append(collective_time_s(collective, values.topology, draws))
    return np.stack([np.broadcast_to(seconds, (len(next(iter(draws.values()))),)) for seconds in found], axis=1)
