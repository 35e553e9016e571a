"""From a suite and the user's filters to the list of cases: which points run, under which assumptions.

What the paper does not say is an assumption: the node type, the rule for the number of experts, whether the layer's
input needs a gradient. Every gate runs under the suite's first choice of each; their full cross runs only for the
experiment's `sweep_gates`. As-shipped conventions run under the first choices only.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from moebench.case import Case
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.experts import experts_for
from moebench.workloads.layer import GateSpec, LayerWorkload
from moebench.workloads.machine import Topology
from moebench.workloads.places import ON_THIS_MACHINE, THIS_MACHINE
from moebench.workloads.suite import Experiment, Suite

ENGINES = ("auto", "local", "cluster", "sim")
QUICK_SAMPLES = 32

Load = Callable[[str], Topology]


@dataclass(frozen=True)
class Filters:
    """What the user asked for; an empty tuple keeps everything.

    Attributes:
        topologies: a topology of the suite (`4x8-titan-rtx`), one of its sizes (`4x8`) or node types (`titan-rtx`), or
            any other topology by name or file, which then runs in place of the suite's.
        overrides: `--set` values, parameter name -> text.
        quick: first choice of every assumption, common conventions, `QUICK_SAMPLES` draws.
    """

    experiments: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    topologies: tuple[str, ...] = ()
    overrides: Mapping[str, str] = field(default_factory=dict)
    quick: bool = False

    @property
    def narrow(self) -> bool:
        """Whether anything of the suite is left out."""
        return bool(
            self.experiments or self.systems or self.gates or self.batch_sizes or self.dtypes or self.topologies
        )

    @property
    def is_whole(self) -> bool:
        """Whether the whole suite runs, on the machines as their files describe them."""
        return not (self.narrow or self.quick or self.overrides)


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


@dataclass(frozen=True)
class Place:
    """A topology of an experiment: its size, node type, name, and whether the user named it."""

    size: str
    gpu: str
    topology: str
    asked: bool = False


def quickened(suite: Suite) -> Suite:
    """The suite with the draws of `--quick`."""
    return replace(suite, samples=min(suite.samples, QUICK_SAMPLES))


class Machines:
    """Topologies by name, each loaded once, with the user's overrides applied."""

    def __init__(self, overrides: Mapping[str, str] | None = None, load: Load | None = None) -> None:
        self._overrides = dict(overrides or {})
        self._given = load
        self._loaded: dict[str, Topology] = {}

    @cached_property
    def _load(self) -> Load:
        if self._given is not None:
            return self._given
        from moebench.workloads.load import load_topology

        return load_topology

    def __call__(self, name: str) -> Topology:
        """The topology of that name or file."""
        if name not in self._loaded:
            topology = self._load(name)
            if self._overrides:
                from moebench.workloads.load import with_overrides

                topology = with_overrides(topology, self._overrides)
            known = self._loaded.setdefault(topology.name, topology)
            if known.digest != topology.digest:
                raise InputError(f"topology {name}: another machine of this run is named {topology.name}; rename one")
            self._loaded[name] = known
        return self._loaded[name]


def plan(suite: Suite, filters: Filters, engine: str = "auto", machines: Machines | None = None) -> list[Case]:
    """The cases of a run, default assumptions first; each distinct computation once.

    Raises:
        InputError: a filter names nothing (the text lists what there is), or a workload has no meaning.
    """
    if engine not in ENGINES:
        raise one_of("engine", engine, ENGINES)
    machines = machines or Machines(filters.overrides)
    _check_names(suite, filters)
    found: dict[tuple[object, ...], Case] = {}
    for experiment in chosen_experiments(suite, filters):
        if not _wanted(filters.dtypes, experiment.layer.dtype):
            continue
        for case in _cases(suite, experiment, filters, engine, machines):
            key = (case.experiment, case.system, case.workload, case.topology, case.conventions, case.engine)
            found.setdefault(key, case)
    if not found:
        raise InputError(f"suite {suite.name}: no case is left after the filters")
    return list(found.values())


def chosen_experiments(suite: Suite, filters: Filters) -> list[Experiment]:
    """The experiments that the filters keep."""
    _known("experiment", filters.experiments, [e.name for e in suite.experiments], suite)
    return [e for e in suite.experiments if _wanted(filters.experiments, e.name)]


def places(experiment: Experiment, filters: Filters, machines: Machines) -> list[Place]:
    """Where an experiment runs, node types in the suite's order."""
    own = [Place(size, gpu, f"{size}-{gpu}") for gpu in experiment.node_types for size in experiment.sizes]
    if not filters.topologies:
        return own
    found: dict[str, Place] = {}
    for name in filters.topologies:
        matches = [replace(p, asked=True) for p in own if name in (p.topology, p.size, p.gpu)]
        for place in matches or [_elsewhere(name, machines)]:
            found.setdefault(place.topology, place)
    return list(found.values())


def _elsewhere(name: str, machines: Machines) -> Place:
    topology = machines(name)
    size = f"{topology.nodes}x{topology.gpus_per_node}"
    return Place(size, topology.name.removeprefix(f"{size}-"), topology.name, asked=True)


