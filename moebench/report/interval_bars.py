"""A change with its interval as a drawing of a line's height, all of a table on one scale."""

import math
from collections.abc import Iterable

from moebench.compare.comparison import Finding

NICE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 100.0)
COVERED = 0.95  # share of the changes that the scale holds; the rest stand at its end, with an arrow
HALF = 50  # units of a drawing on each side of no change


def scale_of(findings: Iterable[Finding]) -> float:
    """The change at either end of the drawings: `0.2` is from -20 to +20 %."""
    ends = sorted(max(abs(v) for v in _finite(finding)) for finding in findings if _finite(finding))
    if not ends:
        return NICE[0]
    wanted = ends[min(int(COVERED * len(ends)), len(ends) - 1)]
    return next((nice for nice in NICE if nice >= wanted), NICE[-1])


def _finite(finding: Finding) -> list[float]:
    values = (finding.change, finding.low, finding.high)
    return [value for value in values if value is not None and math.isfinite(value)]


def drawing(finding: Finding, scale: float) -> str:
    """The mark of a change and the line of its interval, or of an exact one the line from no change; or nothing.

    What it shows stands as text beside it, so that it is hidden from those who hear the page.
    """
    if finding.change is None or not math.isfinite(finding.change):
        return ""
    middle = _place(finding.change, scale)
    low, high = (finding.low, finding.high) if finding.low is not None and finding.high is not None else (0.0, None)
    ends = _place(low, scale), middle if high is None else _place(high, scale)
    if abs(finding.change) > scale:
        tip = math.copysign(HALF, finding.change)
        mark = f'<path class=m d="M{tip:g} 6l{-math.copysign(6, tip):g} -4v8z"/>'
    else:
        mark = f"<circle class=m cx={middle:g} cy=6 r=3.2 />"
    return (
        f'<svg class=iv viewBox="-54 0 108 12" aria-hidden="true"><path class=z d="M0 0V12"/>'
        f'<path class=i d="M{min(ends):g} 6H{max(ends):g}"/>{mark}</svg>'
    )


def _place(change: float, scale: float) -> float:
    return round(HALF * max(-1.0, min(1.0, change / scale)), 1)
