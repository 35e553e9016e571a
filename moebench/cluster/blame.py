"""Which case a failed start of the ranks is to be blamed on, and why in a line: read from the ranks' own report.

A rank that raises in a case says so in its traceback, which is text by the time it gets here; a rank that was killed
says nothing, and its peers then name the case in which they lost it; ranks that hang had said before what they are at.
"""

import re
from dataclasses import dataclass
from pathlib import PurePath

_NEXT = re.compile(r"\n\n(?=ranks? \d)")  # between what is said of one rank and of the next
_RAISED = re.compile(r"^(rank \d+) raised:")
_STUCK = re.compile(r"^ranks? \d[\d, ]* (?:was|were) stuck in (?P<case>\S+): ", re.MULTILINE)
_PLACE = re.compile(r'File "([^"]+)", line (\d+)')
_NAMED = re.compile(r"CaseFailed: (?P<status>[a-z-]+): (?P<case>\S+): (?P<reason>.*)")


class CaseFailed(RuntimeError):
    """A case failed on this rank: status, name of the case, reason."""

    def __init__(self, status: str, case: str, reason: str) -> None:
        super().__init__(f"{status}: {case}: {reason}")


@dataclass(frozen=True)
class Blame:
    """What a report comes down to.

    Attributes:
        case: name of the case in which a rank failed, None where no rank says.
        status: of that case.
        reason: the first cause: what a rank raised, how it ended, or who did not answer.
    """

    case: str | None
    status: str
    reason: str


def first_cause(report: str) -> str:
    """The first cause in a line, with the place in the code where a rank raised it, if one did."""
    found = _PLACE.findall(_first(report))
    place = f" ({PurePath(found[-1][0]).name}, line {found[-1][1]})" if found else ""
    return blame(report).reason + place


def blame(report: str) -> Blame:
    """The blame for a failure that `moebench.ranks.report.explain` describes."""
    named = _NAMED.search(report) or _STUCK.search(report)
    case = named["case"] if named else None
    first = _first(report)
    raised = _RAISED.match(first)
    if raised is None:
        return Blame(case, "failed", first.partition("\n")[0].partition(", without a traceback")[0])
    last_line = first.rpartition("\n")[2]
    own = _NAMED.search(last_line)
    return Blame(case, own["status"] if own else "failed", f"{raised[1]}: {own['reason'] if own else last_line}")


def _first(report: str) -> str:
    """What is said of the rank that failed first."""
    return _NEXT.split(report.partition("\n\n")[2].strip())[0] or report
