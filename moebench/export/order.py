"""Names in the order of a reader: the numbers in them by their value, so that `b8` comes before `b32`."""

import re

_NUMBER = re.compile(r"(\d+)")


def natural(name: str) -> list[tuple[int, int, str]]:
    """What sorts names so."""
    parts = _NUMBER.split(name)
    return [(0, int(part), "") if place % 2 else (1, 0, part) for place, part in enumerate(parts)]
