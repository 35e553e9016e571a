"""The scoreboard in a terminal: a table where there is room for the reasons, else a block a claim.

A paper of very many claims is counted by experiment and verdict at the end of a run.
"""

import sys
from collections.abc import Sequence

import click

from moebench.claims import verdict as v
from moebench.claims.scoreboard import Score, counts_by_experiment, summary
from moebench.claims.why import quantities, quantity, reported
from moebench.claims.words import DEFINITIONS
from moebench.cli.tables import GAP, output_width, table_lines, widths_of, wrapped

LEAST_WHY = 56  # columns that the reasons need to stand beside the numbers
COLUMNS = ("claim", "reported", "obtained", "5-95 % of all draws", "verdict")
NUMBERS = COLUMNS[1:4]

SYMBOLS = {
    v.REPRODUCED: "✔",
    v.DIRECTION_ONLY: "≈",
    v.CONTRADICTED: "✗",
    v.CALIBRATED: "≡",
    v.DEPENDS: "◐",
    v.NOT_RUN: "○",
}
_COLOURS = {
    v.REPRODUCED: "green",
    v.DIRECTION_ONLY: "yellow",
    v.CONTRADICTED: "red",
    v.CALIBRATED: "blue",
    v.DEPENDS: "magenta",
    v.NOT_RUN: "bright_black",
}


def print_scores(scores: Sequence[Score]) -> None:
    """The claims, what the words mean, and how the null model does beside it."""
    width = output_width()
    symbols = SYMBOLS if (sys.stdout.encoding or "").lower().startswith("utf") else {}
    rows = [_cells(score, symbols) for score in scores]
    room = width - sum(widths_of(COLUMNS, rows)) - len(GAP) * len(COLUMNS)
    for line in _beside(scores, rows, room) if room >= LEAST_WHY else _blocks(scores, rows, width):
        click.echo(line)
    _print_total(scores, width)


def print_counts(scores: Sequence[Score], run: str) -> None:
    """How many claims of each experiment have which verdict, and where they are listed."""
    words, counts = counts_by_experiment(scores)
    rows = [[name, str(sum(own)), *(str(count or "") for count in own)] for name, own in counts.items()]
    for line in table_lines(("experiment", "claims", *words), rows, right=("claims", *words)):
        click.echo(line)
    _print_total(scores, output_width())
    click.echo(f"each claim and why: moebench claims {run} (--experiment NAME: of one experiment)")


def _print_total(scores: Sequence[Score], width: int) -> None:
    counts = summary(scores)
    total = (
        f"{counts['reproduced']} of {counts['judged']} judged claims reproduced "
        f"(\"no difference\" would reproduce {counts['null_reproduced']}); "
        f"{counts['claims'] - counts['judged']} not run"
    )
    for line in (total, *legend(scores)):
        click.echo(wrapped(line, width))


def why(score: Score) -> str:
    """The sentence of why, with the source where it is not the paper itself."""
    if not score.claim.is_independent:
        return score.why
    return f"{score.why}; not this paper's own word but {score.claim.where}: {score.claim.note}"


def legend(scores: Sequence[Score]) -> list[str]:
    """What the verdicts of these scores mean, and the outcomes that their reasons name."""
    used = {s.verdict for s in scores} | {
        word for s in scores for word, share in s.shares.items() if share >= v.WORTH_TELLING
    }
    return [f"{word}: {DEFINITIONS[word]}" for word in v.VERDICTS if word in used and word != v.NOT_RUN]


def _cells(score: Score, symbols: dict[str, str]) -> list[str]:
    obtained = "" if score.obtained is None else quantity(score.claim, score.obtained)
    word = f"{symbols.get(score.verdict, '')} {score.verdict}".strip()
    interval = quantities(score.claim, score.low, score.high)
    return [score.claim.id, reported(score.claim), obtained, interval, word]


def _beside(scores: Sequence[Score], rows: Sequence[Sequence[str]], room: int) -> list[str]:
    """Reasons in a column of their own."""
    widths = widths_of(COLUMNS, rows)
    lines = [click.style(_line(COLUMNS, widths) + GAP + "why", bold=True)]
    for score, row in zip(scores, rows):
        first, *more = wrapped(why(score), room).split("\n")
        start = _line(row[:-1], widths) + GAP + click.style(row[-1].ljust(widths[-1]), fg=_COLOURS[score.verdict])
        lines.append(start + GAP + first)
        lines += [" " * (sum(widths) + len(GAP) * len(widths)) + text for text in more]
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return GAP.join(
        cell.rjust(width) if title in NUMBERS else cell.ljust(width)
        for title, cell, width in zip(COLUMNS, cells, widths)
    )


def _blocks(scores: Sequence[Score], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """A claim with its numbers on one line, its reason below."""
    lines = []
    for score, (name, said, obtained, interval, word) in zip(scores, rows):
        numbers = [f"reported {said}"]
        if obtained:
            numbers.append(f"obtained {obtained}" + (f" (5-95 %: {interval})" if interval else ""))
        head = f"{click.style(name, bold=True)}{GAP}{click.style(word, fg=_COLOURS[score.verdict])}"
        fits = len(GAP.join((name, word, ", ".join(numbers)))) <= width
        lines += [f"{head}{GAP}{', '.join(numbers)}"] if fits else [head, wrapped(", ".join(numbers), width, "    ")]
        lines.append(wrapped(why(score), width, "    "))
    return lines