def assumptions(experiment: Experiment, gpus: Iterable[str]) -> list[Assumption]:
    """The full cross of what the experiment leaves open, over node types `gpus`; its first choices first."""
    first = (experiment.node_types[0], experiment.layer.experts[0], experiment.layer.input_gradient[0])
    crossed = [
        Assumption(gpu, rule, gradient, (gpu, rule, gradient) == first)
        for gpu in dict.fromkeys(gpus)
        for rule in experiment.layer.experts
        for gradient in experiment.layer.input_gradient
    ]
    return sorted(crossed, key=lambda assumption: not assumption.is_default)


def is_planned(experiment: Experiment, gate: GateSpec, assumption: Assumption, place: Place, quick: bool) -> bool:
    """Whether a gate runs under an assumption at a place."""
    if assumption.gpu != place.gpu:
        return False
    layer = experiment.layer
    first_layer = (assumption.experts, assumption.input_gradient) == (layer.experts[0], layer.input_gradient[0])
    if assumption.is_default or (place.asked and first_layer):
        return True
    return not quick and bool({gate.name, gate.label} & set(experiment.sweep_gates))


def workload_of(
    experiment: Experiment, gate: GateSpec, batch_size: int, assumption: Assumption, ranks: int
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


def _cases(
    suite: Suite, experiment: Experiment, filters: Filters, engine: str, machines: Machines
) -> Iterator[Case]:
    where = places(experiment, filters, machines)
    gates = [g for g in experiment.gates if _wanted(filters.gates, g.label, g.name)]
    batch_sizes = [b for b in experiment.batch_sizes if _wanted(filters.batch_sizes, b)]
    systems = list(dict.fromkeys(filters.systems or experiment.systems))
    gpus = [*experiment.node_types, *(place.gpu for place in where)]
    for assumption, gate, batch_size, place in product(assumptions(experiment, gpus), gates, batch_sizes, where):
        if not is_planned(experiment, gate, assumption, place, filters.quick):
            continue
        topology = machines(place.topology)
        workload = workload_of(experiment, gate, batch_size, assumption, topology.ranks)
        problem = workload.problem(topology.ranks)
        if problem:
            raise InputError(f"{_source(suite)}: experiment {experiment.name}, topology {topology.name}: {problem}")
        for conventions, system in product(_conventions(experiment, assumption, filters), systems):
            yield Case(
                suite=suite.name,
                experiment=experiment.name,
                system=system,
                workload=workload,
                topology=topology.name,
                size=place.size,
                engine=engine_of(topology, engine),
                conventions=conventions,
                assumptions=assumption.labels,
                is_default=assumption.is_default,
                overrides=dict(filters.overrides),
            )


def engine_of(topology: Topology, engine: str) -> str:
    """The engine of a case: `auto` measures what stands on this machine and simulates every other.

    Raises:
        InputError: `local` was asked for a machine that is not this one.
    """
    has_ranks_here = topology.node_type in ON_THIS_MACHINE
    is_one_here = topology.ranks == 1 and (has_ranks_here or topology.hardware.name == THIS_MACHINE)
    if engine == "auto":
        return "local" if is_one_here else "cluster" if has_ranks_here else "sim"
    if engine == "local" and not is_one_here:
        raise InputError(
            f"engine local measures one process on this machine, and topology {topology.name} names "
            f"{topology.ranks} x {topology.hardware.title}; use --engine sim, or --topology 1x1-{THIS_MACHINE}"
        )
    return engine


def _conventions(experiment: Experiment, assumption: Assumption, filters: Filters) -> Sequence[str]:
    if filters.quick or not assumption.is_default:
        return [name for name in experiment.conventions if name == "common"]
    return experiment.conventions


def _check_names(suite: Suite, filters: Filters) -> None:
    """Refuse a filter that names nothing, listing what there is."""
    if suite.reported is not None:
        from moebench.claims.reported import papers

        if suite.reported not in papers():
            raise one_of("reported", suite.reported, papers(), _source(suite))
    experiments = chosen_experiments(suite, filters)
    gates = [name for e in experiments for g in e.gates for name in (g.label, g.name)]
    _known("gate", filters.gates, gates, suite)
    _known("batch size", filters.batch_sizes, [b for e in experiments for b in e.batch_sizes], suite)
    _known("dtype", filters.dtypes, [e.layer.dtype for e in experiments], suite)
    from moebench.systems.registry import systems

    registered = systems()
    for name in filters.systems:  # any registered system may join a comparison
        if name not in registered:
            raise one_of("system", name, registered)
    for experiment in experiments:
        for name in experiment.systems:
            if name not in registered:
                raise one_of("system", name, registered, f"{_source(suite)}: experiment {experiment.name}")


def _known(what: str, wanted: Sequence, have: Sequence, suite: Suite) -> None:
    for name in wanted:
        if name not in have:
            raise one_of(what, name, [str(h) for h in have], f"suite {suite.name}")


def _wanted(wanted: Sequence, *names: object) -> bool:
    return not wanted or any(name in wanted for name in names)


def _source(suite: Suite) -> str:
    return suite.source_path or f"suite {suite.name}"
