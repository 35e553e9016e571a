"""The page of many runs: where their numbers changed, how headline metrics went, a line a run with its report."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import moebench
from moebench.compare.cells import SYMBOLS, share, value
from moebench.compare.comparison import FASTER, INCONCLUSIVE, REBASED, SLOWER
from moebench.compare.history import RunPoint
from moebench.compare.trend import Change, Trend
from moebench.report.facts import address_of, facts_of
from moebench.report.headlines import Headline, headlines
from moebench.report.parts import Drawn, Linked, Table, badge
from moebench.report.render import render
from moebench.report.text import text_of
from moebench.report.trend_lines import TONES, trend_line
from moebench.results.store import write_atomically

MOST_CHANGES, MOST_DRAWN, MOST_PANELS = 1_000, 200, 240
VERDICTS = (SLOWER, INCONCLUSIVE, REBASED, FASTER)


def write_index(found: Trend, base: Path, path: Path) -> None:
    """Write the page of the runs of a folder.

    Raises:
        OSError: it can't be written.
    """
    write_atomically(path, render("index", index_page(found, base, path)))


def index_page(found: Trend, base: Path, path: Path) -> dict[str, Any]:
    """Everything the template needs.

    Args:
        path: of the page, from which links to the reports of the runs start.
    """
    history = found.history
    runs = [*history.runs, *history.others]
    panels = headlines(found)
    drawn = sorted((panel for panel in panels if not panel.is_constant), key=lambda panel: not panel.changes)
    left_out = {id(panel) for panel in drawn[MOST_PANELS:]}
    return {
        "title": f"Runs in {base}",
        "lead": _lead(found, runs),
        "steps": _steps(found, path),
        "groups": _groups([panel for panel in panels if id(panel) not in left_out]),
        "panels_left_out": len(left_out),
        "changes": _changes(found),
        "changes_left_out": max(0, len(found.changes) - MOST_CHANGES),
        "runs": _runs(runs, path),
        "left_out": history.left_out,
        "anchors": {},
        "version": moebench.__version__,
    }


def _lead(found: Trend, runs: Sequence[RunPoint]) -> list[str]:
    """How many runs there are, and what the newest changes are."""
    if not runs:
        return ["There is no run here."]
    dates = sorted(run.created[:10] for run in runs)
    suites = Counter(run.suite for run in runs)
    told = ", ".join(f"{count:,} of {suite}" for suite, count in suites.most_common())
    lines = [f"{len(runs):,} run{'s' * (len(runs) > 1)} from {dates[0]} to {dates[-1]}: {told}."]
    newest = Counter(change.verdict for change in found.changes if change.is_last and change.gates)
    parts = [f"{newest[verdict]:,} {verdict}" for verdict in VERDICTS if newest[verdict]]
    if not found.history.series:
        return lines
    series = f"Of {len(found.history.series):,} series, the newest change of each: "
    return [*lines, series + (", ".join(parts) if parts else "none changed") + "."]


def _steps(found: Trend, path: Path) -> Table:
    """A line a run that changed something: which commits, and how many series became what."""
    by_run: dict[tuple[int, int], list[Change]] = {}
    for change in found.changes:
        by_run.setdefault(change.runs, []).append(change)
    rows = []
    for (_, after), changes in by_run.items():
        run = found.history.runs[after]
        counts = Counter(change.verdict for change in changes)
        largest = max(changes, key=lambda change: abs(math.log(max(change.after, 1e-300) / max(change.before, 1e-300))))
        case = f"{largest.series.key.case} {share(largest.change)}"
        rows.append([Linked(run.created[:16].replace("T", " "), "", address_of(run.path, path)), changes[0].commits,
                     *(f"{counts[verdict]:,}" if counts[verdict] else "" for verdict in VERDICTS), case])  # fmt: skip
    columns = ["first run after", "commits", *VERDICTS, "the largest"]
    return Table(columns, rows, "When something changed, newest first", frozenset(VERDICTS))


def _groups(panels: Sequence[Headline]) -> list[dict[str, Any]]:
    """Panels by suite, metric and machine; those that never change are named, and not drawn."""
    groups: dict[str, list[Headline]] = {}
    for panel in panels:
        groups.setdefault(panel.group, []).append(panel)
    return [
        {
            "title": title,
            "panels": [_panel(panel) for panel in own if not panel.is_constant],
            "constant": [f"{panel.title} ({panel.cases:,})" for panel in own if panel.is_constant],
        }
        for title, own in groups.items()
    ]


def _panel(panel: Headline) -> dict[str, Any]:
    """What the template shows of one headline metric."""
    known = panel.values[~np.isnan(panel.values)]
    counts = Counter(verdict for verdicts in panel.changes.values() for verdict in verdicts)
    told = [f"{counts[v]:,} {v}" for v in VERDICTS if counts[v]]
    verdicts = {place: _worst(own) for place, own in panel.changes.items()}
    label = f"{panel.title}: {len(known)} runs between {share(known.min() - 1)} and {share(known.max() - 1)}"
    return {
        "title": panel.title,
        "svg": trend_line(panel.values, verdicts, text_of(label)),
        "range": f"{share(known.min() - 1)} to {share(known.max() - 1)}",
        "cases": f"{panel.cases:,} case{'s' * (panel.cases != 1)}, {len(known):,} runs",
        "changes": ", ".join(told),
    }


def _worst(verdicts: Sequence[str]) -> str:
    return min(verdicts, key=VERDICTS.index)


def _changes(found: Trend) -> Table:
    """A line a change, newest first; the first of them with a drawing of their series."""
    steps: dict[int, dict[int, str]] = {}
    for change in found.changes:
        steps.setdefault(id(change.series), {})[change.runs[1]] = change.verdict
    rows = []
    for number, change in enumerate(found.changes[:MOST_CHANGES]):
        series = change.series
        runs = [point.run for point in series.points]
        marks = {runs.index(run): verdict for run, verdict in steps[id(series)].items()} if number < MOST_DRAWN else {}
        line = trend_line(series.values, marks, "", is_small=True) if number < MOST_DRAWN else ""
        rows.append([series.key.case, series.key.quantity, _verdict(change), value(change.before, series.unit),
                     value(change.after, series.unit), share(change.change), Drawn(line), change.commits,
                     change.created[:16].replace("T", " "), change.reason])  # fmt: skip
    columns = ["case", "metric", "verdict", "before", "after", "change", "all runs", "commits", "when", "why"]
    return Table(columns, rows, "Every change, newest first", frozenset(columns[3:6]))


def _verdict(change: Change) -> Drawn:
    tone = TONES.get(change.verdict, "idle")
    beside = "" if change.gates else " (shown only)"
    return badge(tone, SYMBOLS[change.verdict], change.verdict + beside)


def _runs(runs: Sequence[RunPoint], path: Path) -> Table:
    """A line a run, newest first."""
    rows = [_run(run, path) for run in sorted(runs, key=lambda run: run.created, reverse=True)]
    columns = ["created", "run", "suite", "commit", "machine", "cases", "claims", "report"]
    return Table(columns, rows, "All runs, newest first", frozenset(["cases"]))


def _run(run: RunPoint, path: Path) -> list[str]:
    address = address_of(run.path, path)
    facts = facts_of(run.path) if run.path and address else None
    state = Linked("report", "", address) if address else ("no report" if run.path else "pytest-benchmark")
    words = facts.words if facts else ""
    return [
        run.created[:16].replace("T", " "), run.name if run.finished else f"{run.name} (not finished)", run.suite,
        run.commit[:13], run.machine, f"{run.cases:,}", words, state,
    ]  # fmt: skip
