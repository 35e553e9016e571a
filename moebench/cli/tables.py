"""Tables and JSON for the terminal: what several verbs print alike."""

import json
import math
from collections.abc import Sequence
from typing import Any

import click

from moebench.claims import verdict as v
from moebench.claims.scoreboard import Score, summary
from moebench.claims.why import quantity, reported

PIPE_WIDTH = 160  # columns where there is no terminal
LEAST_WIDTH = 120  # of a terminal that shows the reasons inside the table; below it they follow

SYMBOLS = {
    v.REPRODUCED: "✓",
    v.DIRECTION_ONLY: "≈",
    v.CONTRADICTED: "✗",
    v.CALIBRATED: "≡",
    v.DEPENDS: "◐",
    v.NOT_RUN: "–",
}
_COLOURS = {
    v.REPRODUCED: "green",
    v.DIRECTION_ONLY: "yellow",
    v.CONTRADICTED: "red",
    v.CALIBRATED: "blue",
    v.DEPENDS: "magenta",
    v.NOT_RUN: "dim",
}


def print_json(document: Any) -> None:
    """One JSON document on standard output; what JSON can't say (infinite, not a number) becomes null."""
    click.echo(json.dumps(_finite(document), indent=1, allow_nan=False, default=str))


def print_scores(scores: Sequence[Score]) -> None:
    """The claims table, and how the null model does beside it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPE_WIDTH)
    wide = console.width >= LEAST_WIDTH
    symbols = SYMBOLS if (console.encoding or "").lower().startswith("utf") else {}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, justify in (("claim", "left"), ("reported", "right"), ("obtained", "right"), ("5-95 %", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("verdict", no_wrap=True)
    if wide:
        table.add_column("why", overflow="fold")
    for score in scores:
        word = f"{symbols.get(score.verdict, '')} {score.verdict}".strip()
        obtained = "" if score.obtained is None else quantity(score.claim, score.obtained)
        verdict = Text(word, _COLOURS[score.verdict])
        cells: list[Any] = [score.claim.id, reported(score.claim), obtained, _interval(score), verdict]
        table.add_row(*cells, *([score.why] if wide else []))
    console.print(table)
    for score in [] if wide else scores:
        console.print(f"{score.claim.id}: {score.why}", highlight=False)
    counts = summary(scores)
    console.print(
        f"{counts['reproduced']} of {counts['judged']} judged claims reproduced "
        f"(\"no difference\" would reproduce {counts['null_reproduced']}); "
        f"{counts['claims'] - counts['judged']} not run",
        highlight=False,
    )


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table, never cut: it is also what a pipe reads."""
    widths = [max(len(title), *(len(row[i]) for row in rows), 0) for i, title in enumerate(columns)]
    for line in (columns, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())


def _interval(score: Score) -> str:
    if score.low is None or score.high is None:
        return ""
    return f"{quantity(score.claim, score.low)} to {quantity(score.claim, score.high)}"


def _finite(document: Any) -> Any:
    if isinstance(document, dict):
        return {k: _finite(value) for k, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    if isinstance(document, float) and not math.isfinite(document):
        return None
    return document
