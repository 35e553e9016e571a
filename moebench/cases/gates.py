"""Planning an experiment of routing rules: gates x systems, on no machine in particular.

The reference is the rule itself, and its case studies it; a case of any other system says whether that system keeps the
rule. Nothing is timed, so neither topologies nor engines matter; the node type that the suite names is where the cases
stand in tables.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product

from moebench.cases.case import Case
from moebench.cases.layers import chosen_systems, known_systems
from moebench.cases.plan import Context, wanted
from moebench.workloads.errors import InputError
from moebench.workloads.gate import GateWorkload
from moebench.workloads.suite import GateExperiment

ENGINE = "count"


def names(experiment: GateExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment; its own systems must be registered.

    Raises:
        InputError: as `moebench.cases.layers.known_systems`.
    """
    return {
        "gate": [name for gate in experiment.gates for name in (gate.label, gate.name)],
        "dtype": [experiment.dtype],
        "system": known_systems(experiment.systems, f"{source}: experiment {experiment.name}"),
    }


def cases(experiment: GateExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, gate by gate; none where a filter asks for a batch size or the engine is `cluster`.

    A quick look has no training.

    Raises:
        InputError: a rule has no meaning with so many experts.
    """
    filters = context.filters
    if filters.batch_sizes or context.engine == "cluster" or not wanted(filters.dtypes, experiment.dtype):
        return
    gates = [gate for gate in experiment.gates if wanted(filters.gates, gate.label, gate.name)]
    for place in context.places(experiment)[:1]:
        for gate, system in product(gates, chosen_systems(experiment.systems, filters)):
            workload = GateWorkload(
                gate=gate,
                tokens=experiment.tokens,
                experts=experiment.experts,
                capacity_factor=experiment.capacity_factor,
                routings=experiment.routings,
                training=None if filters.quick else experiment.training,
                trained=experiment.in_training.get(gate.label),
                seed=context.suite.seed,
                dtype=experiment.dtype,
            )
            _refuse(workload, f"{context.source}: experiment {experiment.name}")
            yield context.case(experiment, place, system, workload, engine=ENGINE, overrides={})


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together."""
    return case.system, gate_of(case).gate, case.workload.dtype, case.conventions


def gate_of(case: Case) -> GateWorkload:
    """The rule of a case that is about one."""
    if not isinstance(case.workload, GateWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not a gate")
    return case.workload


def _refuse(workload: GateWorkload, where: str) -> None:
    from moebench.workloads.conventions import COMMON
    from moebench.workloads.gates.registry import problem

    rules = (workload.gate, workload.trained or workload.gate)
    reasons = (workload.problem(1), *(problem(gate, COMMON, workload.experts) for gate in rules))
    reason = next(filter(None, reasons), None)
    if reason is not None:
        raise InputError(f"{where}: {reason}")
