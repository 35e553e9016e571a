"""Planning an experiment of jobs: models x places x systems, under each reading of what the paper leaves open.

A reading is a way to lay the job out that the paper does not contradict: stages, chunks, micro-batch. The node types
after the first one are assumptions too, unless the paper calls them by name.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod

from moebench.cases.case import Case
from moebench.cases.plan import Context, Place, refuse_unknown, wanted
from moebench.workloads.errors import InputError
from moebench.workloads.job import JobWorkload, sized
from moebench.workloads.machine import Topology
from moebench.workloads.suite import JobExperiment, JobReading


def names(experiment: JobExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment; its own systems must be registered.

    Raises:
        InputError: an unknown system.
    """
    from moebench.systems.job_registry import NAMES, get

    also = [system for one in experiment.readings for system in one.instead.values()]
    refuse_unknown([*experiment.systems, *also], get, f"{source}: experiment {experiment.name}")
    batches = [size for one in experiment.readings for size in one.global_batches]
    return {"batch size": batches, "dtype": [experiment.dtype], "system": [*NAMES, *experiment.systems, *also]}


def cases(experiment: JobExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, reading by reading; a quick look has the first one.

    Raises:
        InputError: a job has no meaning on a topology.
    """
    filters = context.filters
    if filters.gates:  # jobs have no gate but their model's
        return
    for reading in experiment.readings[: 1 if filters.quick else None]:
        for place in context.places(experiment):
            if filters.quick and not is_papers(experiment, place.gpu):
                continue
            for model in experiment.models:
                workload = workload_of(experiment, reading, model, place.size)
                is_wanted = wanted(filters.batch_sizes, workload.global_batch)
                if is_wanted and wanted(filters.dtypes, workload.dtype):
                    yield from _cases(experiment, context, reading, place, workload)


def _cases(
    experiment: JobExperiment, context: Context, reading: JobReading, place: Place, workload: JobWorkload
) -> Iterator[Case]:
    topology = context.machines(place.topology)
    problem = workload.problem(topology.ranks)
    if problem:
        raise InputError(f"{context.source}: experiment {experiment.name}, topology {topology.name}: {problem}")
    for system in _systems(experiment, reading, context.filters.systems):
        yield context.case(
            experiment, place, system, workload,
            assumptions={"reading": reading.name, "gpu": place.gpu},
            is_default=reading is experiment.readings[0] and (place.asked or is_papers(experiment, place.gpu)),
        )  # fmt: skip


def is_papers(experiment: JobExperiment, node_type: str) -> bool:
    """Whether a node type is the paper's own, and not an assumption."""
    return node_type == experiment.node_types[0] or node_type in experiment.clusters.values()


def workload_of(experiment: JobExperiment, reading: JobReading, model: str, size: str) -> JobWorkload:
    """The workload of one point. At a size that the suite does not have, the batch in proportion to the first one's."""
    from moebench.workloads.load_decoder import load_decoder

    place = experiment.models.index(model)
    layers = reading.layers[place] if reading.layers else None
    return JobWorkload(
        model=model,
        decoder=sized(load_decoder(model), layers, experiment.plain, experiment.vocabulary, experiment.sequence),
        stages=of(reading.stages, place),
        global_batch=_batch(experiment, reading, size),
        micro_batch=reading.micro_batch,
        chunks=reading.chunks,
        dtype=experiment.dtype,
        skew=reading.skew,
        is_cut=layers is not None,
    )


def of(values: Sequence[int], place: int) -> int:
    """The value of a model: there may be one for all."""
    return values[place if len(values) > 1 else 0]


def _batch(experiment: JobExperiment, reading: JobReading, size: str) -> int:
    batches = reading.global_batches
    if len(batches) == 1:
        return batches[0]
    if size in experiment.sizes:
        return batches[experiment.sizes.index(size)]
    return batches[0] * ranks_of(size) // ranks_of(experiment.sizes[0])


def ranks_of(size: str) -> int:
    """Ranks of `30x8`."""
    return prod(map(int, size.split("x")))


def _systems(experiment: JobExperiment, reading: JobReading, asked: Sequence[str]) -> list[str]:
    """An experiment's own under a reading, or those that the filter names that train jobs."""
    if not asked:
        return list(dict.fromkeys(reading.instead.get(name, name) for name in experiment.systems))
    from moebench.systems.job_registry import NAMES, get

    return [get(name).name for name in dict.fromkeys(asked) if name.split("+")[0] in NAMES]


def together(case: Case) -> Hashable:
    """Cases of one key have the same micro-batches: a process traces and replays them once."""
    workload = job_of(case)
    return case.system, workload.model, workload.stages, workload.chunks, workload.micro_batch, workload.skew


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together: a check tries a small model."""
    return (case.system,)


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why real ranks can't run a case."""
    return "unsupported", "a whole job is composed from what its stages take in sim; real ranks run its check only"


def job_of(case: Case) -> JobWorkload:
    """The job of a case that is about one."""
    if not isinstance(case.workload, JobWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not a job")
    return case.workload
