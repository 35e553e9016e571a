"""The figures of a suite file, checked against its experiments: every name they use must be one of theirs."""

from collections.abc import Callable, Sequence

from moebench.workloads.errors import InputError, one_of
from moebench.workloads.figure import (
    AGAINST,
    AXES,
    BARS,
    BEST_OTHER,
    MOST_SERIES,
    QUANTITIES,
    REGIONS,
    SPEEDUP,
    SYSTEM,
    PaperFigure,
)
from moebench.workloads.figure_lists import kept_lists, lists_of, variants
from moebench.workloads.figure_schema import PaperFigureFile
from moebench.workloads.suite import AnyExperiment, LayerExperiment, ModelExperiment
from moebench.workloads.toml_file import Key

Where = Callable[[Sequence[Key]], str]  # file and line of a key path


def figures_of(
    models: Sequence[PaperFigureFile], experiments: Sequence[AnyExperiment], has_reported: bool, where: Where
) -> tuple[PaperFigure, ...]:
    """The figures of the models.

    Args:
        has_reported: whether the suite names reported numbers.

    Raises:
        InputError: the first name that the experiments don't have, or a list that nothing in the figure shows.
    """
    found: list[PaperFigure] = []
    for index, model in enumerate(models):
        def place(*keys: Key, index: int = index) -> str:
            return where(["figures", index, *keys])

        figure = _figure(model)
        if figure.name in {other.name for other in found}:
            raise InputError(f"{place('name')}: two figures are named {figure.name!r}")
        if figure.reported and not has_reported:
            raise InputError(f"{place('reported')}: the suite names no reported numbers (the key reported)")
        if not figure.not_drawn:
            _check(figure, experiments, has_reported, place)
        found.append(figure)
    return tuple(found)


def _figure(model: PaperFigureFile) -> PaperFigure:
    said = model.model_dump(exclude_none=True)
    only = {name: tuple(map(str, values)) for name, values in model.only.items()}
    return PaperFigure(**said | {"only": only, "reported": tuple(model.reported)})


def _check(
    figure: PaperFigure, experiments: Sequence[AnyExperiment], has_reported: bool, place: Callable[..., str]
) -> None:
    experiment = next((e for e in experiments if e.name == figure.experiment), None)
    if experiment is None:
        raise one_of("experiment", figure.experiment, [e.name for e in experiments], place("experiment"))
    lists = lists_of(experiment)
    if not lists:
        raise InputError(f"{place('experiment')}: {experiment.name} has no times to draw; say not_drawn, and why")
    _check_names(figure, lists, place)
    _check_value(figure, experiment, has_reported, place)
    kept = kept_lists(figure, experiment)
    for name, values in kept.items():
        if not values:
            raise InputError(f"{place('baseline')}: nothing is left beside the baseline {figure.baseline}")
        if len(values) > 1 and name not in figure.axes:
            text = f"{len(values)} values of {name} and nothing that tells them apart: make it x, series or panel, or"
            raise InputError(f"{place('only')}: {text} keep one of {', '.join(values)}")
    if len(kept.get(figure.series, ())) > MOST_SERIES:
        raise InputError(f"{place('series')}: {len(kept[figure.series])} series, at most {MOST_SERIES}: narrow `only`")


def _check_names(figure: PaperFigure, lists: dict[str, tuple[str, ...]], place: Callable[..., str]) -> None:
    for axis in AXES:
        name = getattr(figure, axis)
        if name and name not in lists:
            raise one_of(axis, name, list(lists), place(axis))
        if name and figure.axes.count(name) > 1:
            raise InputError(f"{place(axis)}: {name} is another axis of the figure as well")
    for name, values in figure.only.items():
        if name not in lists:
            raise one_of("list", name, list(lists), place("only", name))
        for value in values:
            if value not in lists[name]:
                raise one_of(name, value, lists[name], place("only", name))


def _check_value(
    figure: PaperFigure, experiment: AnyExperiment, has_reported: bool, place: Callable[..., str]
) -> None:
    if figure.value in AGAINST:
        known = list(dict.fromkeys([*experiment.systems, *variants(experiment)]))
        if figure.value == SPEEDUP and has_reported and isinstance(experiment, LayerExperiment | ModelExperiment):
            known.append(BEST_OTHER)
        if figure.baseline not in known:
            raise one_of("baseline", figure.baseline, known, place("baseline"))
    if not figure.metric and experiment.metric not in QUANTITIES:
        raise one_of("metric", experiment.metric, list(QUANTITIES), place("experiment"))
    if figure.value == REGIONS:
        if not isinstance(experiment, LayerExperiment):
            raise InputError(f"{place('value')}: only layers have regions, and {experiment.name} is not about layers")
        if figure.x != SYSTEM or figure.series or figure.mark not in ("", BARS):
            raise InputError(f"{place('x')}: parts of a step are stacked, a bar a system: x is {SYSTEM}, no series")
        if figure.reported:
            raise InputError(f"{place('reported')}: no reported number is about a region yet")
