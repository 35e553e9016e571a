"""How figures look: one style, colours that the page can turn over for dark mode, and SVG with reproducible bytes.

Figures are drawn once. Every colour is a sentinel that `themed` replaces by a CSS variable of the page (page.css
defines the light and dark values), so the same drawing serves both; a file on its own gets the light values.
"""

import hashlib
import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moebench.report.text import text_of

LEAST_CLASS = 3  # a style that occurs so often in a drawing is written once

INK, MUTED, GRID, PAPER = "#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04"
# Okabe-Ito order, told apart by colour-blind readers; each series also has its own marker and hatch.
SERIES = tuple(f"#0a0c{i:02x}" for i in range(1, 10))
MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*", "h")
# Lines alone: a hatch of dots is a hundred times as much markup.
HATCHES = ("", "///", "--", "\\\\\\", "xx", "++", "||", "//", "\\\\")

LIGHT = {
    INK: "#1b1e23",
    MUTED: "#5c6370",
    GRID: "#d9dce1",
    PAPER: "#ffffff",
    **dict(
        zip(
            SERIES,
            ("#0072b2", "#d55e00", "#009e73", "#8f5bb5", "#c48a00", "#2f9bd6", "#b04a6f", "#6b7280", "#4f7a28"),
        )
    ),
}
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{i})" for i, colour in enumerate(SERIES, 1)},
}


@contextmanager
def figure_style() -> Iterator[None]:
    """Matplotlib settings of every figure of the project, inside the block only."""
    import matplotlib
    import seaborn

    matplotlib.use("Agg")
    settings: dict[Any, Any] = {
        "svg.hashsalt": "moebench",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.5,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": MUTED,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "grid.color": GRID,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.titlesize": 10,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "legend.frameon": False,
        "hatch.linewidth": 0.5,
        "text.parse_math": False,  # a name may hold dollar signs
    }
    with seaborn.axes_style("whitegrid", rc=settings), matplotlib.rc_context(settings):
        yield


def svg_of(figure, is_tight: bool = True) -> str:
    """The figure as an SVG element, without date or XML header; closes the figure.

    Args:
        is_tight: cut to what is drawn, which takes as long as drawing it.
    """
    import matplotlib.pyplot as plt

    buffer = io.StringIO()
    cut: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.05} if is_tight else {}
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, **cut)
    plt.close(figure)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'(<svg[^>]*?) (?:width|height)="[^"]*"([^>]*?) (?:width|height)="[^"]*"', r"\1\2", text, count=1)
    return _slim(text)


def _slim(svg: str) -> str:
    """The same drawing in about half the characters: no ids that nothing refers to, indents, digits beyond 1/100 pt.

    Of points on a path 1/10 pt is enough.
    """
    used = list(dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', svg)))
    short = {name: f"i{place}" for place, name in enumerate(used)}
    svg = re.sub(r' id="([^"]*)"', lambda m: f' id="{short[m.group(1)]}"' if m.group(1) in short else "", svg)
    svg = re.sub(r'(href="#|url\(#)([^")]+)', lambda m: m.group(1) + short[m.group(2)], svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r"\d+\.\d{3,}", lambda m: f"{float(m.group(0)):.2f}", svg)
    svg = re.sub(r'(?<= d=")[^"]*', lambda m: re.sub(r"\d+\.\d{2,}", _tenths, m.group(0)), svg)
    svg = re.sub(r">\s+<", "><", svg)
    svg = re.sub(r"<g>((?:(?!</?g\b).)*)</g>", r"\1", svg, flags=re.S)
    return _with_classes(svg)


def _with_classes(svg: str) -> str:
    """Styles that occur again and again as classes, named by what they say: one name is one style on a page."""
    counts = Counter(style for style in re.findall(r' style="([^"]*)"', svg) if "url(" not in style)
    names = {style: f"s{_digest(style)}" for style, count in counts.items() if count >= LEAST_CLASS}
    if not names:
        return svg
    svg = re.sub(
        r' style="([^"]*)"', lambda m: f' class="{names[m.group(1)]}"' if m.group(1) in names else m.group(0), svg
    )
    rules = "".join(f".{name}{{{style};}}" for style, name in names.items())
    return re.sub(r"(<svg[^>]*>)", lambda m: f"{m.group(1)}<style>{rules}</style>", svg, count=1)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=3).hexdigest()


def _tenths(number: re.Match[str]) -> str:
    return f"{float(number.group(0)):.1f}".removesuffix(".0")


def themed(svg: str, title: str, description: str, key: str) -> str:
    """An inline SVG for the page: CSS variables for colours, a title and a description for those who can't see it.

    Args:
        key: prefix of every id, so that several figures can share one page.
    """
    for sentinel, variable in VARIABLES.items():
        svg = svg.replace(sentinel, variable)
    own = f"f{_digest(key)}"
    svg = re.sub(r'\bid="([^"]+)"', rf'id="{own}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|href="#|url\(#)([^")]+)', rf"\1{own}-\2", svg)
    svg = svg.replace("font-family: 'DejaVu Sans'", "font-family: inherit")
    svg = re.sub(r"font: ([^;]*?)'DejaVu Sans'[^;\"]*", r"font: \1var(--font)", svg)
    label = f'role="img" aria-labelledby="{own}-t {own}-d"'
    heading = f'<title id="{own}-t">{text_of(title)}</title><desc id="{own}-d">{text_of(description)}</desc>'
    box = re.search(r'viewBox="[\d.]+ [\d.]+ ([\d.]+)', svg)
    if box is None:
        raise ValueError("an SVG without a viewBox has no size")
    width_pt = float(box.group(1))
    size = f'style="min-width:{0.95 * width_pt:.0f}px;max-width:{1.45 * width_pt:.0f}px"'
    return re.sub(r"<svg([^>]*)>", lambda tag: f"<svg{tag[1]} {size} {label}>{heading}", svg, count=1)


def standalone(svg: str) -> str:
    """The SVG as a file of its own, in the light colours."""
    for sentinel, colour in LIGHT.items():
        svg = svg.replace(sentinel, colour)
    return svg
