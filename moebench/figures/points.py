"""What a figure holds, one point a value: reported, obtained, or known to be missing. Its CSV has the same."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from moebench.workloads.figure import QUANTITIES, REDUCTION, REGIONS, SPEEDUP, PaperFigure
from moebench.workloads.figure_lists import kept_lists
from moebench.workloads.suite import AnyExperiment

REPORTED, OBTAINED, NOT_PUBLISHED = "reported", "obtained", "not published"
OUT_OF_MEMORY = "out of memory"
REGION = "region"
HOST = "host"  # the part of a step in which the device waits for its next launch


@dataclass(frozen=True)
class Point:
    """One value of a figure, in its unit.

    Attributes:
        source: `reported`, `obtained` or `not published`.
        at: list -> value, as text, of the axes on which it has a place; without x it holds all along a panel.
        low, high: its interval. note: why there is no value, or what a reported one is (`up to`, `mean`).
        origin: id of a reported number, or the case. evidence: of a reported number, or the engine of a case.
    """

    source: str
    at: Mapping[str, str]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    note: str = ""
    origin: str = ""
    evidence: str = ""


@dataclass(frozen=True)
class Grid:
    """The places of a figure: values of its axes, in order; an axis that it doesn't have holds one empty text.

    Attributes:
        metric: whose values are drawn, compared or divided. rest: lists that are no axis, with their one value.
    """

    figure: PaperFigure
    kind: str
    metric: str
    x: tuple[str, ...]
    series: tuple[str, ...]
    panels: tuple[str, ...]
    rest: Mapping[str, str]
    experiment: AnyExperiment | None = None

    @classmethod
    def of(cls, figure: PaperFigure, experiment: AnyExperiment) -> "Grid":
        """The grid of a figure's experiment."""
        kept = kept_lists(figure, experiment)
        x, series, panels = (kept[name] if name else ("",) for name in (figure.x, figure.series, figure.panel))
        rest = {name: values[0] for name, values in kept.items() if name not in figure.axes and values[0]}
        return cls(figure, experiment.kind, figure.metric or experiment.metric, x, series, panels, rest, experiment)

    @property
    def unit(self) -> str:
        """Of its values; empty for a ratio or a count."""
        return self._unit_and_scale[0]

    @property
    def scale(self) -> float:
        """How much of the unit of rows its own unit is."""
        return self._unit_and_scale[1]

    @property
    def _unit_and_scale(self) -> tuple[str, float]:
        fixed = {SPEEDUP: ("", 1.0), REDUCTION: ("%", 0.01)}
        return fixed.get(self.figure.value) or QUANTITIES[self.metric][1:]

    def places(self) -> Iterator[dict[str, str]]:
        """Every place, panel by panel."""
        for panel in self.panels:
            for x in self.x:
                for series in self.series:
                    yield self.at(panel, x, series)

    def at(self, panel: str = "", x: str = "", series: str = "") -> dict[str, str]:
        """A place by the lists that its axes stand for."""
        named = {self.figure.panel: panel, self.figure.x: x, self.figure.series: series}
        return {name: value for name, value in named.items() if name and value}


@dataclass(frozen=True)
class Drawing:
    """A figure with everything that is known of it; nothing is drawn where `points` are empty.

    Attributes:
        reason: why there is nothing to draw.
        engine, machine: of what was obtained; a machine is a kind of node.
    """

    figure: PaperFigure
    grid: Grid | None = None
    points: tuple[Point, ...] = ()
    reason: str = ""
    engine: str = ""
    machine: str = ""

    def count(self, source: str) -> int:
        """Values of one source; of a stack its parts count as one."""
        found = [p for p in self.points if p.source == source and p.value is not None]
        if self.figure.value == REGIONS:
            return len({tuple(v for k, v in p.at.items() if k != REGION) for p in found})
        return len(found)

    @property
    def has_crosses(self) -> bool:
        """Whether a place is crossed: without a published value, of lines where no line has one there."""
        places = [p.at for p in self.points if p.source == NOT_PUBLISHED]
        if self.grid is None or self.figure.has_bars:
            return bool(places)
        counts = Counter((at.get(self.figure.panel), at.get(self.figure.x)) for at in places)
        return max(counts.values(), default=0) >= max(1, len(self.grid.series))


def columns_of(grid: Grid) -> list[str]:
    """The lists that a point of a grid may name: its axes in the order of a table, then what is fixed."""
    axes = [name for name in (grid.figure.panel, grid.figure.x, grid.figure.series) if name]
    return [*axes, *([REGION] if grid.figure.value == REGIONS else []), *grid.rest]
