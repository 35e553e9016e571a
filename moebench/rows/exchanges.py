"""What follows from the time of an exchange: its bandwidth, and the time that it takes on other machines.

The other machines are this one with one parameter of its links changed, by up to a thousand times either way, and this
one with faster links inside its nodes and another cost of a message between them: from both a report reads what a
network would have to be for a claim to hold. Each is a replay of the same program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from moebench.cases.case import Case
from moebench.cases.exchanges import exchange_of
from moebench.results.rows import Row, row_of
from moebench.workloads.machine import Parameter, Topology
from moebench.workloads.parameters import LINK_SPECS

LEFT_OUT = ("region_time", "flops")
NICS = "nics_per_node"
STEPS = 41  # half an octave each
MOST_FACTOR = 2.0**10
# The two that a gain is made of: what an exchange through leaders pays, and what it saves.
INSIDE = ("link.bandwidth", "bridge.bandwidth")
MESSAGE = "nic.message"
FABRIC = "fabric.share"
FASTER = np.geomspace(1, MOST_FACTOR, 11)
DEARER = np.geomspace(1 / 2**6, MOST_FACTOR, 33)


def finish(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """The rows of a case: all but those of regions and operations, of which an exchange has one and none."""
    return [row for row in rows if row.metric not in LEFT_OUT] + derived(case, topology, rows)


def derived(case: Case, topology: Topology, rows: Sequence[Row]) -> list[Row]:
    """Rows that follow from the rows of an engine.

    Metrics: `algorithmic_bandwidth`, the payload of a rank over the time. Where it was simulated also `time_if`, the
    time by the value of one parameter (detail: `parameter`, `values`, `times_s`): on every machine of the share that
    the fabric carries, on the suite's first choice of machine of all parameters of the links. There also
    `time_if_both`, where a message between nodes costs something: the time by how many times as fast everything inside
    a node is and by that cost (detail: `faster`, `message_s`, and `times_s`, of one of `faster` after another).
    """
    times = [row for row in rows if row.metric == case.workload.metric and row.sample is None and row.value]
    found = [_bandwidth(case, row) for row in times]
    if case.engine == "sim" and times:
        known = topology.link_parameters
        found += _of_other_machines(case, topology, tuple(known) if case.is_default else (FABRIC,) * (FABRIC in known))
    return found


def _bandwidth(case: Case, row: Row) -> Row:
    payload, time_s = exchange_of(case).payload_bytes, row.value
    assert time_s
    interval = {"low": payload / row.high, "high": payload / row.low} if row.low and row.high else {}
    return row_of(case, row.hardware, "algorithmic_bandwidth", "B/s", payload / time_s, **interval)


def _of_other_machines(case: Case, topology: Topology, names: Sequence[str]) -> list[Row]:
    from moebench.sim.catalogue import Catalogue
    from moebench.sim.replay import replay
    from moebench.sim.uncertainty import nominal
    from moebench.trace.alone import programs_of

    programs, as_it_is = Catalogue(programs_of(case, topology)), nominal(topology.parameters())
    known, hardware = topology.link_parameters, topology.hardware.name
    grids = {name: grid(name, known[name]) for name in names if known[name].value}
    if not grids:
        return []
    times_s = replay(programs, topology, _one_changed(grids, as_it_is), has_timelines=False).step_time_s
    parts = np.split(times_s, np.cumsum([len(values) for values in grids.values()])[:-1])
    found = [_time_if(case, hardware, *one) for one in zip(grids, grids.values(), parts)]
    if not case.is_default:
        return found
    nics = _nics(topology)
    shared_s = [replay(programs, replace(topology, nics_per_node=n), as_it_is, False).step_time_s[0] for n in nics]
    found.append(_time_if(case, hardware, NICS, nics, np.array(shared_s)))
    if topology.nodes > 1 and MESSAGE in grids:
        drawn = _two_changed(as_it_is)
        times_s = replay(programs, topology, drawn, has_timelines=False).step_time_s
        found.append(_time_if_both(case, hardware, drawn, times_s))
    return found


def grid(name: str, parameter: Parameter) -> np.ndarray:
    """Values of a parameter around its own, which is in the middle, as far as its bounds allow."""
    values = parameter.value * np.geomspace(1 / MOST_FACTOR, MOST_FACTOR, STEPS)
    spec = LINK_SPECS[name]
    return np.unique(np.clip(values, spec.least, spec.most))


def _nics(topology: Topology) -> np.ndarray:
    """Doubled up to one a GPU."""
    counts = [2**n for n in range(topology.gpus_per_node.bit_length()) if 2**n <= topology.gpus_per_node]
    return np.array(sorted({*counts, topology.nics_per_node}))


def _one_changed(grids: Mapping[str, np.ndarray], as_it_is: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Draws in which one parameter after another takes the values of its grid."""
    count = sum(len(values) for values in grids.values())
    drawn = {name: np.full(count, value[0]) for name, value in as_it_is.items()}
    start = 0
    for name, values in grids.items():
        drawn[name][start : start + len(values)] = values
        start += len(values)
    return drawn


def _two_changed(as_it_is: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Draws over the plane of both; all costs of a message for one speed inside before the next."""
    drawn = {name: np.full(FASTER.size * DEARER.size, value[0]) for name, value in as_it_is.items()}
    for name in INSIDE:
        if name in drawn:
            drawn[name] = drawn[name] * np.repeat(FASTER, DEARER.size)
    drawn[MESSAGE] = drawn[MESSAGE] * np.tile(DEARER, FASTER.size)
    return drawn


def _time_if_both(case: Case, hardware: str, drawn: Mapping[str, np.ndarray], times_s: np.ndarray) -> Row:
    costs_s = drawn[MESSAGE][: DEARER.size]
    detail = {"faster": _digits(FASTER), "message_s": _digits(costs_s), "times_s": _digits(times_s)}
    return row_of(case, hardware, "time_if_both", "s", None, detail=detail)


def _time_if(case: Case, hardware: str, name: str, values: np.ndarray, times_s: np.ndarray) -> Row:
    detail = {"parameter": name, "values": _digits(values), "times_s": _digits(times_s)}
    return row_of(case, hardware, "time_if", "s", None, detail=detail)


def _digits(values: np.ndarray) -> list[float]:
    """Six digits, as of draws."""
    return [float(f"{value:.6g}") for value in values]
