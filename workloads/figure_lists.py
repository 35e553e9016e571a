"""What varies in an experiment, by the names that its figures know: the lists that are their axes."""

from collections.abc import Mapping

from moebench.workloads.exchange import size_words
from moebench.workloads.figure import CLUSTER, SYSTEM, PaperFigure
from moebench.workloads.suite import (
    AnyExperiment,
    ExchangeExperiment,
    JobExperiment,
    KernelExperiment,
    LayerExperiment,
    ModelExperiment,
    PartExperiment,
)


def lists_of(experiment: AnyExperiment) -> dict[str, tuple[str, ...]]:
    """Name -> values as text, of what varies in an experiment, sizes from small to large, others as they are listed.

    Empty for one whose results have no axes.
    """
    found: dict[str, list[str]] = {SYSTEM: list(experiment.systems)}
    if isinstance(experiment, LayerExperiment):
        found |= {
            "gate": [gate.label for gate in experiment.gates],
            "batch_size": [str(size) for size in experiment.batch_sizes],
            "size": list(experiment.sizes),
        }
    elif isinstance(experiment, ExchangeExperiment):
        payloads = [size_words(size) for size in experiment.payloads_bytes]
        found |= {"size": list(experiment.sizes), "payload": payloads, "dtype": list(experiment.dtypes)}
    elif isinstance(experiment, KernelExperiment):
        for grid in experiment.kernels:
            parts = {"op": (grid.op,), "dtype": grid.dtypes, "direction": grid.directions, "variant": grid.variants}
            for name, values in (parts | dict(grid.shapes)).items():
                found.setdefault(name, []).extend(map(str, values))
    elif isinstance(experiment, ModelExperiment):
        found |= {
            "model": list(experiment.models),
            "gate": [gate.label for gate in experiment.gates],
            "size": list(experiment.sizes),
            CLUSTER: [cluster_of(experiment, node_type) for node_type in experiment.node_types],
        }
    elif isinstance(experiment, PartExperiment):
        found |= {"size": list(experiment.sizes), "part": [grid.part for grid in experiment.parts]}
        for part in experiment.parts:
            for name, values in ({"model": part.models} | dict(part.sizes)).items():
                found.setdefault(name, []).extend(map(str, values))
        found = {name: values for name, values in found.items() if values}
    elif isinstance(experiment, JobExperiment):
        papers = [name for name in experiment.node_types if name in experiment.clusters.values()]
        found |= {
            "model": list(experiment.models),
            "size": list(experiment.sizes),
            CLUSTER: [cluster_of(experiment, node_type) for node_type in papers or experiment.node_types[:1]],
        }
    else:
        return {}
    if "size" in found:
        found["size"].sort(key=lambda size: tuple(map(int, size.split("x"))))
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items()}


def cluster_of(experiment: ModelExperiment | JobExperiment, node_type: str) -> str:
    """What the paper calls a node type."""
    return next((name for name, known in experiment.clusters.items() if known == node_type), node_type)


def kept_lists(figure: PaperFigure, experiment: AnyExperiment) -> dict[str, tuple[str, ...]]:
    """The lists of a figure's experiment as `only` narrows them; of a speedup over a system without that system."""
    found = {}
    for name, values in lists_of(experiment).items():
        kept = [value for value in values if value in figure.only.get(name, values)]
        if name == SYSTEM:
            kept = [value for value in kept if not stands_for(figure.baseline, value, experiment)]
        found[name] = tuple(kept)
    return found


def stands_for(name: str, system: str, experiment: AnyExperiment) -> bool:
    """Whether a system is what a name means: of models a name without options is its best number of chunks, of jobs a
    name of the paper's is what the suite says."""
    if isinstance(experiment, JobExperiment):
        return system in experiment.called.get(name, (name,))
    return tuned(name, system) if isinstance(experiment, ModelExperiment) else name == system


def tuned(name: str, system: str) -> bool:
    """Whether a system is that of a name, or a variant of it that the tuning of a paper would have tried.

    A name without options stands for variants in the number of chunks; other options make another system.
    """
    stem, *options = system.split("+")
    return name == system or (name == stem and all(option.startswith("degree=") for option in options))


def variants(experiment: AnyExperiment) -> tuple[str, ...]:
    """Names without options that stand for several systems of an experiment."""
    if isinstance(experiment, JobExperiment):
        return tuple(name for name, own in experiment.called.items() if len(own) > 1)
    stems = dict.fromkeys(system.partition("+")[0] for system in experiment.systems)
    return tuple(stem for stem in stems if sum(stands_for(stem, one, experiment) for one in experiment.systems) > 1)


def meant(experiment: AnyExperiment, name: str, scope: Mapping[str, str]) -> tuple[str, ...]:
    """Systems of an experiment that a reported number means: by the paper's name, or as a variant that it names."""
    if isinstance(experiment, JobExperiment):
        for key, words in experiment.variants.items():
            if scope.get(key) in words:
                return (words[scope[key]],)
        return experiment.called.get(name, ())
    return ()


def called(experiment: AnyExperiment, system: str) -> tuple[str, ...]:
    """The paper's words for a system of an experiment, where its reported numbers tell settings apart by words."""
    if not isinstance(experiment, JobExperiment):
        return ()
    return tuple(word for own in experiment.variants.values() for word, known in own.items() if known == system)
