"""Planning an experiment of layers: gates x batch sizes x places x systems, under what the paper leaves open.

What the paper does not say is an assumption: the node type, the rule for the number of experts, whether the layer's
input needs a gradient. Every gate runs under the suite's first choice of each; their full cross runs only for the
experiment's `sweep_gates`. As-shipped conventions run under the first choices only, where it lists `shipped_gates` for
those.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from moebench.cases.case import Case
from moebench.cases.plan import Context, Filters, Place, wanted
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.experts import experts_for
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.machine import Topology
from moebench.workloads.suite import LayerExperiment


@dataclass(frozen=True)
class Assumption:
    """One choice of everything that the paper leaves open."""

    gpu: str
    experts: str
    input_gradient: bool
    is_default: bool

    @property
    def labels(self) -> dict[str, str]:
        """The choice as text, by the name of what is assumed."""
        return {"gpu": self.gpu, "experts": self.experts, "input_gradient": "yes" if self.input_gradient else "no"}


def names(experiment: LayerExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment; its own systems must be registered.

    Raises:
        InputError: as `known_systems`.
    """
    return {
        "gate": [name for gate in experiment.gates for name in (gate.label, gate.name)],
        "batch size": experiment.batch_sizes,
        "dtype": [experiment.layer.dtype],
        "system": known_systems(experiment.systems, f"{source}: experiment {experiment.name}"),
    }


def known_systems(own: Iterable[str], where: str) -> list[str]:
    """Every registered system; an experiment's own must be among them. Those of other packages are tried.

    Raises:
        InputError: a system that nobody registered, or options in another order than its name has.
    """
    from moebench.plugins import vet
    from moebench.systems.registry import get, names, stem_of

    registered, own = names(), tuple(own)
    vet(own)
    for name in own:
        if stem_of(name) not in registered:
            raise one_of("system", name, registered, where)
        if get(name).name != name:  # rows and figures go by the name
            raise InputError(f"{where}: write system {name!r} as {get(name).name!r}")
    return list(registered)


