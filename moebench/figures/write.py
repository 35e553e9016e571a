"""Figures into files: each in the formats that were asked for, its numbers as CSV beside it, and captions for all."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from moebench.figures.draw import draw
from moebench.figures.points import OBTAINED, REPORTED, Drawing, columns_of
from moebench.figures.stack import draw_stacks
from moebench.figures.style import print_style, save
from moebench.figures.words import value_label
from moebench.results.store import storage, write_atomically
from moebench.workloads.figure import REGIONS

CAPTIONS = "captions.md"
MEASURED, SIMULATED = (
    "the median of the samples, with the interval that theirs leaves possible",
    "the nominal machine, with the 5–95 % interval of the draws",
)

DECLARED = (
    "The simulated time of a fused kernel is the bytes that it declares at an assumed share of the bandwidth; no claim "
    "is judged by it."
)


def write_figures(drawings: Sequence[Drawing], folder: Path, formats: Sequence[str]) -> dict[str, list[str]]:
    """Draw what has points; name of a figure -> names of its files. Nothing is written where nothing has points.

    Raises:
        StorageError: a file can't be written.
    """
    import matplotlib.pyplot as plt

    found: dict[str, list[str]] = {}
    if not any(drawing.points for drawing in drawings):
        return found
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in (d for d in drawings if d.points):
            name = drawing.figure.name
            with print_style():
                figure = draw_stacks(drawing) if drawing.figure.value == REGIONS else draw(drawing)
                for form in formats:
                    save(figure, folder / f"{name}.{form}", form, drawing.figure.title)
                plt.close(figure)
            write_atomically(folder / f"{name}.csv", csv_of(drawing))
            found[name] = [f"{name}.{form}" for form in (*formats, "csv")]
        write_atomically(folder / CAPTIONS, "".join(map(caption, drawings)))
    return found


def csv_of(drawing: Drawing) -> str:
    """The points of a drawing as lines; the unit stands in the header."""
    grid = drawing.grid
    assert grid is not None
    names = columns_of(grid)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    what = value_label(grid).removesuffix(f", {grid.unit}") + (f" ({grid.unit})" if grid.unit else "")
    writer.writerow([*names, "source", what, "low", "high", "note", "origin", "evidence"])
    for p in drawing.points:
        at = {**grid.rest, **p.at}
        numbers = ["" if v is None else f"{v:.6g}" for v in (p.value, p.low, p.high)]
        writer.writerow([*(at.get(name, "") for name in names), p.source, *numbers, p.note, p.origin, p.evidence])
    return text.getvalue()


def caption(drawing: Drawing) -> str:
    """What a figure shows, as a paragraph of Markdown to stand under it."""
    figure = drawing.figure
    name = f"Figure {figure.number}. {figure.title}" if figure.number else figure.title
    parts = [f"**{name}** (`{figure.name}`)."]
    if figure.published:
        parts.append(f"Published: {figure.published}.")
    if not drawing.points:
        parts.append(f"Not drawn: {drawing.reason}.")
        return " ".join(parts) + "\n\n"
    if drawing.count(OBTAINED):
        how = SIMULATED if drawing.engine == "sim" else MEASURED
        solid = "Stacked" if figure.value == REGIONS else "Solid"
        parts.append(
            f"{solid}: obtained on {drawing.machine}, engine {drawing.engine}"
            + (f": {how}." if figure.value != REGIONS else ".")
        )
    ids = dict.fromkeys(p.origin for p in drawing.points if p.source == REPORTED)
    if ids:
        parts.append(f"Hollow or dashed: reported ({', '.join(ids)}).")
    if drawing.has_crosses:
        parts.append("Crossed: no value was published.")
    if drawing.engine == "sim" and drawing.grid is not None and drawing.grid.kind == "kernel":
        parts.append(DECLARED)
    return " ".join(parts) + "\n\n"
