"""Files of figures: the same bytes each time, every number in the CSV, nothing drawn that is not a point."""

import csv
import errno
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from moebench.figures.draw import draw
from moebench.figures.points import OBTAINED, REPORTED, Drawing, Grid, Point
from moebench.figures.reported import unpublished
from moebench.figures.stack import draw_stacks
from moebench.figures.style import WIDTHS_IN, print_style
from moebench.figures.write import caption, csv_of, write_figures
from moebench.workloads.errors import InputError
from moebench.workloads.figure import PaperFigure

TIME = PaperFigure(
    "times", "Times", number="3", published="four of six bars", experiment="e", value="metric", x="batch_size",
    series="system", panel="gate", mark="bars",
)  # fmt: skip
GRID = Grid(TIME, "layer", "step_time", ("8", "16", "32"), ("a", "b"), ("p", "q"), {"size": "4x8"})


def times():
    """Two panels of three places and two systems; reported in the first panel but at one place."""
    found = []
    for place in GRID.places():
        value = float(place["batch_size"]) * (1 if place["system"] == "a" else 2)
        found.append(Point(OBTAINED, place, value, 0.9 * value, 1.2 * value, origin="case", evidence="sim"))
        if place["gate"] == "p" and (place["batch_size"], place["system"]) != ("32", "b"):
            found.append(Point(REPORTED, place, 1.3 * value, origin="claim", evidence="printed"))
    crossed = unpublished(GRID, [p for p in found if p.source == REPORTED])
    return Drawing(TIME, GRID, (*found, *crossed), engine="sim", machine="titan-rtx")


def regions():
    """Parts of the steps of two systems, the second out of memory."""
    figure = PaperFigure("parts", "Parts", experiment="e", value="regions", x="system")
    grid = Grid(figure, "layer", "step_time", ("a", "b"), ("",), ("",), {})
    parts = [("gate", 1.0), ("exchange", 60.0), ("experts", 39.0)]
    points = [Point(OBTAINED, {"system": "a", "region": name}, value, evidence="sim") for name, value in parts]
    full = Point(OBTAINED, {"system": "b"}, note="out of memory")
    return Drawing(figure, grid, (*points, full, *unpublished(grid, [])), engine="sim")


def test_the_same_figures_are_the_same_bytes(tmp_path):
    """Every format, drawn twice; no date, no name of a program."""
    for folder in ("first", "second"):
        write_figures([times()], tmp_path / folder, ("svg", "png", "pdf"))
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == ["captions.md", "times.csv", "times.pdf", "times.png", "times.svg"]
    for name in names:
        data = (tmp_path / "first" / name).read_bytes()
        assert data == (tmp_path / "second" / name).read_bytes(), name
        assert b"Matplotlib" not in data
        assert b"CreationDate" not in data


def test_a_picture_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """Where the last step fails no part of it stays."""
    def refuse(source, target):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("moebench.results.store.os.replace", refuse)
    with pytest.raises(InputError, match="can't write: No space"):
        write_figures([times()], tmp_path, ("svg",))
    assert list(tmp_path.iterdir()) == []


def test_the_csv_holds_every_point():
    """A line a point, its place, and the unit in the header."""
    lines = list(csv.DictReader(csv_of(times()).splitlines()))
    assert len(lines) == len(times().points) == 12 + 5 + 7
    assert list(lines[0])[:4] == ["gate", "batch_size", "system", "size"]
    first = lines[0]
    assert (first["source"], first["step time (ms)"], first["low"], first["high"]) == ("obtained", "8", "7.2", "9.6")
    assert {line["size"] for line in lines} == {"4x8"}
    missing = [line for line in lines if line["source"] == "not published"]
    assert all(line["step time (ms)"] == "" for line in missing)


def test_lines_are_crossed_where_none_has_a_published_value():
    """Beside bars each missing value is; of lines a place that one of them has is none."""
    bars = times()
    place = next(point for point in bars.points if point.source == "not published")
    lines = replace(bars, figure=replace(bars.figure, mark="lines"), points=(place,))
    all_of_it = [replace(place, at={**place.at, bars.figure.series: name}) for name in bars.grid.series]
    assert bars.has_crosses
    assert not lines.has_crosses
    assert replace(lines, points=tuple(all_of_it)).has_crosses
    assert not replace(lines, points=()).has_crosses


