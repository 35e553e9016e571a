"""From a suite and the user's filters to the list of cases: which points run, where, and on which engine.

What is planned of one experiment is its kind's affair (moebench.kinds); filters, machines and places are everybody's.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from moebench import kinds
from moebench.cases.case import Case
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.machine import Topology
from moebench.workloads.places import ON_THIS_MACHINE, THIS_MACHINE
from moebench.workloads.suite import AnyExperiment, Experiment, Suite
from moebench.workloads.workload import Workload

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
        quick: first choice of every assumption, common conventions, `QUICK_SAMPLES` draws; of layers the gates that are
            swept, where the suite names some.
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
        self._plain: dict[str, Topology] = {}
        self._loaded: dict[str, Topology] = {}

    @cached_property
    def _load(self) -> Load:
        if self._given is not None:
            return self._given
        from moebench.workloads.load import load_topology

        return load_topology

    def known(self, name: str) -> Topology:
        """The topology as it is described, without overrides."""
        if name not in self._plain:
            self._plain[name] = self._load(name)
        return self._plain[name]

    def __call__(self, name: str) -> Topology:
        """The topology of that name or file."""
        if name not in self._loaded:
            topology = self.known(name)
            if self._overrides:
                from moebench.workloads.load import with_overrides

                topology = with_overrides(topology, self._overrides)
            known = self._loaded.setdefault(topology.name, topology)
            if known.digest != topology.digest:
                raise InputError(f"topology {name}: another machine of this run is named {topology.name}; rename one")
            self._loaded[name] = known
        return self._loaded[name]


@dataclass(frozen=True)
class Context:
    """What every kind needs to plan an experiment.

    Attributes:
        own_places: names of all topologies, sizes and node types of the experiments that run: a filter that names one
            of them means nothing to an experiment without it.
    """

    suite: Suite
    filters: Filters
    engine: str
    machines: Machines
    own_places: Collection[str] = ()

    @property
    def source(self) -> str:
        """Where the suite stands, for an error."""
        return source(self.suite)

    def places(self, experiment: Experiment) -> list[Place]:
        """Where an experiment runs, node types in the suite's order."""
        own = [Place(*_size_and_gpu(name), name) for name in experiment.topologies]
        if not self.filters.topologies:
            return own
        found: dict[str, Place] = {}
        for name in self.filters.topologies:
            matches = [replace(p, asked=True) for p in own if name in (p.topology, p.size, p.gpu)]
            for place in matches or ([] if name in self.own_places else [self._elsewhere(name)]):
                found.setdefault(place.topology, place)
        return list(found.values())

    def case(self, experiment: Experiment, place: Place, system: str, workload: Workload, **more: Any) -> Case:
        """A case of an experiment at a place, on the engine and with the overrides that the user chose."""
        topology = self.machines(place.topology)  # a run that is resumed knows those of its cases alone
        chosen: dict[str, Any] = {
            "suite": self.suite.name,
            "experiment": experiment.name,
            "system": system,
            "workload": workload,
            "topology": topology.name,
            "size": place.size,
            "overrides": dict(self.filters.overrides),
        }
        return Case(**chosen | {"engine": more.pop("engine", None) or engine_of(topology, self.engine)} | more)

    def _elsewhere(self, name: str) -> Place:
        topology = self.machines(name)
        size = f"{topology.nodes}x{topology.gpus_per_node}"
        return Place(size, topology.name.removeprefix(f"{size}-"), topology.name, asked=True)


def plan(suite: Suite, filters: Filters, engine: str = "auto", machines: Machines | None = None) -> list[Case]:
    """The cases of a run, default assumptions first; each distinct computation once.

    Raises:
        InputError: a filter names nothing (the text lists what there is), or a workload has no meaning.
    """
    if engine not in ENGINES:
        raise one_of("engine", engine, ENGINES)
    is_new, machines = machines is None, machines or Machines(filters.overrides)
    _check_names(suite, filters)
    chosen = chosen_experiments(suite, filters)
    if is_new and not filters.topologies:
        _check_places(suite, chosen, machines)
    context = Context(suite, filters, engine, machines, place_names(chosen))
    found: dict[tuple[object, ...], Case] = {}
    for experiment in chosen:
        for case in kinds.of(experiment.kind, "cases")(experiment, context):
            key = (case.experiment, case.system, case.workload, case.topology, case.conventions, case.engine)
            found.setdefault(key, case)
    if not found:
        raise InputError(f"suite {suite.name}: no case is left after the filters {_in_words(filters, engine)}")
    return sorted(found.values(), key=lambda case: not case.is_default)


