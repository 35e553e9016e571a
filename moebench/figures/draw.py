"""Points as bars or lines, a panel a value: reported hollow, obtained solid with its interval, places of which the
paper published no value crossed. Nothing is drawn that is not a point.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moebench.figures.points import NOT_PUBLISHED, OBTAINED, OUT_OF_MEMORY, REPORTED, Drawing, Grid, Point
from moebench.figures.style import HATCHES, INK, MARKERS, MOST_PANELS, MUTED, WIDTHS_IN, palette
from moebench.figures.words import axis_label, panel_title, series_text, tick_text, value_label
from moebench.workloads.figure import NUMBERS, SPEEDUP, SYSTEM

PANEL_HEIGHT_IN, SINGLE_HEIGHT_IN, AROUND_IN, LEGEND_LINE_IN, AXIS_IN = 1.3, 1.7, 0.2, 0.14, 0.45
NAMES_IN = 0.022  # height of a letter of slanted names
SPREAD = 0.5  # of the room of a place that the series of lines take
BARS = 0.82  # and bars
CHARACTERS_PER_INCH, HANDLE_CHARACTERS = 18.5, 5  # of a legend
TICK_CHARACTERS_PER_INCH = 19
LOG_FROM, DECADES_FROM = 12.0, 300.0  # largest over smallest value from which an axis is logarithmic; and has few ticks
DASHED = (0, (4, 2))
MOST_TOLD = 8  # reported values that are written beside their bars
BACKED = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.1}  # text that lies on what is drawn


def draw(drawing: Drawing) -> Any:
    """The matplotlib Figure of a drawing that has points; call it inside `print_style`."""
    import matplotlib.pyplot as plt

    grid = drawing.grid
    assert grid is not None
    panels = [panel for panel in grid.panels if _in_panel(drawing, grid, panel, (REPORTED, OBTAINED))]
    columns = min(len(panels), MOST_PANELS[grid.figure.width])
    lines = -(-len(panels) // columns)
    series = _series_of(drawing, grid)
    labels = _legend(drawing, grid, series)
    width = WIDTHS_IN[grid.figure.width]
    per_line = entries_in_a_line([text for _, text in labels], width)
    height = (SINGLE_HEIGHT_IN if lines == 1 else PANEL_HEIGHT_IN) * lines + AROUND_IN
    if _are_turned(grid, (width - AXIS_IN) / columns):
        height += NAMES_IN * max(map(len, grid.x))
    height += LEGEND_LINE_IN * -(-len(labels) // per_line)
    figure, axes = plt.subplots(
        lines, columns, figsize=(width, height), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axis, panel in zip(axes.flat, panels):
        _panel(axis, drawing, grid, panel, series)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for place, axis in enumerate(axes.flat[: len(panels)]):
        is_lowest = place + columns >= len(panels)
        axis.tick_params(labelbottom=is_lowest)
        axis.set_xlabel(axis_label(grid.figure.x, grid.kind) if is_lowest else "")
        _ticks(axis, grid, (width - AXIS_IN) / columns)
    _y_axis(axes[0, 0], drawing, grid)
    figure.supylabel(value_label(grid), fontsize=7)
    handles, texts = zip(*labels)
    figure.legend(handles, texts, loc="outside lower center", ncols=per_line)
    return figure


def entries_in_a_line(texts: Sequence[str], width_in: float) -> int:
    """Entries of a legend in a line: all, where they fit."""
    room = width_in * CHARACTERS_PER_INCH
    if sum(map(len, texts)) + HANDLE_CHARACTERS * len(texts) <= room:
        return len(texts)
    return max(1, min(len(texts), int(room / (max(map(len, texts)) + HANDLE_CHARACTERS))))


def _ticks(axis: Any, grid: Grid, width_in: float) -> None:
    """The places of the x axis: names that don't fit are turned, of many numbers every second or third is told."""
    texts = [tick_text(grid.figure.x, x) for x in grid.x]
    if _are_turned(grid, width_in):
        axis.set_xticks(range(len(texts)), texts, rotation=35, ha="right", rotation_mode="anchor")
        return
    step = _step(grid, width_in)
    axis.set_xticks(range(len(texts)), [text if place % step == 0 else "" for place, text in enumerate(texts)])


