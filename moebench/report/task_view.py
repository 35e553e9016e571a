"""The section of an experiment about steps of several tasks: samples a second beside reported ones, and who waits."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moebench.cases.parts import workloads
from moebench.claims.reported import UNITS
from moebench.claims.scope import CantAnswer, ranks_of
from moebench.claims.scoreboard import Score
from moebench.claims.task_query import PER_GPU, THROUGHPUT, planned_of
from moebench.report.part_figures import rows_figure
from moebench.report.part_view import MEASURED, case_table, what_is_run
from moebench.report.parts import Figure, Linked, Table, figure, interval, number
from moebench.rows.parts import RANK_TIME
from moebench.workloads.suite import PartExperiment

GB = 1e9


def tasks_view(
    experiment: PartExperiment, own: pd.DataFrame, calls: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        own: rows of the experiment; calls: one a case that is timed.
    """
    shown = _shown(experiment, own, calls, scores)
    engines = set(own["engine"].astype(str))
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": what_is_run(experiment),
        "answer": _answer(experiment, shown),
        "figures": _figures(experiment, shown, _who_waits(experiment, own)),
        "tables": [],
        "not_published": experiment.not_published,
        "caveats": [*experiment.caveats, *[MEASURED] * bool(engines & {"local", "cluster"})],
        "cases": case_table(calls, own),
    }


def _shown(
    experiment: PartExperiment, own: pd.DataFrame, calls: pd.DataFrame, scores: Sequence[Score]
) -> pd.DataFrame:
    """Samples a second and GPU of every case that has a number, with its reading and what was reported."""
    rates = own[own["metric"] == PER_GPU].drop_duplicates("case").set_index("case")
    readings = _readings(experiment)
    reported = _reported(experiment, scores)
    found = calls[calls["case"].isin(rates.index)].copy()
    for name in ("value", "low", "high"):
        found[name] = found["case"].map(rates[name])
    for name in ("shape", "topology", "system"):
        found[name] = found[name].astype(str)
    keys = list(zip(found["shape"], found["topology"], found["system"]))
    return found.assign(
        panel=[readings.get(shape, shape) for shape, _, _ in keys],
        reported=[reported.get(key, float("nan")) for key in keys],
    )


def _readings(experiment: PartExperiment) -> Mapping[str, str]:
    """Shape of a case -> the first reading that has it."""
    found: dict[str, str] = {}
    for reading in experiment.readings:
        for grid in experiment.parts:
            for workload in workloads(grid, reading):
                found.setdefault(workload.shape, reading.name)
    return found


def _reported(experiment: PartExperiment, scores: Sequence[Score]) -> dict[tuple[str, str, str], float]:
    """Reported samples a second and GPU, at the usual variant of a system under the default reading."""
    found: dict[tuple[str, str, str], float] = {}
    for claim in (score.claim for score in scores):
        if claim.experiment != experiment.name or claim.metric not in (PER_GPU, THROUGHPUT):
            continue
        try:
            one = next(planned_of(claim, experiment))
        except CantAnswer:
            continue
        side = one.sides[0]
        share = 1 if claim.metric == PER_GPU else side.ranks
        found[one.shape, side.topology, side.system] = float(claim.value) * UNITS[claim.unit][1] / share
    return found


def _answer(experiment: PartExperiment, shown: pd.DataFrame) -> str:
    """Samples a second and GPU of each system at each place, of the default reading."""
    told = []
    for topology in experiment.topologies:
        at = shown[(shown["topology"] == topology) & shown["is_default"].astype(bool)].dropna(subset="value")
        known = dict(zip(at["system"], at["value"]))
        rates = [f"{name} {number(known[name])}" for name in experiment.systems if name in known]
        if rates:
            told.append(f"on {topology} {', '.join(rates)}")
    return f"Samples a second and GPU: {'; '.join(told)}." if told else ""


