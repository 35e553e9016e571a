"""The page of a comparison: first what it comes to, then a table for each verdict, each number with its rows."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import moebench
from moebench.compare.cells import SYMBOLS, change, headline, share, summary, value
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
    VERDICTS,
    Comparison,
    Finding,
)
from moebench.compare.side import Side
from moebench.report.facts import address_of
from moebench.report.interval_bars import drawing, scale_of
from moebench.report.parts import Drawn, Linked, Table, badge
from moebench.report.render import render
from moebench.report.tables import anchor_of
from moebench.report.text import text_of
from moebench.results.store import RESULTS_FILE, write_atomically

MOST_ROWS, MOST_OF_ONE = 8_000, 2_000  # of the page, and of one of its tables
BESIDE = "shown only"
TONES = {BROKEN: "bad", SLOWER: "bad", MISSING: "open", INCONCLUSIVE: "open", FIXED: "good", FASTER: "good"}
MEANINGS = {
    BROKEN: "base has numbers of the case, head has none",
    SLOWER: "more than in base, by more than its threshold",
    MISSING: "in base only",
    INCONCLUSIVE: "measured, and neither a change nor its absence can be shown",
    REBASED: "something else than the code changed that it depends on: torch, the described machine, the cost model, "
    "the case itself",
    FIXED: "head has numbers of the case, base had none",
    FASTER: "less than in base, by more than its threshold",
    NEW: "in head only",
    SAME: "equal, or not further apart than its threshold",
}


def write_comparison(comparison: Comparison, path: Path, strict: bool = False) -> None:
    """Write the page of a comparison.

    Raises:
        OSError: it can't be written.
    """
    write_atomically(path, render("comparison", comparison_page(comparison, path, strict)))


def comparison_page(comparison: Comparison, path: Path, strict: bool = False) -> dict[str, Any]:
    """Everything the template needs.

    Args:
        path: of the page, from which links to the reports of both runs start.
    """
    reports = [address_of(side.path, path) for side in (comparison.base, comparison.head)]
    ordered = sorted(comparison.findings, key=_size, reverse=True)
    counted = [finding for finding in ordered if finding.gates]
    beside = [finding for finding in ordered if not finding.gates and finding.verdict != SAME]
    left = MOST_ROWS
    sections = []
    for name in (*VERDICTS, BESIDE):
        own = beside if name == BESIDE else [finding for finding in counted if finding.verdict == name]
        if own:
            kept = own[: min(left, MOST_OF_ONE)]
            left -= len(kept)
            sections.append(_section(comparison, name, own, kept, reports))
    return {
        "title": f"{comparison.head.name} against {comparison.base.name}",
        "outcome": {0: "passed", 1: "failed"}.get(comparison.exit_status(strict), "not decided"),
        "tone": {0: "good", 1: "bad"}.get(comparison.exit_status(strict), "open"),
        "headline": headline(comparison, strict),
        "summary": summary(comparison),
        "notes": comparison.notes,
        "sides": _sides(comparison, reports),
        "overview": _overview(counted),
        "metrics": _metrics(counted),
        "sections": sections,
        "files": [str(side.path / RESULTS_FILE) for side in (comparison.base, comparison.head) if side.path],
        "anchors": {f"verdict {section['name']}": section["id"] for section in sections},
        "version": moebench.__version__,
    }


def _size(finding: Finding) -> float:
    """How large a change is, slower before faster by the same factor."""
    if finding.change is None or math.isnan(finding.change):
        return -1.0
    return abs(math.log1p(finding.change)) if finding.change > -1 else math.inf


def _overview(findings: Sequence[Finding]) -> Table:
    """A line a verdict."""
    rows = []
    for verdict in VERDICTS:
        own = [finding for finding in findings if finding.verdict == verdict]
        if own:
            metrics = Counter(finding.key.metric for finding in own).most_common(3)
            largest = max(own, key=_size).change if verdict != SAME else None
            rows.append(
                [
                    _verdict(verdict), Linked(f"{len(own):,}", f"verdict {verdict}"),
                    f"{len({finding.key.case for finding in own}):,}", "" if largest is None else share(largest),
                    ", ".join(f"{name} ({count:,})" for name, count in metrics), MEANINGS[verdict],
                ]
            )  # fmt: skip
    columns = ["verdict", "quantities", "cases", "largest change", "metrics", "what it means"]
    return Table(columns, rows, "What became of the quantities that count", frozenset(columns[1:4]))


def _verdict(verdict: str) -> Drawn:
    return badge(TONES.get(verdict, "idle"), SYMBOLS[verdict], verdict)


def _metrics(findings: Sequence[Finding]) -> Table:
    """A line a metric, a column a verdict."""
    counts = Counter((finding.key.metric, finding.verdict) for finding in findings)
    verdicts = [verdict for verdict in VERDICTS if any(of == verdict for _, of in counts)]
    names = list(dict.fromkeys(finding.key.metric for finding in findings))
    rows = [[name, *(f"{counts[name, v]:,}" if counts[name, v] else "" for v in verdicts)] for name in names]
    return Table(["metric", *verdicts], rows, "Quantities of each metric by verdict", frozenset(verdicts))


def _sides(comparison: Comparison, reports: Sequence[str]) -> Table:
    rows = []
    for name, side, report in zip(("base", "head"), (comparison.base, comparison.head), reports):
        machine = side.machine.title if side.machine else ""
        rows.append([name, Linked(side.name, "", report), side.suite, side.created, side.commit[:13], machine,
                     f"{len(side.cases):,}", "yes" if side.finished else "no"])  # fmt: skip
    columns = ["side", "run", "suite", "created", "commit", "measured on", "cases", "finished"]
    return Table(columns, rows, "The two sides", frozenset(["cases"]))


def _section(
    comparison: Comparison, name: str, own: Sequence[Finding], kept: Sequence[Finding], reports: Sequence[str]
) -> Mapping[str, Any]:
    """The table of one verdict."""
    scale = scale_of(kept)
    sides = (comparison.base, comparison.head)
    rows = []
    for finding in kept:
        base, head = (
            Linked(value(number, finding.unit), "", address if number is not None else "")
            for number, address in zip((finding.base, finding.head), _addresses(finding, reports))
        )
        drawn = Drawn(f"{text_of(change(finding))}{drawing(finding, scale)}")
        verdict = [_verdict(finding.verdict)] if name == BESIDE else []
        lines = [_lines(side, finding) for side in sides]
        rows.append([finding.key.case, *verdict, finding.key.quantity, base, head, drawn, finding.reason, *lines])
    columns = ["case", *(["verdict"] if name == BESIDE else []), "metric", "base", "head", "change", "why"]
    columns += ["lines of base", "lines of head"]
    told = f"{len(own):,} quantities" if len(own) != 1 else "1 quantity"
    if len(kept) < len(own):
        told += f", of which the {len(kept):,} that changed most are here; moebench compare --json has all"
    caption = f"{name}: {told}"
    return {
        "name": name,
        "id": "beside" if name == BESIDE else f"verdict-{name}",
        "title": "Shown only: parts of what is compared as a whole, and what a rule says must not count"
        if name == BESIDE
        else f"{SYMBOLS[name]} {name}",
        "told": told,
        "meaning": "" if name == BESIDE else MEANINGS[name],
        "scale": f"{100 * scale:g}",
        "is_drawn": any(finding.change for finding in kept),
        "is_open": name not in (SAME, BESIDE),
        "table": Table(columns, rows, caption, frozenset([*columns[-6:-3], *columns[-2:]])),
    }


def _addresses(finding: Finding, reports: Sequence[str]) -> list[str]:
    """Where the case stands in the reports of both runs."""
    return [f"{report}#{anchor_of(finding.key.case)}" if report else "" for report in reports]


def _lines(side: Side, finding: Finding) -> str:
    found = side.lines_of(finding.key)
    if found is None:
        return ""
    return f"{found[0]}" if found[0] == found[1] else f"{found[0]}–{found[1]}"
