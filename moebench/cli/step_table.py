"""The times of a run's cases as tables for the terminal: a line a point, a column a system, the fastest marked."""

from collections.abc import Sequence
from string import ascii_uppercase

import click

from moebench.cases.case import Case
from moebench.cli.tables import chosen, fitting, output_width, table_lines
from moebench.quantities import a
from moebench.results.rows import CPU_BOUND, DEVIATION, HIT_RATE, SUPPORTED, Row

MOST_ROWS = 40
FASTEST = "*"
BOUND = (
    f"{CPU_BOUND}: this machine's processors set the pace, not the network, and nothing judges by the number; fewer "
    "ranks, larger batches, an idle machine and, where it is emulated, a lower --nic-rate leave it to the network"
)
# Of the metrics that cases are about, and how many of them a second has.
UNITS = {
    "step_time": ("ms", 1e3),
    "kernel_time": ("us", 1e6),
    "collective_time": ("us", 1e6),
    "iteration_time": ("s", 1.0),
    "part_time": ("ms", 1e3),
    DEVIATION: ("deviation of", 1.0),
    HIT_RATE: ("hit rate of", 1.0),
}

Key = tuple[str, str, str]  # point, engine, regime


def print_times(cases: Sequence[Case], rows: Sequence[Row], run: str) -> None:
    """The times of each kind of case where they are few; else how many there are, and how to list them.

    Of cases that nobody times, which system keeps which rule.
    """
    for metric in dict.fromkeys(case.workload.metric for case in cases):
        own = [case for case in cases if case.workload.metric == metric]
        _print_kind(own, [row for row in rows if row.metric == metric], run)


def _print_kind(cases: Sequence[Case], rows: Sequence[Row], run: str) -> None:
    workload = cases[0].workload
    if workload.metric == SUPPORTED:
        _print_supported(cases, rows)
        return
    points = list(dict.fromkeys((case.point, case.engine) for case in cases))
    if len(points) > MOST_ROWS:
        called = workload.metric.replace("_", " ")
        click.echo(f"{len(points)} points, {len(cases)} cases: `moebench explain {run}` lists their {called}s")
        return
    click.echo(f"{UNITS[workload.metric][0]} {a(workload.unit_of_work)}" + _how(rows))
    for group in _alike(cases):
        own = {case.name for case in group}
        _print_table(*step_times(group, [row for row in rows if row.case in own]))
    if any(row.detail.get("mark") == CPU_BOUND for row in rows):
        click.echo(BOUND)


def _alike(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases of experiments that have the same systems, which one table shows."""
    experiments: dict[str, list[Case]] = {}
    for case in cases:
        experiments.setdefault(case.experiment, []).append(case)
    found: dict[tuple[str, ...], list[Case]] = {}
    for own in experiments.values():
        found.setdefault(tuple(dict.fromkeys(case.system for case in own)), []).extend(own)
    return list(found.values())


def _print_table(columns: list[str], lines: list[list[str]]) -> None:
    """A table of times; of names too long for the width, what all share stands above it, or letters stand for them."""
    first = 1 + ("engine" in columns)
    systems = columns[first:]
    for above, names in (("", systems), _shared(systems), _letters(systems)):
        columns = [*columns[:first], *names]
        kept = fitting(columns, lines, ("engine",), output_width())
        told = [above] if above else []
        told += table_lines(kept, chosen(columns, lines, kept), names)
        if max(map(len, told)) <= output_width():
            break
    click.echo("\n".join(told))


def _shared(systems: Sequence[str]) -> tuple[str, list[str]]:
    """What all names of systems share, in words, and what each says besides."""
    parts = [name.split("+") for name in systems]
    common = [part for part in parts[0] if all(part in own for own in parts)]
    if len(systems) < 2 or not common or common[0] != parts[0][0]:
        return "", list(systems)
    rest = ["+".join(part for part in own if part not in common) or "nothing else" for own in parts]
    return f"{'+'.join(common)}, with:", rest


def _letters(systems: Sequence[str]) -> tuple[str, list[str]]:
    """A letter for each system, from the 27th on with a number, and what they stand for."""
    names = [f"{ascii_uppercase[i % 26]}{i // 26 or ''}" for i in range(len(systems))]
    return "\n".join(f"{name} = {system}" for name, system in zip(names, systems)), names


def _print_supported(cases: Sequence[Case], rows: Sequence[Row]) -> None:
    """A line a rule, a column a system."""
    systems = list(dict.fromkeys(case.system for case in cases))
    statuses = {(row.gate, row.system): row.status for row in rows}
    gates = list(dict.fromkeys(case.workload.labels[0][0] for case in cases))
    columns = ["gate", *systems]
    lines = [[gate, *(statuses.get((gate, system), "") for system in systems)] for gate in gates]
    click.echo("what the correctness gate says of each routing rule:")
    kept = fitting(columns, lines, (), output_width())
    for line in table_lines(kept, chosen(columns, lines, kept), ()):
        click.echo(line)


def step_times(cases: Sequence[Case], rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Columns and lines: the point (and the engine, where there are several), then a cell a system."""
    summaries = [row for row in rows if row.metric in UNITS and row.sample is None]
    systems = list(dict.fromkeys(case.system for case in cases))
    points = {case.name: case.point for case in cases}
    regimes = {row.detail.get("regime", "") for row in summaries}
    engines = {row.engine for row in summaries}
    found: dict[Key, dict[str, Row]] = {}
    for row in summaries:
        regime = row.detail.get("regime", "") if len(regimes) > 1 else ""
        found.setdefault((points.get(row.case, row.case), row.engine, regime), {})[row.system] = row
    columns = ["point", *(["engine"] if len(engines) > 1 else []), *systems]
    place = {point: i for i, point in enumerate(dict.fromkeys(points.values()))}  # rows come as they were done
    lines = []
    for (point, engine, regime), by_system in sorted(found.items(), key=lambda item: place.get(item[0][0], len(place))):
        name = f"{point} ({regime})" if regime else point
        times = [r.value for r in by_system.values() if r.value is not None and r.counts]
        best = max if HIT_RATE in {row.metric for row in by_system.values()} else min
        fastest = best(times) if len(times) > 1 else None
        cells = [_cell(by_system.get(system), fastest) for system in systems]
        lines.append([name, *([engine] if len(engines) > 1 else []), *cells])
    return columns, lines


def _cell(row: Row | None, fastest: float | None) -> str:
    if row is None:
        return ""
    if row.value is None:
        return row.status
    value = row.value * UNITS[row.metric][1]
    shown = f"{value:,.4g}" if value < 9999.5 else f"{value:,.0f}"
    if not row.counts:
        return f"{row.detail['mark']} {shown} "
    return shown + (FASTEST if row.value == fastest else " ")


def _how(rows: Sequence[Row]) -> str:
    """What a number is, by engine."""
    engines = {row.engine for row in rows}
    measured = bool(engines & {"local", "cluster"})
    says = ["nominal machine in sim"] * ("sim" in engines) + ["median where measured"] * measured
    metrics = {row.metric for row in rows}
    best = {DEVIATION: "the least", HIT_RATE: "the highest"}
    word = next((word for metric, word in best.items() if metric in metrics), "the fastest")
    return f" ({', '.join([*says, f'{FASTEST} {word}'])}):"
