"""How often verdicts on measured times are right, on synthetic noise: false alarms and power, into docs/statistics.md.

    python -m benchmarks.verdict_check             # write the page from results/measured/verdicts.csv
    python -m benchmarks.verdict_check --measure   # draw every comparison again first (half an hour on one core)

Each cell says of which first comparisons it consists (`first`), so that a test can draw a few again and see that the
page still belongs to the code.
"""

import argparse
import hashlib
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.noise import BEYOND_TWO_RUNS, LOUD, ORDINARY, QUIET, WITHIN_RUNS, Noise, runs
from benchmarks.rows_csv import read_rows, write_rows
from moebench.compare.change_points import change_points
from moebench.compare.judge import ALPHA, FASTER, SAME, SLOWER, judge, levels_of, variance_of
from moebench.compare.rank_test import rank_p
from moebench.compare.rules import Threshold
from moebench.compare.side import Samples
from moebench.compare.spread import learn

CSV, PAGE = Path("results/measured/verdicts.csv"), Path("docs/statistics.md")
TREND_CSV = Path("results/measured/verdicts-trend.csv")
RULE = Threshold(relative=0.01)
TRIALS, POWER_TRIALS, FIRST = 4_000, 600, 24
SLOWDOWNS = (0.02, 0.05, 0.1)
_ALSO = ("drift of 5", "spikes")
POWER = (QUIET, ORDINARY, LOUD, *(n for n in WITHIN_RUNS if any(word in n.name for word in _ALSO)))


@dataclass(frozen=True)
class Design:
    """How much is measured: processes of each run, the last one being the head, and cases a run."""

    name: str
    counts: tuple[int, ...]
    cases: int


DESIGNS = (
    Design("2 + 2 processes", (2, 2), 1),
    Design("2 + 2, among 24 cases", (2, 2), 24),
    Design("5 + 5 processes", (5, 5), 1),
    Design("5 + 5, among 24 cases", (5, 5), 24),
    Design("5 runs of 2, + 2", (2, 2, 2, 2, 2, 2), 1),
    Design("5 runs of 2, + 2, among 24 cases", (2, 2, 2, 2, 2, 2), 24),
)


@dataclass(frozen=True)
class Cell:
    """Comparisons of one kind: `called` faster or slower (of a slowdown: slower), `same`, of `trials`; `first` few."""

    noise: str
    design: str
    slowdown: float
    trials: int
    called: int
    same: int
    first: str


@dataclass(frozen=True)
class TrendCell:
    """Series of one kind: in how many a step was called; of a step of a size: within one run of where it is."""

    noise: str
    length: int
    step: float
    trials: int
    called: int


def verdicts(noise: Noise, design: Design, slowdown: float) -> Iterator[str]:
    """Verdicts without end, each run of seeds of its own."""
    number = 0
    while True:
        seed = (zlib.crc32(noise.name.encode()), DESIGNS.index(design), round(1000 * slowdown), number)
        *before, head = runs(noise, np.random.default_rng(seed), design.counts, design.cases, slowdown)
        pairs = []
        for case in range(design.cases):
            pooled = [(run, group) for run, groups in enumerate(before) for group in groups[case]]
            base = Samples("s", tuple(group for _, group in pooled), tuple(run for run, _ in pooled))
            pairs.append((base, Samples("s", head[case], (0,) * len(head[case]))))
        prior = learn([variance_of(levels_of(*pair)) for pair in pairs])
        yield from (judge(*pair, RULE, prior).verdict for pair in pairs)
        number += 1


def cell(noise: Noise, design: Design, slowdown: float, trials: int) -> Cell:
    """Draw and judge so many comparisons."""
    wanted = (SLOWER,) if slowdown else (SLOWER, FASTER)
    called = same = 0
    first: list[str] = []
    for number, verdict in zip(range(trials), verdicts(noise, design, slowdown)):
        called += verdict in wanted
        same += verdict == SAME
        if number < FIRST:
            first.append(verdict)
    return Cell(noise.name, design.name, slowdown, trials, called, same, digest(first))


def digest(words: Sequence[str]) -> str:
    """A few characters that stand for some verdicts."""
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:10]


