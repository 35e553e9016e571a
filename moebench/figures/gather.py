"""Everything that is known of a suite's figures: what the paper reports, and what a run obtained."""

from collections.abc import Mapping, Sequence

from moebench.claims.reported import claims_of
from moebench.figures.obtained import metrics_of, obtained_points
from moebench.figures.points import Drawing, Grid, Point
from moebench.figures.reported import reported_points, unpublished
from moebench.results.rows import Row
from moebench.results.store import RunFolder
from moebench.workloads.figure import PaperFigure
from moebench.workloads.suite import Suite

NO_RUN, NO_CASE = "no finished run of the suite", "the run has no case of it"
NO_NUMBER = "no case of it has a number to judge by"


def gather(suite: Suite, folder: RunFolder | None = None) -> list[Drawing]:
    """The figures of a suite in its order, each with its points or the reason why it has none.

    Raises:
        InputError: a figure names a reported number that isn't there or has no place in it; a row can't be read.
    """
    rows = _rows(suite, folder)
    return [_drawing(figure, suite, rows) for figure in suite.figures]


def _rows(suite: Suite, folder: RunFolder | None) -> Mapping[str, Sequence[Row]] | None:
    """The run's rows that some figure draws, by metric; read once."""
    if folder is None:
        return None
    own = {e.name: e for e in suite.experiments}
    grids = [Grid.of(figure, own[figure.experiment]) for figure in suite.figures if figure.experiment]
    wanted = {metric for grid in grids for metric in metrics_of(grid)}
    found: dict[str, list[Row]] = {name: [] for name in wanted}
    for row in folder.rows(*sorted(wanted)) if wanted else ():
        found[row.metric].append(row)
    return found


def _drawing(figure: PaperFigure, suite: Suite, rows: Mapping[str, Sequence[Row]] | None) -> Drawing:
    if figure.not_drawn:
        return Drawing(figure, reason=figure.not_drawn)
    experiment = next(e for e in suite.experiments if e.name == figure.experiment)
    grid = Grid.of(figure, experiment)
    reported = reported_points(grid, claims_of(suite.reported)) if suite.reported else []
    nothing_ran: tuple[list[Point], str, str] = ([], "", "")
    obtained, engine, machine = nothing_ran if rows is None else obtained_points(grid, suite, experiment, rows)
    if not reported and not any(p.value is not None for p in obtained):
        nothing = "nothing reported has a place in it, and " if suite.reported else ""
        why = ", ".join(dict.fromkeys(p.note for p in obtained))
        found = NO_RUN if rows is None else f"{NO_NUMBER} ({why})" if obtained else NO_CASE
        return Drawing(figure, grid, reason=nothing + found)
    crossed = unpublished(grid, reported) if suite.reported else []
    return Drawing(figure, grid, (*reported, *obtained, *crossed), engine=engine, machine=machine)