def _in_words(filters: Filters, engine: str) -> str:
    """The options that a user gave, of which one leaves out what the others name."""
    said = [
        f"--{option} {value}"
        for option, values in (
            ("experiment", filters.experiments),
            ("system", filters.systems),
            ("gate", filters.gates),
            ("batch-size", filters.batch_sizes),
            ("dtype", filters.dtypes),
            ("topology", filters.topologies),
            ("engine", () if engine == "auto" else (engine,)),
        )
        for value in values
    ]
    return " ".join([*said, "--quick"] if filters.quick else said)


def _check_places(suite: Suite, experiments: Sequence[AnyExperiment], machines: Machines) -> None:
    """Refuse a topology or node type that there is not, naming whose it is."""
    for experiment in experiments:
        for name in experiment.topologies:
            try:
                machines.known(name)
            except InputError as error:
                raise InputError(f"{source(suite)}: experiment {experiment.name}: {error}") from None


def chosen_experiments(suite: Suite, filters: Filters) -> list[AnyExperiment]:
    """The experiments that the filters keep."""
    _known("experiment", filters.experiments, [e.name for e in suite.experiments], suite)
    return [e for e in suite.experiments if wanted(filters.experiments, e.name)]


def place_names(experiments: Sequence[Experiment]) -> set[str]:
    """Sizes, node types and topologies of some experiments."""
    topologies = [name for e in experiments for name in e.topologies]
    return {part for name in topologies for part in (name, *_size_and_gpu(name))}


def _size_and_gpu(topology: str) -> tuple[str, str]:
    """`4x8` and `titan-rtx` of `4x8-titan-rtx`."""
    size, _, gpu = topology.partition("-")
    return size, gpu


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


def _check_names(suite: Suite, filters: Filters) -> None:
    """Refuse a filter that names nothing, listing what there is."""
    if suite.reported is not None:
        from moebench.claims.reported import load_claims, own_file

        file = own_file(suite.reported, source(suite))
        if file is not None:
            load_claims(file)  # refuses what it can't read, before anything runs
    known: dict[str, list[object]] = {}
    for experiment in chosen_experiments(suite, filters):
        for what, names in kinds.of(experiment.kind, "names")(experiment, source(suite)).items():
            known.setdefault(what, []).extend(names)
    for what, wanted_names in (
        ("gate", filters.gates),
        ("batch size", filters.batch_sizes),
        ("dtype", filters.dtypes),
    ):
        _known(what, wanted_names, known.get(what, []), suite)
    for name in filters.systems:  # any registered system may join a comparison, with options too
        if name.split("+")[0] not in known["system"]:
            raise one_of("system", name, map(str, known["system"]))


def _known(what: str, wanted_names: Sequence, have: Sequence, suite: Suite) -> None:
    for name in wanted_names:
        if name not in have:
            raise one_of(what, name, [str(h) for h in have], f"suite {suite.name}")


def refuse_unknown(systems: Iterable[str], get: Callable[[str], object], where: str) -> None:
    """Refuse names that a registry does not have.

    Args:
        get: of the registry, raises InputError.

    Raises:
        InputError: an unknown system; `where` stands before it.
    """
    for name in systems:
        try:
            get(name)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def wanted(names: Sequence, *own: object) -> bool:
    """Whether a filter keeps something that is called by any of its own names."""
    return not names or any(name in names for name in own)


def source(suite: Suite) -> str:
    """Where a suite stands, for an error."""
    return suite.source_path or f"suite {suite.name}"