def series(noise: str, length: int, step: float, random: np.random.Generator) -> np.ndarray:
    """Logarithms of one value a run, noise of 1 %, with a step after two thirds."""
    values = random.normal(0.0, 0.01, length)
    if noise == "spikes":
        values += (random.random(length) < 0.05) * random.uniform(0.1, 1.0, length)
    if noise == "wander":
        for index in range(1, length):
            values[index] = 0.8 * values[index - 1] + 0.6 * values[index]
    return values + np.log1p(step) * (np.arange(length) >= 2 * length // 3)


def trend_cell(noise: str, length: int, step: float, trials: int) -> TrendCell:
    """Fit so many series, and test each step as `moebench trend` does."""
    called = 0
    for number in range(trials):
        seed = (zlib.crc32(noise.encode()), length, round(1000 * step), number)
        values = series(noise, length, step, np.random.default_rng(seed))
        edges = [0, *change_points(values), length]
        found = []
        for start, middle, end in zip(edges, edges[1:], edges[2:]):
            before, after = values[start:middle], values[middle:end]
            change = np.expm1(np.median(after) - np.median(before))
            if abs(change) > RULE.relative and rank_p(before, after) < ALPHA:
                found.append(middle)
        called += any(abs(place - 2 * length // 3) <= 1 for place in found) if step else bool(found)
    return TrendCell(noise, length, step, trials, called)


def measure() -> None:
    """Draw everything and write both files; prints the last cell of each noise and design."""
    cells: list[Cell] = []
    for noise in (*WITHIN_RUNS, *BEYOND_TWO_RUNS):
        for design in DESIGNS:
            cells.append(cell(noise, design, 0.0, TRIALS))
            if noise in POWER:
                cells += [cell(noise, design, slowdown, POWER_TRIALS) for slowdown in SLOWDOWNS]
            print(cells[-1], flush=True)
    write_rows(cells, CSV)
    found = [
        trend_cell(noise, length, step, 400)
        for noise in ("white", "spikes", "wander") for length in (20, 60, 300) for step in (0.0, *SLOWDOWNS)
    ]  # fmt: skip
    write_rows(found, TREND_CSV)


def page(cells: Sequence[Cell], found: Sequence[TrendCell]) -> str:
    """The page's text."""
    within, beyond = ([noise.name for noise in noises] for noises in (WITHIN_RUNS, BEYOND_TWO_RUNS))
    total = [c for c in cells if not c.slowdown and c.noise in within]
    rate = sum(c.called for c in total) / sum(c.trials for c in total)
    worst = max(total, key=lambda c: c.called / c.trials)
    said = _SUMMARY.format(
        trials=f"{sum(c.trials for c in total):,}", called=sum(c.called for c in total), rate=_percent(rate),
        worst=_percent(worst.called / worst.trials), noise=worst.noise, design=worst.design, each=f"{TRIALS:,}",
        nominal=_percent(ALPHA),
    )  # fmt: skip
    parts = [_INTRODUCTION, said, _false(cells, within), _BEYOND, _false(cells, beyond), _POWER_TEXT]
    parts += [f"### {noise.name.capitalize()}\n\n{_power(cells, noise.name)}" for noise in POWER]
    return "\n\n".join(part.strip() for part in [*parts, _TREND_TEXT, _trend(found), _AGAIN]) + "\n"


def _false(cells: Sequence[Cell], noises: Sequence[str]) -> str:
    """False alarms: a row a noise, a column a design."""
    lines = ["| noise | " + " | ".join(design.name for design in DESIGNS) + " |", "|---|" + "---|" * len(DESIGNS)]
    by = {(c.noise, c.design): c for c in cells if not c.slowdown}
    for noise in noises:
        shown = [_percent(c.called / c.trials) for design in DESIGNS if (c := by[noise, design.name])]
        lines.append(f"| {noise} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _power(cells: Sequence[Cell], noise: str) -> str:
    """Slowdowns that are called: a row a design, a column a slowdown; and unchanged ones called the same."""
    by = {(c.design, c.slowdown): c for c in cells if c.noise == noise}
    lines = [
        "| measured | " + " | ".join(f"{100 * s:.0f} % slower" for s in SLOWDOWNS) + " | unchanged: `same` |",
        "|---|" + "---|" * (len(SLOWDOWNS) + 1),
    ]
    for design in DESIGNS:
        shown = [f"{100 * c.called / c.trials:.0f} %" for s in SLOWDOWNS if (c := by[design.name, s])]
        still = by[design.name, 0.0]
        lines.append(f"| {design.name} | " + " | ".join(shown) + f" | {100 * still.same / still.trials:.0f} % |")
    return "\n".join(lines)


def _trend(found: Sequence[TrendCell]) -> str:
    by = {(c.noise, c.length, c.step): c for c in found}
    lines = [
        "| noise | runs | false alarms | " + " | ".join(f"step of {100 * s:.0f} %" for s in SLOWDOWNS) + " |",
        "|---|---|---|" + "---|" * len(SLOWDOWNS),
    ]
    for noise, length in dict.fromkeys((c.noise, c.length) for c in found):
        shown = [_percent(c.called / c.trials) for step in (0.0, *SLOWDOWNS) if (c := by[noise, length, step])]
        lines.append(f"| {_TREND_NOISES[noise]} | {length} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _percent(share: float) -> str:
    text = f"{100 * share:.0f}" if share >= 0.1 else f"{100 * share:.2f}" if share >= 1e-4 else f"{100 * share:.4f}"
    return f"{text.rstrip('0').rstrip('.') if '.' in text else text} %"


_TREND_NOISES = {
    "white": "each run by itself, 1 %",
    "spikes": "the same, and 1 run in 20 is 10 to 170 % off",
    "wander": "runs wander: correlation 0.8",
}

_INTRODUCTION = f"""
# How far a verdict can be trusted

`moebench compare`, `check` and `trend` call measured times `slower` or `faster` only when a rank test (p < {ALPHA}),
the size of the effect, and every process say so. This page is what these rules are worth, measured on synthetic noise.
It is written by `python -m benchmarks.verdict_check`; a test holds it against the code.

A comparison has two runs, or five accepted ones and a new one. A run has some processes, each of 7 blocks with 2
samples; time goes on from each to the next, so that a drift goes through both runs. Threshold of the effect: 1 % (the
default). *Among 24 cases*: the run holds 24 cases whose noise differs up to four times; they learn from each other what
processes differ by.
"""

_SUMMARY = """
## False alarms

Nothing changed between the runs. Of {trials} comparisons {called} were called slower or faster, {rate}; nominal is
{nominal}. The worst cell has {worst} ({noise}; {design}). Each cell: {each} comparisons.
"""

_BEYOND = """
## What two runs can't know

Where each process (or each run) keeps a level of its own, two runs that happen to land on different levels look like a
change of the code, and no test of the two can tell. More processes help against the first, a baseline of several
accepted runs against the second: from four pooled runs on, what runs differ by is part of the test. Shares called
slower or faster, nothing having changed:
"""

_POWER_TEXT = f"""
## Power

The head is slower by 2, 5 or 10 %: how often it is called `slower`. The last column is an unchanged program that is
called `same`; the rest is `inconclusive`, with the smallest change that could have been proved. Each cell:
{POWER_TRIALS} comparisons.

Two processes a run prove little by themselves: there are two degrees of freedom, and only a change far beyond what the
processes differ by passes at p < {ALPHA}. More cases in the run, more processes (`--time-budget`), or a baseline of
several runs are what buys power.
"""

_TREND_TEXT = """
## Trends

One value a run. False alarms: series without a step in which one was called. Steps: series in which the step was called
within one run of its place, at two thirds of the series. 400 series a cell.
"""

_AGAIN = """
Where runs wander slowly, the machine's level really changes, and a trend shows it: set the metric's threshold in
`moebench.toml` above what an unchanged program wanders by.
"""


def main() -> None:
    """Write the page; with --measure everything behind it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        measure()
    PAGE.write_text(page(read_rows(Cell, CSV), read_rows(TrendCell, TREND_CSV)))
    print(PAGE)


if __name__ == "__main__":
    main()
