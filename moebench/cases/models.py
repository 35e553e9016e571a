"""Planning an experiment of whole models: models x gates x places x systems, under each reading of the paper.

The node types are the paper's own clusters. What it leaves open, or says in two ways, is a reading: batch sizes and
precision on each node type.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from math import prod

from moebench.cases.case import Case
from moebench.cases.plan import Context, refuse_unknown, wanted
from moebench.local.machine import memory_bytes
from moebench.workloads.errors import InputError
from moebench.workloads.machine import Topology
from moebench.workloads.model import ModelWorkload, shape_of
from moebench.workloads.places import ON_THIS_MACHINE
from moebench.workloads.suite import ModelExperiment, ModelReading


def names(experiment: ModelExperiment, source: str) -> Mapping[str, Sequence[object]]:
    """What filters may name of an experiment; its own systems must be registered.

    Raises:
        InputError: an unknown system.
    """
    from moebench.systems.model_registry import NAMES, get

    refuse_unknown(experiment.systems, get, f"{source}: experiment {experiment.name}")
    return {
        "gate": [name for gate in experiment.gates for name in (gate.label, gate.name)],
        "batch size": [size for one in experiment.readings for sizes in one.batches.values() for size in sizes],
        "dtype": sorted({dtype for one in experiment.readings for dtype in one.dtypes.values()} | {"fp32"}),
        "system": [*NAMES, *experiment.systems],
    }


def cases(experiment: ModelExperiment, context: Context) -> Iterator[Case]:
    """The cases of an experiment, reading by reading; a quick look has the first one.

    Raises:
        InputError: a model has no meaning on a topology.
    """
    filters = context.filters
    readings = experiment.trainings[: 1 if filters.quick else None]
    gates = [gate for gate in experiment.gates if wanted(filters.gates, gate.label, gate.name)]
    for reading, place, gate in product(readings, context.places(experiment), gates):
        ranks = prod(map(int, place.size.split("x")))
        for model in experiment.models:
            workload = workload_of(experiment, reading, model, gate, place.gpu, ranks, context.suite.seed)
            batch_size = workload.shape.batch_size
            if not (wanted(filters.batch_sizes, batch_size) and wanted(filters.dtypes, workload.dtype)):
                continue
            topology = context.machines(place.topology)  # a run keeps those of its cases only
            problem = workload.problem(topology.ranks)
            if problem:
                raise InputError(f"{context.source}: experiment {experiment.name}, topology {topology.name}: {problem}")
            for system in _systems(experiment, filters.systems):
                yield context.case(
                    experiment, place, system, workload,
                    assumptions={"reading": reading.name},
                    is_default=reading is experiment.readings[0],
                )  # fmt: skip


def workload_of(
    experiment: ModelExperiment, reading: ModelReading, model: str, gate: object, gpu: str, ranks: int, seed: int = 0
) -> ModelWorkload:
    """The workload of one point; on a node type that the reading does not know, the batch of its first one, in fp32."""
    batches = reading.batches.get(gpu, next(iter(reading.batches.values())))
    shape = shape_of(model, gate, batches[experiment.models.index(model)], ranks)  # type: ignore[arg-type]
    return ModelWorkload(model, shape, reading.dtypes.get(gpu, "fp32"), seed)


def _systems(experiment: ModelExperiment, asked: Sequence[str]) -> list[str]:
    """An experiment's own, or those that the filter names that run models."""
    if not asked:
        return list(experiment.systems)
    from moebench.systems.model_registry import NAMES, get

    return [get(name).name for name in dict.fromkeys(asked) if name.split("+")[0] in NAMES]


def check_key(case: Case) -> tuple[Hashable, ...]:
    """Cases of one key are right or wrong together: a check tries a small model."""
    shape = model_of(case).shape
    return case.system, shape.gate, shape.optimizer, shape.recompute, bool(shape.clip_norm)


def refusal(case: Case, topology: Topology) -> tuple[str, str] | None:
    """Why real ranks can't run a case."""
    from moebench.systems.model_registry import get

    workload = model_of(case)
    if workload.dtype != "fp32" and topology.hardware.kind == "cpu":
        return "unsupported", f"{workload.dtype} is no precision of a CPU"
    try:
        reason = get(case.system).supports(workload.shape, topology.ranks)
    except InputError as error:
        reason = str(error)
    if reason is not None:
        return "unsupported", reason
    reason = memory_problem(workload, topology.ranks, _bytes_of_rank(topology))
    return None if reason is None else ("out-of-memory", reason)


def memory_problem(workload: ModelWorkload, ranks: int, has_bytes: float) -> str | None:
    """Why a rank with so much memory can't hold a training step, as far as that is known before; else None."""
    least = workload.shape.least_bytes(ranks)
    if least <= has_bytes:
        return None
    return (
        f"a step of {workload.model} with {workload.shape.batch_size} sequences takes at least {least / 2**30:.1f} GiB "
        f"on a rank, which has {has_bytes / 2**30:.1f}: take a smaller model, such as gpt2-moe+layers=4+d_model=128"
    )


def _bytes_of_rank(topology: Topology) -> float:
    """Memory of a rank; ranks of this machine share it."""
    if topology.node_type in ON_THIS_MACHINE:
        return memory_bytes() / topology.ranks
    return topology.hardware.parameters["gpu.memory.capacity"].value


def model_of(case: Case) -> ModelWorkload:
    """The model of a case that is about one."""
    if not isinstance(case.workload, ModelWorkload):
        raise TypeError(f"{case.name} is about a {case.workload.kind}, not a model")
    return case.workload
