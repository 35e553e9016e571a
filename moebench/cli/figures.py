"""`moebench figures`: the figures of a suite's paper, redrawn for print."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from moebench.figures.points import Drawing
    from moebench.results.store import RunFolder
    from moebench.workloads.suite import Suite

FOLDER = "figures"
SPARE = ("title", "files")  # columns that a narrow terminal does without


@click.command()
@click.argument("run", required=False, type=click.Path(path_type=Path))
@click.option("--suite", metavar="NAME|FILE", help="Whose figures; of RUN's suite where nothing is said.")
@click.option("--run", "also_run", type=click.Path(path_type=Path), metavar="DIR", help="The same as RUN.")
@click.option("--format", "formats", multiple=True, metavar="svg,png,pdf", help="Those to write; by default all.")
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Default: figures/ in the run folder; without a run, here.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON document: a list of objects with `name`.")
def command(
    run: Path | None,
    suite: str | None,
    also_run: Path | None,
    formats: tuple[str, ...],
    out: Path | None,
    as_json: bool,
) -> None:
    """Redraw the figures that a suite lists of its paper: reported hollow, obtained solid.

    Numbers come from RUN, a run folder; without it from the newest finished run of the suite under runs/, one of the
    whole suite before quick, narrowed and what-if ones. Without any run, what was reported is drawn alone.
    """
    from moebench.cli.tables import print_json
    from moebench.figures.gather import gather
    from moebench.figures.write import write_figures

    wanted = _formats(formats)
    loaded, folder = _source(_one(run, also_run), suite)
    drawings = gather(loaded, folder)
    if not drawings:
        _say_none(loaded, as_json)
        return
    click.echo(_described(loaded, folder), err=True)
    place = out or (folder.path / FOLDER if folder else Path(FOLDER))
    files = write_figures(drawings, place, wanted)
    if as_json:
        print_json([_entry(drawing, files, place) for drawing in drawings])
    else:
        _print(drawings, files, place)


def _formats(given: Sequence[str]) -> tuple[str, ...]:
    from moebench.figures.style import FORMATS
    from moebench.workloads.errors import one_of

    wanted = [part.strip() for text in given for part in text.split(",")]
    for name in wanted:
        if name not in FORMATS:
            raise one_of("format", name, FORMATS, "--format")
    return tuple(dict.fromkeys(wanted)) or FORMATS


def _one(run: Path | None, also_run: Path | None) -> Path | None:
    if run is not None and also_run is not None:
        raise click.UsageError("RUN and --run are the same; give one of them")
    return run or also_run


def _source(run: Path | None, name: str | None) -> "tuple[Suite, RunFolder | None]":
    """The suite as its file has it today, and the run; a suite that is no file any more as the run has it."""
    from moebench.cli.claims import finished_runs
    from moebench.results.store import RunFolder
    from moebench.workloads.errors import InputError
    from moebench.workloads.load import load_suite, suite_names

    if run is None and name is None:
        raise InputError(f"say which suite's figures: --suite, one of {', '.join(suite_names())} or a file")
    suite = load_suite(name) if name else None
    if run is None:
        assert suite is not None
        return suite, next(iter(finished_runs().get(suite.name, ())), None)
    folder = RunFolder.open(run)
    if suite is None:
        return load_suite(folder.suite.name) if folder.suite.name in suite_names() else folder.suite, folder
    if suite.name != folder.suite.name:
        raise InputError(f"{run}: is a run of suite {folder.suite.name}, not of {suite.name}")
    return suite, folder


def _say_none(suite: "Suite", as_json: bool) -> None:
    from moebench.cli.tables import print_json

    why = "" if suite.reported else ", and it reproduces no paper"
    click.echo(f"suite {suite.name} lists no figures{why}", err=as_json)
    if as_json:
        print_json([])


def _described(suite: "Suite", folder: "RunFolder | None") -> str:
    from moebench.cli.claims import described

    if folder is None:
        left = ": what was reported is drawn alone" if suite.reported else ", and it reproduces no paper"
        return f"no finished run of suite {suite.name} under runs/{left}"
    return described(folder) + ("" if suite.reported else "; the suite reproduces no paper")


def _entry(drawing: "Drawing", files: dict[str, list[str]], place: Path) -> dict[str, Any]:
    from moebench.figures.points import OBTAINED, REPORTED

    figure = drawing.figure
    return {
        "name": figure.name,
        "number": figure.number or None,
        "title": figure.title,
        "published": figure.published or None,
        "reported": drawing.count(REPORTED),
        "obtained": drawing.count(OBTAINED),
        "engine": drawing.engine or None,
        "files": [str(place / name) for name in files.get(figure.name, ())],
        "not_drawn": drawing.reason or None,
    }


def _print(drawings: "Sequence[Drawing]", files: dict[str, list[str]], place: Path) -> None:
    """A line a figure, as wide as there is room for, then why some are not drawn."""
    from moebench.cli.tables import chosen, fitting, is_wrapped, output_width, table_lines, wrapped

    columns = ["figure", "name", "drawn from", "files", "title"]
    rows = [
        [d.figure.number or "–", d.figure.name, _from(d), _forms(files.get(d.figure.name, ())), d.figure.title]
        for d in drawings
    ]
    kept = fitting(columns, rows, SPARE, output_width())
    for line in table_lines(kept, chosen(columns, rows, kept)):
        click.echo(line)
    told = [f"{d.figure.name} is not drawn: {d.reason}" for d in drawings if not d.points]
    if any(not d.figure.number for d in drawings):
        told.append("–: its number in the paper is not known, or there is no paper")
    for text in told:
        click.echo(wrapped(text, output_width()) if is_wrapped() else text)
    if files:
        click.echo(f"{place}: {sum(map(len, files.values()))} files, and captions.md")


def _from(drawing: "Drawing") -> str:
    from moebench.figures.points import OBTAINED, REPORTED

    if not drawing.points:
        return "not drawn"
    engine = f" ({drawing.engine})" if drawing.engine else ""
    return f"{drawing.count(REPORTED)} reported, {drawing.count(OBTAINED)} obtained{engine}"


def _forms(names: Sequence[str]) -> str:
    """`svg, png, csv`: the files are named like the figure."""
    return ", ".join(name.rpartition(".")[2] for name in names)
