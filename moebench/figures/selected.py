"""The rows of a run that a figure may draw: summaries of its experiment under the default assumptions, by place."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from moebench.results.rows import HOT, Row
from moebench.workloads.exchange import size_words
from moebench.workloads.figure import CLUSTER
from moebench.workloads.figure_lists import cluster_of
from moebench.workloads.suite import AnyExperiment, JobExperiment, ModelExperiment

Place = tuple[tuple[str, str], ...]  # names of lists with their values, sorted


@dataclass(frozen=True)
class Selected:
    """Rows of one engine, so that no ratio mixes two.

    Attributes:
        machines: kinds of node that they ran on: the suite's first that ran, or of models all, which are the paper's.
    """

    engine: str
    machines: tuple[str, ...]
    rows: Mapping[str, Mapping[Place, Sequence[Row]]]

    def at(self, metric: str, place: Mapping[str, str]) -> Row | None:
        """The row of a metric at a place, if the run has it."""
        return next(iter(self.all_at(metric, place)), None)

    def all_at(self, metric: str, place: Mapping[str, str]) -> Sequence[Row]:
        """The rows of a metric at a place: of one that has parts, each."""
        return self.rows.get(metric, {}).get(as_place(place), ())


def as_place(place: Mapping[str, str]) -> Place:
    """What tells a place from another."""
    return tuple(sorted(place.items()))


def select(
    experiment: AnyExperiment, names: Iterable[str], metrics: Sequence[str], of_metric: Mapping[str, Sequence[Row]]
) -> Selected | None:
    """The rows of a run, or None where it has none of the first metric.

    Args:
        names: lists that tell one place of the figure from another.
    """
    own = {name: [row for row in of_metric.get(name, ()) if _is_meant(row, experiment)] for name in metrics}
    if not own[metrics[0]]:
        return None
    engine = Counter(row.engine for row in own[metrics[0]]).most_common(1)[0][0]
    of_engine = [row for row in own[metrics[0]] if row.engine == engine]
    machines = _machines(of_engine, experiment)
    found: dict[str, dict[Place, list[Row]]] = {name: {} for name in metrics}
    for metric, rows in own.items():
        for row in rows:
            if row.engine == engine and _node_type(row) in machines:
                place = as_place({name: _text(row, name, experiment) for name in names})
                found[metric].setdefault(place, []).append(row)
    return Selected(engine, machines, found)


def _is_meant(row: Row, experiment: AnyExperiment) -> bool:
    """Whether a row is a summary of the experiment under its default assumptions and common conventions."""
    is_own = row.experiment == experiment.name and row.sample is None and row.is_default and row.conventions == "common"
    return is_own and row.detail.get("regime", "") in HOT


def _machines(rows: Sequence[Row], experiment: AnyExperiment) -> tuple[str, ...]:
    types = tuple(dict.fromkeys(_node_type(row) for row in rows))
    if isinstance(experiment, ModelExperiment | JobExperiment):
        return types
    return (next((name for name in experiment.node_types if name in types), types[0]),)


def _node_type(row: Row) -> str:
    return row.topology.removeprefix(f"{row.size}-")


def _text(row: Row, name: str, experiment: AnyExperiment) -> str:
    """A row's value of a list, as the experiment's list writes it."""
    if name == "payload":
        return size_words(row.payload_bytes or 0)
    if name == CLUSTER and isinstance(experiment, ModelExperiment | JobExperiment):
        return cluster_of(experiment, _node_type(row))
    value = getattr(row, name)
    return "" if value is None else str(value)
