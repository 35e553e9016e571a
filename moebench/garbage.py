"""Python's collector of cycles, told that most of what is made here stays: rows, operators, tables."""

import atexit
import gc

_OBJECTS = 100_000  # that are made before it looks


def look_seldom() -> None:
    """In this process the collector looks when many objects have been made."""
    gc.set_threshold(_OBJECTS, 20, 20)


def end_without_looking() -> None:
    """At the end of this process it does not look at what is there, which would take seconds."""
    atexit.register(gc.freeze)
