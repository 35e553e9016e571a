"""Quantities as people write them, `25GB/s` or `14 us`, turned into SI numbers; the only place that knows unit names.

Bits and bytes never mix: `Gb/s` (or `Gbit/s`) is bits, `GB/s` bytes, and letters' case matters.
"""

import math
import re
from dataclasses import dataclass

from moebench.workloads.errors import InputError

BYTES, RATE, FLOP, FLOP_RATE, TIME, SHARE, COUNT = "bytes", "bytes/s", "FLOP", "FLOP/s", "time", "share", "count"

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}


def _units() -> dict[str, dict[str, float]]:
    """Unit name -> factor to SI, by dimension."""
    sizes = {f"{prefix}B": factor for prefix, factor in (_DECIMAL | _BINARY | {"K": 1e3}).items()}
    bits = {f"{prefix}{bit}/s": f / 8 for prefix, f in (_DECIMAL | {"K": 1e3}).items() for bit in ("b", "bit")}
    work = {f"{prefix}FLOP": factor for prefix, factor in _DECIMAL.items()}
    return {
        BYTES: sizes,
        RATE: {f"{unit}/s": factor for unit, factor in sizes.items()} | bits,
        FLOP: work,
        FLOP_RATE: {f"{unit}/s": factor for unit, factor in work.items()},
        TIME: {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
        SHARE: {"1": 1.0, "%": 0.01},
        COUNT: {"1": 1.0},
    }


UNITS = _units()
_EXAMPLES = {
    BYTES: "24 GiB or 300 MB",
    RATE: "25 GB/s or 100 Gb/s",
    FLOP: "2 GFLOP",
    FLOP_RATE: "16.3 TFLOP/s",
    TIME: "14 us",
    SHARE: "0.8 or 80 %",
    COUNT: "72",
}
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\S*)")


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number with the unit in which it was written; `number x scale` is the SI value."""

    number: float
    unit: str
    scale: float

    @property
    def si(self) -> float:
        """Bytes, bytes/s, FLOP, FLOP/s, seconds, or the plain number."""
        return self.number * self.scale


def parse(text: str | int | float, dimension: str, where: str = "") -> Quantity:
    """Read a quantity of a dimension, one of the keys of `UNITS`; a plain number is a share or a count.

    Args:
        where: put before the error's text, to say which file and key is meant.

    Raises:
        InputError: not a number, not finite, no unit where one is needed, an unknown unit or one of another dimension.
    """
    place = f"{where}: " if where else ""
    if isinstance(text, bool) or not isinstance(text, (str, int, float)):
        raise InputError(f"{place}{text!r} is not a quantity; write for example {_EXAMPLES[dimension]}")
    written = str(text).strip()
    if re.fullmatch(r"[+-]?(nan|inf|infinity)\b.*", written, re.IGNORECASE):
        raise InputError(f"{place}{written} is not a finite number")
    match = _QUANTITY.fullmatch(written)
    if match is None:
        raise InputError(f"{place}{written!r} is not a quantity; write for example {_EXAMPLES[dimension]}")
    number, unit = float(match[1]), match[2].replace("\N{GREEK SMALL LETTER MU}", "\N{MICRO SIGN}") or "1"
    scale = _scale(unit, dimension, place, written)
    if not math.isfinite(number * scale):
        raise InputError(f"{place}{written} is not a finite number")
    return Quantity(number, unit, scale)


def parse_quantity(text: str | int | float, expected_dimension: str, where: str = "") -> float:
    """The SI value of a quantity: `parse_quantity("25GB/s", "bytes/s")` is 25e9.

    Raises:
        InputError: as `parse`.
    """
    return parse(text, expected_dimension, where).si


def _scale(unit: str, dimension: str, place: str, written: str) -> float:
    """Factor from `unit` to SI."""
    known = UNITS[dimension]
    if unit in known:
        return known[unit]
    example = _EXAMPLES[dimension]
    if unit == "1":
        raise InputError(f"{place}{written} has no unit; {dimension} is written as {example}")
    for other, names in UNITS.items():
        if unit in names:
            raise InputError(f"{place}{written} is a quantity of {other}, expected {dimension} such as {example}")
    same = sorted(name for name in known if name.lower() == unit.lower())
    hint = f" (letters' case matters: {' or '.join(same)}?)" if same else ""
    raise InputError(f"{place}unknown unit {unit!r}{hint}; {dimension} is written in: {', '.join(known)}")
