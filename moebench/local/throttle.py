"""Samples that a GPU took while it slowed itself down: kept and marked, taken again a few times, never judged by.

They say something about cooling and power, and nothing about the program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# NVML's reasons for lower clocks that are faults of the moment: hardware slowdown, thermal (software, hardware), power
# brake. A cap on power is how many GPUs run all day, and stays.
FAULTS = 0x08 | 0x20 | 0x40 | 0x80
THROTTLED = "throttled"


def is_throttled(extra: Mapping[str, Any]) -> bool:
    """Whether what a clock stored beside a time speaks against it."""
    reasons = extra.get("throttle_reasons", 0)
    return isinstance(reasons, int) and bool(reasons & FAULTS)


def judged(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The samples that may be summarised; all of them where every one was throttled."""
    good = [sample for sample in samples if sample.get("mark") != THROTTLED]
    return good or list(samples)
