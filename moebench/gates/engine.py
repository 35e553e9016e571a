"""The `count` engine: rules and parts run for real on seeded data, and what they do is counted; no clock matters."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from moebench import kinds
from moebench.cases.case import Case
from moebench.results.rows import Row, row_of, without_number
from moebench.sim.engine import POOL_THRESHOLD, described
from moebench.sim.workers import workers
from moebench.workloads.machine import Topology
from moebench.workloads.suite import Suite

COUNTING_S = 0.5  # of a routing rule: its short training is most of it


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
    """What its kind counts of a case."""
    name = hardware[case.topology]
    try:
        return kinds.of(case.workload.kind, "counted")(case, name)
    except Exception as error:  # of this case alone: the others of the run go on
        return [without_number(case, name, "failed", described(error))]


def rows_of_rule(case: Case, hardware: str) -> list[Row]:
    """That the system keeps the rule; of the reference, also what the rule does."""
    from moebench.gates import study
    from moebench.systems.registry import reference

    supported = row_of(case, hardware, case.workload.metric, "1", 1.0)
    return [supported] if case.system != reference().name else [supported, *study.rows_of_rule(case, hardware)]


def expected(case: Case) -> tuple[float, str]:
    """Time and status of a rule: what it does is counted once, by the definition that all systems are held to."""
    from moebench.checks.correctness import rule_refusal
    from moebench.systems.registry import reference

    refused = rule_refusal(case)
    if refused is not None:
        return 0.0, refused.status
    return (COUNTING_S if case.system == reference().name else 0.0), ""
