"""Small drawings of values over many runs: one line, with a mark where its level changed.

They are drawn by hand, not by matplotlib: an index holds hundreds, each a few lines of markup.
"""

from collections.abc import Mapping

import numpy as np

from moebench.compare.comparison import FASTER, INCONCLUSIVE, REBASED, SLOWER

WIDTH, HEIGHT, PAD = 240, 56, 6
MOST_POINTS = 160  # of a line; of more, the lowest and the highest of each stretch are drawn
SHAPES = {  # no two verdicts by colour alone
    SLOWER: "M{x} {y}l-5 9h10z",
    FASTER: "M{x} {b}l-5 -9h10z",
    REBASED: "M{x} {y}l4 4.5l-4 4.5l-4 -4.5z",
    INCONCLUSIVE: "M{x} {y}v9",
}
TONES = {SLOWER: "bad", FASTER: "good"}


def trend_line(values: np.ndarray, changes: Mapping[int, str], label: str, is_small: bool = False) -> str:
    """An SVG of values in the order of their runs, NaN where a run has none.

    Args:
        changes: place of the first run of each new level, and its verdict.
        label: what it shows, as text that is safe in an attribute; empty where the text beside it says so.
    """
    places = np.flatnonzero(np.isfinite(values))
    if not places.size:
        return ""
    low, high = float(values[places].min()), float(values[places].max())
    width = WIDTH / 2 if is_small else WIDTH
    height = HEIGHT / 2 if is_small else HEIGHT

    def x(place: float) -> float:
        return round(PAD + place * (width - 2 * PAD) / max(len(values) - 1, 1), 1)

    def y(value: float) -> float:
        share = (value - low) / (high - low) if high > low else 0.5
        return round(height - PAD - share * (height - 2 * PAD), 1)

    kept = _thinned(places, values)
    line = " ".join(f"{x(place):g} {y(values[place]):g}" for place in kept)
    end = f"<circle cx={x(kept[-1]):g} cy={y(values[kept[-1]]):g} r=2 />"
    marks = "".join(_mark(x(place), verdict, height) for place, verdict in changes.items())
    named = f'role="img" aria-label="{label}"' if label else 'aria-hidden="true"'
    size = "tl small" if is_small else "tl"
    return f'<svg class="{size}" viewBox="0 0 {width:g} {height:g}" {named}><path d="M{line}"/>{end}{marks}</svg>'


def _thinned(places: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Of many places those of the lowest and the highest value in each of as many stretches as are drawn."""
    if places.size <= MOST_POINTS:
        return places
    kept = {int(places[0]), int(places[-1])}
    for part in np.array_split(places, MOST_POINTS // 2):
        kept |= {int(part[values[part].argmin()]), int(part[values[part].argmax()])}
    return np.array(sorted(kept))


def _mark(x: float, verdict: str, height: float) -> str:
    shape = SHAPES.get(verdict, SHAPES[INCONCLUSIVE]).format(x=f"{x:g}", y="0", b="9")
    return f'<path class="v" d="M{x:g} 9V{height:g}"/><path class="m {TONES.get(verdict, "idle")}" d="{shape}"/>'
