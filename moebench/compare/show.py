"""A comparison on the terminal: a rich table where there is one, plain lines in a pipe."""

import sys
from collections.abc import Sequence

import click

from moebench.cli.tables import print_table
from moebench.compare.cells import COLUMNS, MOST_SHOWN, cells, headline, shown, summary
from moebench.compare.comparison import BROKEN, FASTER, FIXED, INCONCLUSIVE, MISSING, REBASED, SLOWER, Comparison
from moebench.compare.escape import plain
from moebench.compare.side import Side

STYLES = {
    BROKEN: "bold red",
    SLOWER: "red",
    MISSING: "yellow",
    INCONCLUSIVE: "yellow",
    REBASED: "cyan",
    FIXED: "green",
    FASTER: "green",
}


def print_comparison(comparison: Comparison, everything: bool = False, strict: bool = False) -> None:
    """Sides, notes, findings that say something, summary."""
    for name, side in (("base", comparison.base), ("head", comparison.head)):
        click.echo(f"{name}: {title(side)}")
    for note in comparison.notes:
        click.echo(f"note: {plain(note)}")
    findings = shown(comparison, everything)
    kept = findings if everything else findings[:MOST_SHOWN]
    if kept:
        click.echo()
        _table([(finding.verdict, cells(finding)) for finding in kept])
    if len(findings) > len(kept):
        click.echo(f"and {len(findings) - len(kept)} more: --all shows every one")
    click.echo()
    click.echo(f"{headline(comparison, strict)}. {summary(comparison)}.")


def title(side: Side) -> str:
    """What a side is, in one line."""
    facts = [side.name, f"suite {side.suite}", side.created, side.commit and f"commit {side.commit[:12]}"]
    facts += [side.what_if and f"what if {side.what_if}"]
    return ", ".join(fact for fact in facts if fact)


def _table(rows: Sequence[tuple[str, Sequence[str]]]) -> None:
    if not sys.stdout.isatty():
        print_table(COLUMNS, [[plain(cell, 1000) for cell in row] for _, row in rows])
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in COLUMNS:
        table.add_column(
            column, justify="right" if column in ("base", "head", "change") else "left", overflow="fold",
            no_wrap=column in ("verdict", "base", "head"),
        )  # fmt: skip
    for verdict, row in rows:
        first, *rest = (plain(cell, 1000) for cell in row)
        table.add_row(Text(first, style=STYLES.get(verdict, "")), *map(Text, rest))
    Console().print(table)
