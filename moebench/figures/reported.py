"""The reported numbers of a figure as points: where a claim's scope puts them."""

from collections.abc import Callable, Mapping, Sequence

from moebench.claims.reported import UNITS, Claim, implementations, own_names
from moebench.claims.scope import is_size, named
from moebench.figures.points import NOT_PUBLISHED, REPORTED, Grid, Point
from moebench.workloads.errors import InputError, one_of
from moebench.workloads.figure import SPEEDUP, SYSTEM
from moebench.workloads.figure_lists import meant, tuned

RELATIONS = {"max-over": "up to", "mean-over": "mean", "at-least": "at least", "at-most": "at most", "equal": ""}
_TIMES = ("us", "ms", "s", "minutes", "hours")
# Unit of an axis -> units of reported numbers that it can show.
_UNITS: Mapping[str, tuple[str, ...]] = {
    "": ("ratio", "count", "k"),
    "%": ("fraction", "share"),
    **dict.fromkeys(("GiB", "GB"), ("B", "MB", "GB")),
    "ktokens/s": ("tokens/s", "ktokens/s"),
    **dict.fromkeys(("us", "ms", "s", "min"), _TIMES),
}
# List of an experiment -> the keys of a scope that speak of it.
_KEYS: Mapping[str, tuple[str, ...]] = {
    "size": ("nodes", "gpus_per_node", "gpus", "dp"),
    "payload": ("bytes",),
    "top_k": ("k", "top_k"),
    "part": ("operator",),
    "cluster": ("cluster", "gpu"),
}


def reported_points(grid: Grid, claims: Sequence[Claim]) -> list[Point]:
    """A point for each place that a reported number is about; one without x where it is about a whole panel.

    Raises:
        InputError: the figure names a number that isn't there, or that has no place on its axis.
    """
    by_id = {claim.id: claim for claim in claims}
    found = []
    for name in grid.figure.reported:
        if name not in by_id:
            raise one_of("reported number", name, list(by_id), f"figure {grid.figure.name}")
        found += _points(grid, by_id[name])
    return found


def unpublished(grid: Grid, reported: Sequence[Point]) -> list[Point]:
    """A point for each place of the grid that has no reported number of its own."""
    return [
        Point(NOT_PUBLISHED, place)
        for place in grid.places()
        if not any(grid.figure.x in p.at and p.at.items() <= place.items() for p in reported)
    ]


def _points(grid: Grid, claim: Claim) -> list[Point]:
    value = _value(grid, claim)
    axes = {grid.figure.panel: grid.panels, grid.figure.x: grid.x, grid.figure.series: grid.series}
    choices: dict[str, list[str]] = {}
    for name, values in axes.items():
        if name and (fits := _fits(claim, name, grid)) is not None:
            choices[name] = [v for v in values if fits(v)]
    if not all(choices.values()):
        return []  # about cases that the figure doesn't show
    places: list[dict[str, str]] = [{}]
    for name, fitting in choices.items():
        places = [{**place, name: v} for place in places for v in fitting]
    note = RELATIONS[claim.relation]
    return [Point(REPORTED, at, value, note=note, origin=claim.id, evidence=claim.evidence) for at in places]


def _value(grid: Grid, claim: Claim) -> float:
    """The number in the figure's unit."""
    scale = UNITS[claim.unit][1]
    if isinstance(claim.value, str):
        raise InputError(f"figure {grid.figure.name}: {claim.id} is a finding in words, no number to draw")
    if claim.unit in (("ratio",) if grid.figure.value == SPEEDUP else _UNITS[grid.unit]):
        return claim.value * scale / grid.scale
    raise InputError(
        f"figure {grid.figure.name}: {claim.id} is a number in {claim.unit}, and the axis has "
        f"{grid.unit or 'a ratio or count'}"
    )


def _fits(claim: Claim, name: str, grid: Grid) -> Callable[[str], bool] | None:
    """Whether a value of a list is what a claim is about; None where the claim leaves the list open."""
    if name == SYSTEM and grid.experiment is not None and (own := meant(grid.experiment, claim.system, claim.scope)):
        return lambda value: value in own
    if name == SYSTEM:
        return (lambda value: any(tuned(name, value) for name in own_names(claim))) if claim.system else None
    if name == "op":
        known = implementations().get(claim.system)
        return (lambda value: value == known[0]) if known else None
    keys = _KEYS.get(name, (name,))
    if not set(keys) & set(claim.scope):
        return None
    if name == "size":
        return lambda value: is_size(claim, value) and named(claim, "dp", value.split("x")[:1])  # replicas of a node
    if name == "payload":
        from moebench.workloads.units import BYTES, parse_quantity

        return lambda value: named(claim, "bytes", (parse_quantity(value, BYTES, name),))
    key = next(key for key in keys if key in claim.scope)
    return lambda value: named(claim, key, (value, value.partition("-")[0]))
