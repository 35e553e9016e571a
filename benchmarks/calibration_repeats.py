"""Whether a calibration repeats: each parameter of one, and whether the next one's value lies in its stated range.

`benchmarks.validation` calibrates every cluster before its cases and once more after them, minutes later, and writes
what both found; docs/accuracy.md shows it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moebench.local.fit import Range


@dataclass(frozen=True)
class Repeat:
    """One parameter of one cluster in SI units: value and range of the first calibration, value of the second."""

    size: str
    name: str
    value: float
    low: float
    high: float
    again: float

    @property
    def is_inside(self) -> bool:
        """Whether the second value lies in the first one's range."""
        return self.low <= self.again <= self.high


def path_beside(validation: Path) -> Path:
    """The file of a validation's repeats."""
    return validation.with_name(f"calibration-repeats-{validation.name.removeprefix('validation-')}")


def repeats(size: str, first: Mapping[str, Range], second: Mapping[str, Range]) -> list[Repeat]:
    """The parameters that both measured; those that are given (a range of no width) can't differ."""
    return [
        Repeat(size, name, found.value, found.low, found.high, second[name].value)
        for name, found in first.items()
        if name in second and found.low < found.high
    ]


def markdown(found: Sequence[Repeat]) -> str:
    """How many repeat, and a table of those that don't."""
    outside = [r for r in found if not r.is_inside]
    head = (
        f"Each cluster is calibrated once more after its cases: {len(found) - len(outside)} of {len(found)} parameters "
        f"come out within the range that the first calibration states."
    )
    if not outside:
        return head
    lines = ["", "", "| cluster | parameter | first | its range | again |", "|---|---|---|---|---|"]
    lines += [f"| {r.size} | {r.name} | {r.value:.4g} | {r.low:.4g} to {r.high:.4g} | {r.again:.4g} |" for r in outside]
    return head + " These do not (SI units):" + "\n".join(lines)