def cases(experiment: LayerExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, default assumptions first.

    Raises:
        InputError: a workload has no meaning.
    """
    filters = context.filters
    if not wanted(filters.dtypes, experiment.layer.dtype):
        return
    where = context.places(experiment)
    gates = [g for g in experiment.gates if wanted(_gates(experiment, filters), g.label, g.name)]
    batch_sizes = [b for b in experiment.batch_sizes if wanted(filters.batch_sizes, b)]
    systems = chosen_systems(experiment.systems, filters)
    gpus = [*experiment.node_types, *(place.gpu for place in where)]
    for assumption, gate, batch_size, place in product(assumptions(experiment, gpus), gates, batch_sizes, where):
        if not is_planned(experiment, gate, assumption, place, filters.quick):
            continue
        topology = context.machines(place.topology)
        workload = workload_of(experiment, gate, batch_size, assumption, topology.ranks)
        problem = workload.problem(topology.ranks) or _trace_problem(workload, topology.ranks)
        if problem:
            here = f"{context.source}: experiment {experiment.name}, topology {topology.name}"
            raise InputError(f"{here}: {problem}{_way_out(experiment, assumption, place, context)}")
        own = systems if assumption.is_default or place.asked else _swept(experiment, systems, filters)
        for conventions, system in product(_conventions(experiment, gate, assumption, filters), own):
            yield context.case(
                experiment, place, system, workload,
                conventions=conventions, assumptions=assumption.labels, is_default=assumption.is_default,
            )  # fmt: skip


def _way_out(experiment: LayerExperiment, assumption: Assumption, place: Place, context: Context) -> str:
    """What may be done about a topology of the user's own that a layer can't be laid out on."""
    if not place.asked:
        return ""
    others = [e.name for e in context.suite.experiments if e.kind != experiment.kind]
    instead = f", run experiments without layers (--experiment {' --experiment '.join(others)})" if others else ""
    return (
        f" (rule {assumption.experts!r} of its key layer.experts): choose a topology of another size, such as "
        f"{', '.join(experiment.sizes)}{instead}, or write experts = [\"world\"] in a copy of the suite's file"
    )


def _trace_problem(workload: LayerWorkload, ranks: int) -> str | None:
    """Why a recorded routing can't serve a workload on so many ranks; None where it can, or there is none."""
    if workload.routing.path is None:
        return None
    from moebench.workloads.routing import recorded_shape

    path, wanted = workload.routing.path, ranks * workload.tokens
    tokens, experts = recorded_shape(path)
    if experts != workload.experts:
        return f"experts = {workload.experts}, the recorded routing {path} has {experts}"
    return f"needs {wanted} tokens in all, the recorded routing {path} has {tokens}" if wanted > tokens else None


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together: a check instance tries the system's rule, not the sizes."""
    layer = layer_of(case)
    return case.system, layer.gate, layer.dtype, case.conventions, layer.activation


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why real ranks can't run a case: its system says so, is not there, or raises when asked."""
    from moebench.sim.engine import described
    from moebench.systems.interface import problem
    from moebench.systems.registry import conventions_of, get

    try:
        system, layer = get(case.system), layer_of(case)
        conventions = conventions_of(system, layer.gate, case.conventions)
        reason = problem(system, layer, conventions, topology.ranks)
    except InputError as error:
        reason = str(error)
    except Exception as error:  # of this system alone: the other cases of the run go on
        return "failed", described(error)
    return None if reason is None else ("unsupported", reason)


def layer_of(case: Case) -> LayerWorkload:
    """The layer of a case that is about one."""
    if not isinstance(case.workload, LayerWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not a layer")
    return case.workload


def assumptions(experiment: LayerExperiment, gpus: Iterable[str]) -> list[Assumption]:
    """The full cross of what the experiment leaves open, over node types `gpus`; its first choices first."""
    first = (experiment.node_types[0], experiment.layer.experts[0], experiment.layer.input_gradient[0])
    crossed = [
        Assumption(gpu, rule, gradient, (gpu, rule, gradient) == first)
        for gpu in dict.fromkeys(gpus)
        for rule in experiment.layer.experts
        for gradient in experiment.layer.input_gradient
    ]
    return sorted(crossed, key=lambda assumption: not assumption.is_default)


def is_planned(experiment: LayerExperiment, gate: GateSpec, assumption: Assumption, place: Place, quick: bool) -> bool:
    """Whether a gate runs under an assumption at a place."""
    if assumption.gpu != place.gpu:
        return False
    layer = experiment.layer
    first_layer = (assumption.experts, assumption.input_gradient) == (layer.experts[0], layer.input_gradient[0])
    if assumption.is_default or (place.asked and first_layer):
        return True
    return not quick and bool({gate.name, gate.label} & set(experiment.sweep_gates))


def workload_of(
    experiment: LayerExperiment, gate: GateSpec, batch_size: int, assumption: Assumption, ranks: int
) -> LayerWorkload:
    """The workload of one point."""
    layer = experiment.layer
    return LayerWorkload(
        gate=gate,
        batch_size=batch_size,
        sequence=layer.sequence,
        d_model=layer.d_model,
        d_ffn=layer.d_ffn,
        experts=experts_for(assumption.experts, ranks),
        dtype=layer.dtype,
        capacity_factor=layer.capacity_factor,
        activation=layer.activation,
        input_gradient=assumption.input_gradient,
        routing=layer.routing,
    )


def chosen_systems(own: Iterable[str], filters: Filters) -> list[str]:
    """An experiment's own, or those of the filter's names that are systems: others may be of other kinds."""
    from moebench.plugins import vet
    from moebench.systems.registry import get, names, stem_of

    if not filters.systems:
        return list(dict.fromkeys(own))
    registered = names()
    vet(filters.systems)
    return [get(name).name for name in dict.fromkeys(filters.systems) if stem_of(name) in registered]


def _gates(experiment: LayerExperiment, filters: Filters) -> Sequence[str]:
    """What the user asked for; else all, and in a hurry those that are swept, which the suite cares most about."""
    return filters.gates or (experiment.sweep_gates if filters.quick else ())


def _swept(experiment: LayerExperiment, systems: Sequence[str], filters: Filters) -> Sequence[str]:
    """The systems that run under other assumptions than the first; those that the user named all do."""
    if filters.systems or not experiment.sweep_systems:
        return systems
    return [name for name in systems if name in experiment.sweep_systems]


def _conventions(
    experiment: LayerExperiment, gate: GateSpec, assumption: Assumption, filters: Filters
) -> Sequence[str]:
    shipped = experiment.shipped_gates or (gate.label,)
    if filters.quick or not assumption.is_default or not {gate.name, gate.label} & set(shipped):
        return [name for name in experiment.conventions if name == "common"]
    return experiment.conventions
