"""What a page is made of: tables and figures as plain data, and how numbers are written."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from moebench.report.style import themed

_for_phones = ContextVar("for_phones", default=True)


class Linked(str):
    """A cell's text that comes from the rows of a case, to which a page leads its reader.

    Attributes:
        case: its name, where the page itself lists it; address: of another page that does.
    """

    case: str
    address: str

    def __new__(cls, text: str, case: str = "", address: str = "") -> "Linked":
        """The text of a cell, and where it leads."""
        own = super().__new__(cls, text)
        own.case, own.address = str(case), address
        return own


class Drawn(str):
    """A cell that is markup already: an interval as a drawing."""

    __slots__ = ()


def badge(tone: str, symbol: str, verdict: str) -> Drawn:
    """A verdict with its symbol on the tone of the page's colours; texts that are safe as they are."""
    return Drawn(f'<span class="verdict {tone}"><span aria-hidden="true">{symbol}</span> {verdict}</span>')


@dataclass(frozen=True)
class Table:
    """Columns and rows of text; `numeric` columns stand right-aligned.

    Attributes:
        lists_cases: whether each row begins with the name of a case that other tables may lead to.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str
    numeric: frozenset[str] = frozenset()
    lists_cases: bool = False


@dataclass(frozen=True)
class Figure:
    """A drawing with the sentence that it shows, a caption, and the data behind it.

    Attributes:
        svg: markup of the drawing, wide and narrow, of which the page shows one; or wide alone.
        table: behind a fold; below: another one, in sight. is_folded: whether all of it waits behind one.
    """

    title: str
    finding: str
    caption: str
    svg: str
    table: Table | None = None
    below: Table | None = None
    is_folded: bool = False


@contextmanager
def drawing(for_phones: bool) -> Iterator[None]:
    """Figures of the block are drawn once more, narrow, or once and scroll sideways where they don't fit."""
    before = _for_phones.set(for_phones)
    try:
        yield
    finally:
        _for_phones.reset(before)


def figure(
    key: str,
    title: str,
    finding: str,
    caption: str,
    draw: Callable[[bool], str],
    table: Table | None = None,
    below: Table | None = None,
) -> Figure:
    """A Figure whose drawings take the page's colours and speak to screen readers with the finding.

    Args:
        draw: `draw(narrow) -> svg`.
    """
    wide = themed(draw(False), title, finding, f"{key}-wide")
    if not _for_phones.get():
        return Figure(title, finding, caption, f'<div class="once">{wide}</div>', table, below)
    narrow = themed(draw(True), title, finding, f"{key}-narrow")
    svg = f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'
    return Figure(title, finding, caption, svg, table, below)


def number(value: float | None, digits: int = 3) -> str:
    """`1,234`, `12.3`, `0.0123`: significant digits, without exponents where a reader would want none."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{decimals}f}"


def times(value: float | None) -> str:
    """A ratio: `6.0x`."""
    return "–" if value is None or math.isnan(value) else f"{number(value)}x"


def percent(share: float) -> str:
    """A share: `42 %`."""
    return f"{100 * share:.0f} %"


def interval(low: float | None, high: float | None, unit: str = "") -> str:
    """`3.1x to 6.2x`, or nothing."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return ""
    return f"{number(low)}{unit} to {number(high)}{unit}"


_BINARY = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def size(value_bytes: float) -> str:
    """Bytes in binary units."""
    for unit, scale in _BINARY:
        if abs(value_bytes) >= scale:
            return f"{number(value_bytes / scale)} {unit}"
    return f"{value_bytes:.0f} B"
