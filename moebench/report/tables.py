"""Tables as markup, without closing tags that HTML adds by itself: a page holds tens of thousands of cells.

Every number of a page leads to the rows that it comes from. A cell that is `Linked` names a case; the table that lists
the page's cases gives each an anchor and says in which lines of the results file its rows stand.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace

from moebench.compare.escape import plain
from moebench.report.parts import Drawn, Linked, Table
from moebench.report.text import css_string, escape, text_of

LINES = "lines"

Anchors = Mapping[str, str]  # case -> id of its row


def anchors_of(tables: Iterable[Table]) -> dict[str, str]:
    """The id of every case that a table of cases lists."""
    return {str(row[0]): anchor_of(str(row[0])) for table in tables if table.lists_cases for row in table.rows}


def anchor_of(case: str) -> str:
    """The id of a case on the page of any run, so that other pages can lead there too."""
    return "c" + hashlib.blake2b(case.encode(errors="surrogatepass"), digest_size=4).hexdigest()


def with_lines(table: Table, places: Mapping[str, tuple[int, int]]) -> Table:
    """A table of cases with a last column: the first and last line of each case in the results file.

    Args:
        places: by case.
    """
    rows = [[*row, _span(places.get(str(row[0]).partition(" (")[0]))] for row in table.rows]
    columns = [*table.columns, LINES]
    return replace(table, columns=columns, rows=rows, numeric=table.numeric | {LINES}, lists_cases=True)


def _span(lines: tuple[int, int] | None) -> str:
    return f"{lines[0]}–{lines[1]}" if lines else ""


def table_html(table: Table, anchors: Anchors | None = None) -> str:
    """A table that scrolls inside its own box, with its column names for narrow pages."""
    anchors, given = anchors or {}, set()
    names = "".join(f"--c{place}:{css_string(plain(name))};" for place, name in enumerate(table.columns, 1))
    pieces = [
        f'<div class="scroll{" cases" * table.lists_cases}" tabindex="0" role="region" '
        f'aria-label="{text_of(table.caption)}">'
        f'<table class="sortable" style="{escape(names)}"><thead><tr>',
        *(_head(name, name in table.numeric) for name in table.columns),
        "</tr></thead><tbody>",
    ]
    starts = ["<td class=n>" if name in table.numeric else "<td>" for name in table.columns]
    starts[:1] = ["<th scope=row>"]
    for row in table.rows:
        anchor = anchors.get(str(row[0])) if table.lists_cases else None
        if anchor and anchor not in given:
            given.add(anchor)
            pieces.append(f"<tr id={anchor}>")
        else:
            pieces.append("<tr>")
        for start, cell in zip(starts, row):
            pieces += (start, cell_html(cell, anchors))
        pieces.append("</tr>\n")
    return "".join([*pieces, "</tbody></table></div>"])


def _head(name: str, is_numeric: bool) -> str:
    return f'<th scope="col"{" class=n" if is_numeric else ""}>{text_of(name)}</th>'


def cell_html(cell: str, anchors: Anchors) -> str:
    """What stands between the tags of a cell."""
    if isinstance(cell, Drawn):
        return str(cell)
    if isinstance(cell, Linked):
        address = cell.address or ("#" + anchors[cell.case] if cell.case in anchors else "")
        if address:
            return f'<a href="{escape(address)}">{text_of(cell)}</a>'
    return text_of(cell)