def _are_turned(grid: Grid, width_in: float) -> bool:
    """Whether the names on the x axis are."""
    return grid.figure.x == SYSTEM or (grid.figure.x not in NUMBERS and _step(grid, width_in) > 1)


def _step(grid: Grid, width_in: float) -> int:
    """Which of the texts of the x axis fit: each, every second, ..."""
    texts = [tick_text(grid.figure.x, x) for x in grid.x]
    room = width_in * TICK_CHARACTERS_PER_INCH
    return -(-len(texts) * (max(map(len, texts)) + 1) // max(int(room), 1))


def _series_of(drawing: Drawing, grid: Grid) -> dict[str, tuple[Any, str, str]]:
    """Colour, marker and hatch of each series that has a value."""
    name = grid.figure.series
    held = {p.at[name] for p in drawing.points if name in p.at and p.source != NOT_PUBLISHED}
    shown = [value for value in grid.series if value in held or not name]
    colours = palette(len(shown))
    return {value: (colours[i], MARKERS[i], HATCHES[i]) for i, value in enumerate(shown)}


@dataclass(frozen=True)
class Slots:
    """Where series stand at a place of the x axis; hollow bars stand left of solid ones.

    Attributes:
        offsets: of each series. room: of one series.
    """

    offsets: Mapping[str, float]
    room: float
    has_hollow: bool

    @property
    def width(self) -> float:
        """Of a bar."""
        return 0.92 * self.room * (0.5 if self.has_hollow else 1.0)

    def solid(self, name: str) -> float:
        """Where what was obtained stands."""
        return self.offsets[name] + (self.room / 4 if self.has_hollow else 0.0)

    def hollow(self, name: str) -> float:
        """Where what was reported stands."""
        return self.offsets[name] - self.room / 4


def _slots(drawing: Drawing, grid: Grid, names: Sequence[str]) -> Slots:
    axes = {grid.figure.x, *([grid.figure.series] if grid.figure.series else [])}
    has_hollow = any(p.source == REPORTED and axes <= set(p.at) for p in drawing.points)
    room = (BARS if grid.figure.has_bars else SPREAD) / max(len(names), 1)
    offsets = {name: (i - (len(names) - 1) / 2) * room for i, name in enumerate(names)}
    return Slots(offsets, room, has_hollow and grid.figure.has_bars)


def _in_panel(drawing: Drawing, grid: Grid, panel: str, sources: Sequence[str]) -> list[Point]:
    """Points of a panel, those that hold for every panel included."""
    name = grid.figure.panel
    return [p for p in drawing.points if p.source in sources and (not name or p.at.get(name, panel) == panel)]


def _panel(axis: Any, drawing: Drawing, grid: Grid, panel: str, series: dict[str, tuple[Any, str, str]]) -> None:
    figure, slots = grid.figure, _slots(drawing, grid, list(series))
    obtained = _in_panel(drawing, grid, panel, (OBTAINED,))
    for name, look in series.items():
        own = [p for p in obtained if p.at.get(figure.series, "") == name and p.value is not None]
        x = [grid.x.index(p.at[figure.x]) + slots.solid(name) for p in own]
        if own and figure.has_bars:
            _bars(axis, own, x, slots.width, look)
        elif own:
            _line(axis, own, x, look)
    tops = {x: max([p.high or p.value or 0.0 for p in obtained if p.at[figure.x] == x], default=0.0) for x in grid.x}
    is_told = drawing.count(REPORTED) <= MOST_TOLD
    reported = _in_panel(drawing, grid, panel, (REPORTED,))
    highest = max((p.value or 0.0 for p in reported if figure.x not in p.at), default=0.0)
    marks: dict[str, list[Point]] = {}
    for p in reported:
        name = p.at.get(figure.series, "")
        colour = series[name][0] if figure.series and name in series else INK
        if figure.x not in p.at:
            _reported_line(axis, p, colour, p.value == highest)
        elif figure.has_bars and name in slots.offsets:
            _hollow_bar(axis, p, grid.x.index(p.at[figure.x]) + slots.hollow(name), slots.width, colour, is_told)
        else:
            _hollow_mark(axis, p, grid.x.index(p.at[figure.x]), colour)
            marks.setdefault(p.origin, []).append(p)
    _tell_marks(axis, list(marks.values()), grid, tops)
    _missing(axis, obtained, grid, slots)
    _crosses(axis, _in_panel(drawing, grid, panel, (NOT_PUBLISHED,)), grid, slots)
    if figure.value == SPEEDUP:
        axis.axhline(1, color=MUTED, lw=0.6, ls=":", zorder=1.5)
    if figure.panel:
        axis.set_title(panel_title(figure.panel, panel))
    axis.set_xlim(-0.6, len(grid.x) - 0.4)


def _line(axis: Any, points: Sequence[Point], x: Sequence[float], look: tuple[Any, str, str]) -> None:
    colour, marker, _ = look
    axis.errorbar(
        x, [p.value for p in points], yerr=_errors(points), color=colour, marker=marker, mec=colour, mfc=colour,
        elinewidth=0.7, capsize=1.5, capthick=0.7,
    )  # fmt: skip


def _bars(axis: Any, points: Sequence[Point], x: Sequence[float], width: float, look: tuple[Any, str, str]) -> None:
    colour, _, hatch = look
    heights = [p.value for p in points]
    axis.bar(x, heights, width, color=colour, edgecolor="white", lw=0.3, hatch=hatch)
    if any(p.low is not None for p in points):
        axis.errorbar(
            x, heights, yerr=_errors(points), ls="none", ecolor=INK, elinewidth=0.6, capsize=1.2, capthick=0.6
        )


def _errors(points: Sequence[Point]) -> np.ndarray:
    """Below and above each value; nothing where there is no interval."""
    ends = [(p.value, p.value if p.low is None else p.low, p.value if p.high is None else p.high) for p in points]
    value, low, high = np.array(ends, dtype=float).T
    return np.clip([value - low, high - value], 0, None)


def _reported_line(axis: Any, point: Point, colour: Any, is_highest: bool) -> None:
    """What holds all along a panel, dashed; its words above the highest line, and below others."""
    axis.axhline(point.value, color=colour, lw=0.9, ls=DASHED, zorder=1.6)
    axis.annotate(
        _words(point), (1, point.value), xycoords=("axes fraction", "data"), xytext=(-1, 2.5 if is_highest else -2.5),
        ha="right", va="bottom" if is_highest else "top", textcoords="offset points", fontsize=6, bbox=BACKED, zorder=4,
    )  # fmt: skip


def _hollow_bar(axis: Any, point: Point, x: float, width: float, colour: Any, is_told: bool) -> None:
    axis.bar(x, point.value, width, fill=False, edgecolor=colour, lw=0.9, zorder=3)
    if is_told or point.note:
        axis.annotate(_words(point), (x, point.value), xytext=(0, 2), textcoords="offset points", ha="center",
                      fontsize=6, bbox=BACKED, zorder=4)  # fmt: skip


def _hollow_mark(axis: Any, point: Point, x: float, colour: Any) -> None:
    """What is of no series, or stands on lines."""
    axis.plot(x, point.value, "D", ms=5, mfc="none", mec="white", mew=2.4, zorder=3)
    axis.plot(x, point.value, "D", ms=5, mfc="none", mec=colour, mew=1.0, zorder=3.1)


def _tell_marks(axis: Any, marks: Sequence[Sequence[Point]], grid: Grid, tops: Mapping[str, float]) -> None:
    """The words of marks: once for each number, over the middle of its places; numbers of the same places in lines.

    Args:
        marks: those of each number. tops: how far what is obtained reaches, above which words stand beside bars.
    """
    told: dict[tuple[str, ...], list[Point]] = {}
    for own in marks:
        told.setdefault(tuple(dict.fromkeys(p.at[grid.figure.x] for p in own)), []).append(own[0])
    for places, points in told.items():
        points.sort(key=lambda p: -(p.value or 0.0))
        highest = points[0].value or 0.0
        top = max(tops[x] for x in places) if grid.figure.has_bars else 0.0
        middle = sum(map(grid.x.index, places)) / len(places)
        axis.annotate(
            "\n".join(map(_words, points)), (middle, max(top, highest)), xytext=(0, 5), ha="center",
            va="bottom", textcoords="offset points", fontsize=6, bbox=BACKED, zorder=4,
        )  # fmt: skip


def _words(point: Point) -> str:
    """`up to 8.1`."""
    return f"{point.note} {point.value:g}".strip()


def _missing(axis: Any, obtained: Sequence[Point], grid: Grid, slots: Slots) -> None:
    """Why a place has no value: where its bar or mark would be, or once for all series there."""
    places: dict[str, dict[str, list[str]]] = {}
    for p in obtained:
        if p.value is None:
            places.setdefault(p.at[grid.figure.x], {}).setdefault(p.note, []).append(p.at.get(grid.figure.series, ""))
    for x, notes in places.items():
        for note, names in notes.items():
            short, place = note.replace(OUT_OF_MEMORY, "OOM"), grid.x.index(x)
            if len(names) == len(slots.offsets):
                told = [(note, 0.0)]
            elif grid.figure.has_bars:
                told = [(short, slots.solid(name)) for name in names if name in slots.offsets]
            else:  # beside the marks of the others
                told = [(f"{short} on {', '.join(names)}", SPREAD / 2 + 0.12)]
            for text, shift in told:
                axis.annotate(text, (place + shift, 0.03), xycoords=("data", "axes fraction"), ha="center", va="bottom",
                              rotation=90, fontsize=5, color=MUTED)  # fmt: skip


def _crosses(axis: Any, points: Sequence[Point], grid: Grid, slots: Slots) -> None:
    """A cross under each place of the axis that has no published value, and under single bars beside hollow ones."""
    from matplotlib.transforms import blended_transform_factory

    at: list[float] = []
    for place, x in enumerate(grid.x):
        own = [p for p in points if p.at.get(grid.figure.x) == x]
        if len(own) >= len(grid.series):
            at.append(place)
        elif slots.has_hollow:
            at += [place + slots.hollow(n) for p in own if (n := p.at.get(grid.figure.series, "")) in slots.offsets]
    if at:
        axis.tick_params(axis="x", pad=6)
        across = blended_transform_factory(axis.transData, axis.transAxes)
        axis.plot(at, [-0.045] * len(at), "x", ms=2.6, mew=0.7, color=MUTED, transform=across, clip_on=False)


def _y_axis(axis: Any, drawing: Drawing, grid: Grid) -> None:
    """From zero; logarithmic where values are far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    ends = [v for p in drawing.points for v in (p.value, p.low, p.high) if v is not None and v > 0]
    if ends and max(ends) / min(ends) > LOG_FROM and not grid.figure.has_bars:
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if max(ends) / min(ends) > DECADES_FROM else (1.0, 3.0)))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        return
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
    top, least = max(ends, default=0.0), min([*ends, 1.0])
    if grid.figure.value == SPEEDUP and not grid.figure.has_bars and top < 1.5 and least > 0.7:
        margin = 0.12 * max(top - least, 0.05)
        axis.set_ylim(least - margin, top + 1.6 * margin)  # around no difference: zero is far away
    else:
        below = min([v for p in drawing.points for v in (p.value, p.low) if v is not None], default=0.0)
        axis.set_ylim(min(0.0, 1.13 * below), 1.13 * top or 1.0)


def _legend(drawing: Drawing, grid: Grid, series: dict[str, tuple[Any, str, str]]) -> list[tuple[Any, str]]:
    """A handle and a text of each series, of what is hollow, and of crosses."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    found: list[tuple[Any, str]] = []
    for name, (colour, marker, hatch) in series.items():
        if not name:
            continue
        handle: Any = Line2D([], [], color=colour, marker=marker)
        if grid.figure.has_bars:
            handle = Patch(facecolor=colour, edgecolor="white", hatch=hatch, lw=0.3)
        found.append((handle, series_text(grid, name)))
    marks = [p for p in drawing.points if p.source == REPORTED]
    if _slots(drawing, grid, list(series)).has_hollow:
        found.append((Patch(fill=False, edgecolor=INK, lw=0.9), REPORTED))
    elif any(grid.figure.x in p.at for p in marks):
        found.append((Line2D([], [], ls="none", marker="D", ms=5, mfc="none", mec=INK, mew=1.0), REPORTED))
    if any(grid.figure.x not in p.at for p in marks):
        found.append((Line2D([], [], color=INK, lw=0.9, ls=DASHED), REPORTED))
    if drawing.has_crosses:
        found.append((Line2D([], [], ls="none", marker="x", ms=3, mew=0.7, color=MUTED), NOT_PUBLISHED))
    return found or [(Line2D([], [], ls="none"), "obtained")]
