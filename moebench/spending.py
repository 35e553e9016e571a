"""How much measuring a run may cost, and how narrow intervals should become: what `moebench run` hands to engines."""

import re
import time
from dataclasses import dataclass

from moebench.workloads.errors import InputError
from moebench.workloads.units import SHARE, parse

WIDTH = 0.03  # of the 95 % interval, as a share of the median, where only a budget was given
_UNITS_S = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Spending:
    """Measure further processes, widest interval first, until each is narrow enough or the time is over.

    Attributes:
        width: of the interval of a median, as a share of it.
        until_s: on time.monotonic(); None: however long it takes.
    """

    width: float = WIDTH
    until_s: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a budget."""
        return float("inf") if self.until_s is None else self.until_s - time.monotonic()

    def part(self, shares: int) -> "Spending":
        """The same width, for one of so many equal shares of what is left."""
        return self if self.until_s is None else Spending(self.width, time.monotonic() + self.left_s / shares)


def spending_of(budget: str | None, width: str | None) -> Spending | None:
    """What `--time-budget` and `--interval` say, the budget from now on; None where neither is given.

    Raises:
        InputError: no duration, or no share.
    """
    if budget is None and width is None:
        return None
    share = WIDTH if width is None else parse(width, SHARE, "--interval").si
    if not 0 < share < 1:
        raise InputError(f"--interval {width}: a share between 0 and 100 %, such as 2%")
    return Spending(share, None if budget is None else time.monotonic() + seconds_of(budget))


def seconds_of(text: str) -> float:
    """`90s`, `10m`, `1.5h` as seconds.

    Raises:
        InputError: it is no duration above zero.
    """
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*(s|m|min|h)", text.strip())
    if match is None or float(match[1]) <= 0:
        raise InputError(f"--time-budget {text}: write a duration such as 90s, 10m or 1.5h")
    return float(match[1]) * _UNITS_S[match[2]]
