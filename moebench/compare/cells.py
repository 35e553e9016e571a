"""The words and numbers of a finding as every output shows them, and which findings it shows first."""

import math
from collections.abc import Sequence

from moebench.compare.comparison import (
    BROKEN,
    FASTER,
    FIXED,
    INCONCLUSIVE,
    MISSING,
    NEW,
    REBASED,
    SAME,
    SLOWER,
    STATUS,
    VERDICTS,
    Comparison,
    Finding,
)
from moebench.quantities import amount, times

# A symbol beside each word: colour is never the only sign.
SYMBOLS = {
    BROKEN: "x",
    SLOWER: "+",
    FASTER: "-",
    FIXED: "o",
    MISSING: "?",
    INCONCLUSIVE: "?",
    REBASED: "~",
    NEW: "*",
    SAME: "=",
}
COLUMNS = ("verdict", "metric", "case", "base", "head", "change", "why")
MOST_SHOWN = 40


def value(number: float | None, unit: str) -> str:
    """A value with its unit, at most four digits; `-` where there is none."""
    if number is None:
        return "-"
    if unit == "s":
        return times(number)
    if unit in ("B", "FLOP"):
        return f"{number:.0f} {unit}" if abs(number) < 1e4 and number == int(number) else amount(number, unit)
    return f"{number:.6g}" + (f" {unit}" if unit not in ("1", "") else "")


def change(finding: Finding) -> str:
    """`+3.2 % (+2.1 to +4.3)`; of an exact value without interval."""
    if finding.change is None:
        return ""
    text = share(finding.change)
    if finding.low is None or finding.high is None or finding.low == finding.high:
        return text
    return f"{text} ({share(finding.low, '')} to {share(finding.high, '')})"


def share(number: float, unit: str = " %") -> str:
    """A relative change in per cent; from nothing to something it is `new`."""
    if math.isinf(number):
        return "from 0"
    if number == 0:
        return f"0{unit}"
    percent = 100 * number
    return (f"{percent:+.0f}" if 10 <= abs(percent) < 1e6 else f"{percent:+.2g}") + unit


def cells(finding: Finding) -> tuple[str, ...]:
    """One row under COLUMNS, texts as they are."""
    verdict = f"{SYMBOLS[finding.verdict]} {finding.verdict}" + ("" if finding.gates else " (shown only)")
    return (
        verdict, finding.key.quantity, finding.key.case, value(finding.base, finding.unit),
        value(finding.head, finding.unit), change(finding), finding.reason,
    )  # fmt: skip


def shown(comparison: Comparison, everything: bool = False) -> list[Finding]:
    """The findings worth a row: none that are the same, nothing that can't decide; or all of them."""
    if everything:
        return comparison.findings
    return [finding for finding in comparison.findings if finding.verdict != SAME and finding.gates]


def summary(comparison: Comparison) -> str:
    """`2 slower, 31 same, 4 re-based` of what counts, and how many are only shown."""
    parts = counted([finding for finding in comparison.findings if finding.gates])
    beside = sum(not finding.gates for finding in comparison.findings)
    return (parts or "nothing that counts") + (f"; {beside} more are shown only" if beside else "")


def counted(findings: Sequence[Finding]) -> str:
    """How many there are of each verdict."""
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in VERDICTS}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)


def headline(comparison: Comparison, strict: bool = False) -> str:
    """The outcome in one sentence."""
    status = comparison.exit_status(strict)
    failed = [finding for finding in comparison.findings if finding.gates and finding.verdict in (BROKEN, SLOWER)]
    if failed:
        cases = len({finding.key.case for finding in failed})
        broken = any(finding.verdict == BROKEN for finding in failed)
        what = "broken or slower" if broken else "slower"
        are = "quantity is" if len(failed) == 1 else "quantities are"
        return f"{len(failed)} {are} {what}, in {cases} case{'s' * (cases != 1)}"
    return "not decided: see what is inconclusive, missing or re-based" if status else "nothing is slower"


def is_case(finding: Finding) -> bool:
    """Whether it is about a case as a whole."""
    return finding.key.metric == STATUS