def test_hollow_bars_stand_beside_solid_ones():
    """As many bars as there are values, the reported ones without a face, as wide as a column."""
    with print_style():
        figure = draw(times())
        solid = [bar for axis in figure.axes for bar in axis.patches if bar.get_fill()]
        hollow = [bar for axis in figure.axes for bar in axis.patches if not bar.get_fill()]
        figure.draw_without_rendering()
    assert (len(solid), len(hollow)) == (12, 5)
    assert figure.get_figwidth() == WIDTHS_IN["column"]
    spans = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in figure.axes[0].patches)
    assert all(after[0] >= before[1] - 1e-9 for before, after in pairwise(spans))


def test_crosses_stand_where_nothing_was_published():
    """One bar of the first panel, every place of the second."""
    with print_style():
        figure = draw(times())
    crosses = [sum(len(line.get_xdata()) for line in axis.lines if line.get_marker() == "x") for axis in figure.axes]
    assert crosses == [1, 3]


def test_text_lies_inside_and_axes_apart():
    """Nothing that is written is cut off by the edge, and no panel covers another."""
    for drawing in (times(), regions()):
        with print_style():
            figure = draw_stacks(drawing) if drawing.figure.value == "regions" else draw(drawing)
            figure.draw_without_rendering()
            edge = figure.bbox
            texts = [*figure.texts, *(t for legend in figure.legends for t in legend.get_texts())]
            texts += [t for axis in figure.axes for t in (*axis.texts, axis.xaxis.label)]
            boxes = [t.get_window_extent() for t in texts if t.get_text()]
        assert all(box.x0 >= edge.x0 - 1 and box.x1 <= edge.x1 + 1 for box in boxes)
        assert all(box.y0 >= edge.y0 - 1 and box.y1 <= edge.y1 + 1 for box in boxes)
        panels = [axis.get_tightbbox() for axis in figure.axes]
        assert not any(one.overlaps(other) for one, other in combinations(panels, 2))


def test_a_number_of_several_places_is_told_once():
    """Over the middle of them, the larger one first; a mark stands at each place."""
    figure = replace(TIME, panel="")
    grid = Grid(figure, "layer", "step_time", ("8", "16", "32"), ("a", "b"), ("",), {})
    numbers = (("claim-1", 7.0, "mean"), ("claim-2", 9.0, "up to"))
    points = [Point(REPORTED, {"batch_size": x}, v, note=n, origin=o) for o, v, n in numbers for x in grid.x]
    points += [Point(OBTAINED, {"batch_size": x, "system": "a"}, 8.0) for x in grid.x]
    with print_style():
        (axis,) = draw(Drawing(figure, grid, tuple(points))).axes
    assert [(text.get_text(), text.xy) for text in axis.texts] == [("up to 9\nmean 7", (1.0, 9.0))]
    assert len({tuple(line.get_xydata()[0]) for line in axis.lines if line.get_marker() == "D"}) == 6


def test_a_small_region_is_one_of_the_others():
    """Below 3 % of every step a region has no colour; the parts still add up, and the CSV keeps it."""
    with print_style():
        figure = draw_stacks(regions())
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sorted(widths) == [1.0, 39.0, 60.0]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["exchange", "experts", "other", "not published"]
    assert "gate,obtained,1" in csv_of(regions())
    assert "out of memory" in [text.get_text() for text in figure.axes[0].texts]


def test_a_caption_says_what_is_hollow_and_whose_number_it_is():
    """Number, title, what the paper published, engine, ids; of one that isn't drawn the reason."""
    text = caption(times())
    assert text.startswith("**Figure 3. Times** (`times`). Published: four of six bars.")
    assert "Solid: obtained on titan-rtx, engine sim: the nominal machine" in text
    assert "Crossed: no value was published." in text
    assert "reported (claim)" in text
    reason = caption(Drawing(replace(TIME, number=""), reason="nobody could read it"))
    assert reason == "**Times** (`times`). Published: four of six bars. Not drawn: nobody could read it.\n\n"


@pytest.mark.parametrize("values", [(1.0, 1.0), (0.01, 900.0), (1e-3, 1e5), (0.0, 0.0)])
def test_any_values_can_be_drawn(tmp_path, values):
    """Equal ones, such as lie decades apart, and nothing but zeros, as lines with and without intervals."""
    figure = replace(TIME, name="lines", value="speedup", baseline="a", mark="", panel="", series="")
    grid = Grid(figure, "layer", "step_time", ("8", "16"), ("",), ("",), {"system": "b"})
    points = [Point(OBTAINED, {"batch_size": x}, v, evidence="local") for x, v in zip(grid.x, values)]
    files = write_figures([Drawing(figure, grid, tuple(points), engine="local")], tmp_path, ("png",))
    assert files == {"lines": ["lines.png", "lines.csv"]}
    assert (tmp_path / "lines.png").stat().st_size > 5000
