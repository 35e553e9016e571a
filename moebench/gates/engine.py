"""The `count` engine: rules run for real on seeded data, and what they do is counted; no clock, no machine matters."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from moebench.case import Case
from moebench.results.rows import Row, row_of, without_number
from moebench.sim.engine import POOL_THRESHOLD, described
from moebench.sim.workers import workers
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite


def run_cases(
    cases: Sequence[Case], topologies: Mapping[str, Topology], suite: Suite, jobs: int = 1
) -> Iterator[list[Row]]:
    """The rows of one case at a time; of a case that raises, one that says so.

    Args:
        cases: whose systems passed the correctness gate.
        jobs: processes to use.
    """
    rows_of = partial(rows_of_case, {name: topology.hardware.name for name, topology in topologies.items()})
    if jobs < 2 or len(cases) < POOL_THRESHOLD:
        yield from map(rows_of, cases)
        return
    with workers(jobs) as pool:
        yield from pool.map(rows_of, cases)


def rows_of_case(hardware: Mapping[str, str], case: Case) -> list[Row]:
    """That the system keeps the rule; of the reference, also what the rule does."""
    from moebench.gates.study import rows_of_rule
    from moebench.systems.registry import reference

    name = hardware[case.topology]
    supported = row_of(case, name, case.workload.metric, "1", 1.0)
    if case.system != reference().name:
        return [supported]
    try:
        return [supported, *rows_of_rule(case, name)]
    except Exception as error:  # of this rule alone: the other cases of the run go on
        return [without_number(case, name, "failed", described(error))]
