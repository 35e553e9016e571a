"""Signs of life: a rank says how long it may be silent from now on and what it is at, and who started it listens.

So a rank that hangs is found after some times what its work should have taken, and slow work isn't taken for a hang.
Rank 0 speaks for all: it waits for the others.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

VARIABLE = "MOEBENCH_PULSE"  # names the file of a rank that is listened to
TICK_S = 1.0  # between looks: often enough, and no disturbance of what is measured


def beat(longest_s: float, at: str = "") -> None:
    """Say that this rank lives, that its next sign may take `longest_s`, and what it is at, if somebody listens."""
    path = os.environ.get(VARIABLE)
    if path:
        with suppress(OSError):  # a full disk: the file's time has changed all the same
            Path(path).write_text(f"{longest_s:.3f} {at}")


class Listener:
    """Whoever waits for a rank, asking at least every `TICK_S` or so.

    Attributes:
        longest_s: how long the rank may be silent.
        at: what it said it was at, or nothing.
    """

    def __init__(self, path: Path, longest_s: float) -> None:
        self.longest_s, self.at = longest_s, ""
        self._path = path
        self._heard_ns = 0
        self._silent_s = 0.0
        self._looked_s = time.monotonic()

    def is_too_long(self) -> bool:
        """Whether the rank has been silent for too long; time in which this process stood still doesn't count."""
        now = time.monotonic()
        if now < self._looked_s + TICK_S:
            return False
        self._silent_s += min(now - self._looked_s, 2 * TICK_S)
        self._looked_s = now
        with suppress(OSError, ValueError):  # it has not spoken yet, or is about to
            heard_ns = self._path.stat().st_mtime_ns
            if heard_ns != self._heard_ns:
                self._heard_ns, self._silent_s = heard_ns, 0.0
                longest, _, self.at = self._path.read_text().partition(" ")
                self.longest_s = float(longest)
        return self._silent_s > self.longest_s
