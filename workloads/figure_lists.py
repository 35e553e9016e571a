"""What varies in an experiment, by the names that its figures know: the lists that are their axes."""

from moebench.workloads.exchange import size_words
from moebench.workloads.figure import SYSTEM, PaperFigure
from moebench.workloads.suite import AnyExperiment, ExchangeExperiment, KernelExperiment, LayerExperiment


def lists_of(experiment: AnyExperiment) -> dict[str, tuple[str, ...]]:
    """Name -> values as text, in order, of what varies in an experiment; empty for one whose results have no axes."""
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
    else:
        return {}
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items()}


def kept_lists(figure: PaperFigure, experiment: AnyExperiment) -> dict[str, tuple[str, ...]]:
    """The lists of a figure's experiment as `only` narrows them; of a speedup over a system without that system."""
    found = {}
    for name, values in lists_of(experiment).items():
        kept = [value for value in values if value in figure.only.get(name, values)]
        found[name] = tuple(value for value in kept if name != SYSTEM or value != figure.baseline)
    return found
