"""What other pages know of the report of a run: its address, and what it says in its first lines.

An index over many runs reads only these, so that no run is judged twice.
"""

import html
import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from moebench.claims.words import DEFINITIONS
from moebench.results.store import REPORT_FILE

if TYPE_CHECKING:
    from moebench.claims.scoreboard import Score

HEAD_BYTES = 1 << 14  # of a report, which hold its facts


@dataclass(frozen=True)
class Facts:
    """How many claims a report found with each verdict, in the order of the report."""

    verdicts: dict[str, int] = field(default_factory=dict)

    @property
    def words(self) -> str:
        """`1 reproduced, 4 depends`; empty where there are no claims."""
        return ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())


def address_of(run: Path | None, page: Path) -> str:
    """The address of a run's report as a page links to it; empty where there is none.

    Args:
        run: a run folder, None where the numbers come from another file; page: the file that holds the link.
    """
    report = run / REPORT_FILE if run else None
    if report is None or not report.is_file():
        return ""
    try:
        return quote(os.path.relpath(report, page.parent).replace(os.sep, "/"))
    except ValueError:  # on another drive
        return ""


def facts_text(scores: "Sequence[Score]") -> str:
    """The facts as the report holds them."""
    counts = Counter(score.verdict for score in scores)
    return json.dumps({"verdicts": {verdict: counts[verdict] for verdict in DEFINITIONS if counts[verdict]}})


def facts_of(run: Path) -> Facts | None:
    """The facts in the report of a run folder; None where there is none, or none that says any."""
    try:
        with (run / REPORT_FILE).open("rb") as file:
            head = file.read(HEAD_BYTES).decode(errors="replace")
        found = re.search(r'<meta name="moebench" content="([^"]*)">', head)
        verdicts = json.loads(html.unescape(found[1]))["verdicts"] if found else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if not isinstance(verdicts, dict) or not all(type(count) is int for count in verdicts.values()):
        return None
    return Facts(verdicts)