def _figures(experiment: PartExperiment, shown: pd.DataFrame, below: Table | None) -> list[Figure]:
    known = shown.dropna(subset="value")
    if known.empty:
        return []
    names = [name for name in experiment.systems if name in set(known["system"])]
    drawn = known.assign(shape=[f"{ranks_of(name.partition('-')[0])} GPUs" for name in known["topology"]])
    engine = "simulated" if set(known["engine"].astype(str)) == {"sim"} else "measured"
    caption = (
        f"Samples a second and GPU, {engine}; a panel a reading, the default one first; lines are 5 to 95 % of the "
        "draws. Hollow: what the paper reports, with the default reading."
    )
    unit = "samples/s a GPU"
    return [
        figure(
            f"tasks-{experiment.name}", "Samples a second and GPU", _answer(experiment, shown), caption,
            lambda narrow: rows_figure(drawn, unit, names, narrow), _rate_table(known), below,
        )
    ]  # fmt: skip


def _rate_table(known: pd.DataFrame) -> Table:
    columns = ["reading", "topology", "system", "samples/s a GPU", "5–95 %", "of all", "reported a GPU", "memory, GB"]
    rows = [
        [row["panel"], row["topology"], row["system"], Linked(number(row["value"]), row["case"]),
         interval(row["low"], row["high"]), number(row["value"] * ranks_of(row["topology"].partition("-")[0])),
         number(row["reported"]), number(row["peak_memory"] / GB)]
        for _, row in known.iterrows()
    ]  # fmt: skip
    caption = "Samples a second, and the memory of the fullest GPU, under each reading"
    return Table(columns, rows, caption, frozenset(columns[3:]))


def _who_waits(experiment: PartExperiment, own: pd.DataFrame) -> Table | None:
    """What ranks of the default reading have, those of the same tasks together, and how long they stand still."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[Any]] = {}
    for _, row in own[(own["metric"] == RANK_TIME) & own["is_default"].astype(bool)].iterrows():
        tasks = tuple(task for task, _ in row["detail"]["works"])
        groups.setdefault((str(row["topology"]), str(row["system"]), tasks), []).append(row)
    places, systems = list(experiment.topologies), list(experiment.systems)
    order = sorted(groups, key=lambda key: (places.index(key[0]), systems.index(key[1]), key[2]))
    rows = []
    for key in order:
        alike = [one["detail"] for one in groups[key]]
        busy, waits = [one["value"] for one in groups[key]], [detail["waits"] for detail in alike]
        shares = [100 * wait / (time + wait) for time, wait in zip(busy, waits)]
        rows.append(
            [
                str(ranks_of(key[0].partition("-")[0])), Linked(key[1], groups[key][0]["case"]),
                _ranks_words(sorted(rank for detail in alike for rank in detail["ranks"])), _tasks_words(key[2]),
                *(_between([sum(n for _, n in detail[what]) for detail in alike]) for what in ("reads", "works")),
                _between([1e3 * time for time in busy]),
                f"{_between([1e3 * wait for wait in waits])} ({_between(shares)} %)",
            ]
        )  # fmt: skip
    columns = ["GPUs", "system", "ranks", "tasks", "samples read", "samples run"]
    columns += ["computes, ms", "stands still, ms"]
    caption = "Who waits, with the default reading: for others' samples, for collectives or for the host"
    return Table(columns, rows, caption, frozenset(columns[4:])) if rows else None


def _between(values: Sequence[float]) -> str:
    """`82–83`, or one number where both ends read alike."""
    return "–".join(dict.fromkeys(f"{end:,.0f}" for end in (min(values), max(values))))


def _ranks_words(ranks: Sequence[int]) -> str:
    """`0–3`, `4, 5`, `0, 2, … (8)`."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]}, … ({len(ranks)})"
    return ", ".join(map(str, ranks))


def _tasks_words(tasks: Sequence[int]) -> str:
    """Their numbers from 1: `2`, `1, 2`, `1–4`."""
    if len(tasks) > 2 and list(tasks) == list(range(len(tasks))):
        return f"1–{len(tasks)}"
    return ", ".join(str(task + 1) for task in tasks) or "none"
