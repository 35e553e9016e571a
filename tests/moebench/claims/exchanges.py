"""Rows of exchanges by a formula that a test can recompute, without a simulation."""

from dataclasses import replace
from functools import cache

import numpy as np

from moebench.cases.plan import Filters, plan
from moebench.claims.evidence import Evidence
from moebench.claims.reported import claims_of
from moebench.results.rows import row_of
from moebench.sim.uncertainty import draw
from moebench.workloads.load import load_topology
from tests.moebench.suites import of_kind

CLAIMS = {claim.id: claim for claim in claims_of("hetu")}
SAMPLES = 48
FACTORS = np.geomspace(1 / 1024, 1024, 41)


@cache
def hetu():
    """The experiment of exchanges alone, few draws."""
    return replace(of_kind("hetu", "exchange"), samples=SAMPLES)


@cache
def machine(name):
    """A topology and the draws of its parameters."""
    topology = load_topology(name)
    return topology, draw(topology.parameters(), SAMPLES, hetu().seed)


@cache
def all_cases():
    """The cases of the experiment."""
    return plan(hetu(), Filters())


def evidence(speedup_of, filters=None, by_message=None):
    """Rows of a run in which flat takes a second and any other exchange 1 / `speedup_of(case, parameters)`.

    Args:
        speedup_of: a number, or one a draw; NaN: out of memory.
        by_message: `(case, factors) -> speedups` where the cost of a message is so many times its own.
    """
    machines, rows = {}, []
    for case in plan(hetu(), filters) if filters else all_cases():
        topology, parameters = machine(case.topology)
        machines[case.topology] = topology
        ones = np.ones(SAMPLES + 1)
        times = ones if case.system == "flat" else ones / speedup_of(case, parameters)
        fits = not np.isnan(times[0])
        status = "passed" if fits else "out-of-memory"
        row = row_of(case, "gpu", "collective_time", "s", float(times[0]) if fits else None, status=status)
        rows.append(replace(row, draws=tuple(times)))
        if by_message is not None and case.is_default:
            values = topology.link_parameters["nic.message"].value * FACTORS
            changed = np.ones(41) if case.system == "flat" else 1 / by_message(case, FACTORS)
            detail = {"parameter": "nic.message", "values": list(values), "times_s": list(changed)}
            rows.append(row_of(case, "gpu", "time_if", "s", None, detail=detail))
    return Evidence(rows, machines)


def payload_of(case):
    """Bytes of a case."""
    return case.workload.payload_bytes
