"""Seconds, bytes and counts as a person writes them: three digits and the unit that fits."""

import math

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
GIB = 2**30


def times(seconds: float) -> str:
    """`812 ms`, `3.40 us`, `0 s`."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    scale, unit = next(((s, u) for s, u in _TIMES if abs(seconds) >= 0.9995 * s), _TIMES[-1])
    return f"{_three(seconds / scale)} {unit}"


def amount(value: float, unit: str) -> str:
    """`1.10 TFLOP`, `16.0 GB` (decimal), `0 B`."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    scale, prefix = next(((s, p) for s, p in _PREFIXES if abs(value) >= 0.9995 * s), _PREFIXES[-1])
    return f"{_three(value / scale)} {prefix}{unit}"


def a(noun: str) -> str:
    """`a step`, `an exchange`."""
    return f"{'an' if noun[:1] in 'aeiou' else 'a'} {noun}"


def memory(size_bytes: float) -> str:
    """`14.8 GiB`: device memory is sold in binary units."""
    return f"{_three(size_bytes / GIB)} GiB"


def _three(value: float) -> str:
    """Three significant digits, never in exponents below a million."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(float(f"{value:.3g}")))))
    return f"{value:.{digits}f}" if abs(value) >= 1e-3 else f"{value:.3g}"
