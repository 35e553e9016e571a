"""Text, tables and JSON for the terminal: what several verbs print alike. Nothing here breaks a name."""

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from typing import Any

import click

PIPE_WIDTH = 160  # columns where there is no terminal and COLUMNS says nothing
GAP = "  "


def print_json(document: Any) -> None:
    """One JSON document on standard output; what JSON can't say (infinite, not a number) becomes null."""
    click.echo(json.dumps(_finite(document), indent=1, allow_nan=False, default=str))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table, never cut: it is also what a pipe reads."""
    for line in table_lines(columns, rows):
        click.echo(line)


def table_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> list[str]:
    """A heading and a line a row; the columns named in `right` end at the same place."""
    widths = widths_of(columns, rows)
    return [
        GAP.join(
            cell.rjust(width) if title in right else cell.ljust(width)
            for title, cell, width in zip(columns, line, widths)
        ).rstrip()
        for line in (columns, *rows)
    ]


def widths_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    """Characters that each column needs."""
    return [max(len(title), *(len(row[i]) for row in rows), 0) for i, title in enumerate(columns)]


def fitting(columns: Sequence[str], rows: Sequence[Sequence[str]], spare: Sequence[str], width: int) -> list[str]:
    """The columns that are left when as many of `spare`, in that order, are dropped as the width demands."""
    needed = dict(zip(columns, widths_of(columns, rows)))
    for title in spare:
        if sum(needed.values()) + len(GAP) * (len(needed) - 1) <= width:
            break
        needed.pop(title, None)
    return list(needed)


def chosen(columns: Sequence[str], rows: Sequence[Sequence[str]], kept: Sequence[str]) -> list[list[str]]:
    """The cells of the columns that are kept."""
    places = [columns.index(title) for title in kept]
    return [[row[place] for place in places] for row in rows]


def output_width() -> int:
    """Columns of the terminal, or what COLUMNS says, or `PIPE_WIDTH`."""
    if os.environ.get("COLUMNS", "").isdigit() and int(os.environ["COLUMNS"]):
        return int(os.environ["COLUMNS"])
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH


def is_wrapped() -> bool:
    """Whether sentences break at the output's width: not in a pipe of which nobody said how wide it is."""
    return sys.stdout.isatty() or bool(os.environ.get("COLUMNS"))


def wrapped(text: str, width: int, indent: str = "") -> str:
    """Lines of at most `width` characters, unless a single word is longer."""
    return textwrap.fill(
        text, max(width, 20), initial_indent=indent, subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _finite(document: Any) -> Any:
    if isinstance(document, dict):
        return {k: _finite(value) for k, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(value) for value in document]
    if isinstance(document, float) and not math.isfinite(document):
        return None
    return document
