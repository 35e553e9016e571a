"""The section of an experiment about parts: times beside what was reported, and every number in a table."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pandas as pd

from moebench.claims.part_query import TIMES, points_of
from moebench.claims.reported import UNITS
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import Score
from moebench.claims.words import listed
from moebench.report import cache_view, part_memory, tier_view
from moebench.report.part_figures import lines_figure, rows_figure
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, size, times
from moebench.results.rows import DEVIATION, HIT_RATE
from moebench.results.store import RunFolder
from moebench.rows.parts import FORMULA
from moebench.workloads.part import PARTS
from moebench.workloads.suite import PartExperiment

OF_READINGS = "part-readings"  # a figure in which readings are what is compared
LONG_S, MINUTES_S = 0.01, 30.0  # from here on in milliseconds, in seconds
ALIKE = 1e-9  # times that differ by less, as a share, are the same
MOST_TABLE_ROWS = 5_000
ON_AN_AXIS = {"top_k": "choices a token", "attention_mb": "attention's parameters, MB a GPU"}
MEASURED = (
    "Measured: the time from the first rank's going in to the last one's coming out, several calls back to back; of "
    "ranks on CPUs it is gloo over TCP and says nothing about GPUs."
)
COUNTED = {DEVIATION: "deviation {:.2e}", HIT_RATE: "hits {:.3f}"}
# Metrics of a study: heading, and how each is written.
STUDIED = {
    DEVIATION: ("deviation", lambda value: f"{value:.2e}"),
    "error": ("error of sums", lambda value: f"{value:.2e}"),
    "largest_error": ("largest, of magnitudes", lambda value: f"{value:.2e}"),
    "gradient_error": ("error of gradients", lambda value: f"{value:.2e}"),
    "gradient_largest_error": ("largest of gradients", lambda value: f"{value:.2e}"),
    "loss": ("loss, nats", lambda value: f"{value:.4f}"),
    "control_deviation": ("of two runs that mean the same", lambda value: f"{value:.2e}"),
}


def experiment_view(
    folder: RunFolder, experiment: PartExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    own = frame[(frame["experiment"] == experiment.name) & frame["sample"].isna()]
    calls = calls_of(own)
    if any(PARTS[grid.part].of_tasks for grid in experiment.parts):
        from moebench.report.task_view import tasks_view

        return tasks_view(experiment, own, calls, scores)
    shown = _with_reported(experiment, _shown(experiment, calls), scores)
    is_of_memory = experiment.figure.get("kind") == part_memory.KIND
    if is_of_memory:
        against = part_memory.with_baseline(experiment, calls)
        told, drawn = part_memory.answer(experiment, against), part_memory.memory_figure(experiment, against)
    else:
        told, drawn = _answer(experiment, shown), _figures(experiment, shown)
    engines = set(own["engine"].astype(str))
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": what_is_run(experiment),
        "answer": " ".join(filter(None, (told, cache_view.answer(experiment, own)))),
        "figures": [*drawn, *cache_view.figures(experiment, own)],
        "tables": [*_studies(own), *cache_view.tables(own), *tier_view.tables(own)],
        "not_published": experiment.not_published,
        "caveats": [*experiment.caveats, *[MEASURED] * bool(engines & {"local", "cluster"})],
        "cases": case_table(calls, own),
    }


def calls_of(own: pd.DataFrame) -> pd.DataFrame:
    """One row a case that is timed, with what it sends and holds as columns."""
    found = own[own["metric"] == "part_time"].drop_duplicates("case").copy()
    plain = own[own["detail"].map(lambda detail: not detail).astype(bool)]
    for metric in ("exposed_communication", "host_bound", "peak_memory", FORMULA):
        one = plain[plain["metric"] == metric].drop_duplicates("case").set_index("case")["value"]
        found[metric] = found["case"].map(one)
    sent = own[own["metric"] == "link_bytes"]
    for tier in ("link", "nic"):
        of_tier = sent[sent["detail"].map(lambda detail: detail.get("tier")) == tier].drop_duplicates("case")
        found[f"sent_{tier}"] = found["case"].map(of_tier.set_index("case")["value"])
    found["sent"] = found[["sent_link", "sent_nic"]].max(axis=1).replace(0.0, float("nan"))
    return found


def _unit(times_s: pd.Series) -> tuple[str, float]:
    """What the times of an experiment are written in, and how many of them a second has."""
    longest = times_s.max()
    if pd.notna(longest) and longest > MINUTES_S:
        return "s", 1.0
    return ("ms", 1e3) if pd.notna(longest) and longest > LONG_S else ("us", 1e6)


def _shown(experiment: PartExperiment, calls: pd.DataFrame) -> pd.DataFrame:
    """Those of the default reading on the first node type that ran; all, where readings are what is compared."""
    if experiment.figure.get("kind") == OF_READINGS:
        return calls.copy()
    own = calls[calls["is_default"].astype(bool)]
    if own.empty:
        return own.assign(panel="", reported=float("nan"))
    types = [topology.partition("-")[2] for topology in own["topology"].astype(str)]
    first = next((name for name in experiment.node_types if name in types), types[0])
    return own[[name == first for name in types]].copy()


def _with_reported(experiment: PartExperiment, shown: pd.DataFrame, scores: Sequence[Score]) -> pd.DataFrame:
    found: dict[tuple[str, str, str, str], float] = {}
    for score in scores:
        claim = score.claim
        if claim.experiment != experiment.name or claim.metric not in TIMES:
            continue
        try:
            planned = points_of(claim, experiment, experiment.readings[0])
        except CantAnswer:
            continue
        value = float(claim.value) * UNITS[claim.unit][1]
        found |= {(point.part, point.shape, point.topology, claim.system): value for point, _ in planned}
    keys = zip(*(shown[name].astype(str) for name in ("part", "shape", "topology", "system")), strict=True)
    return shown.assign(reported=[found.get(key, float("nan")) for key in keys])


def what_is_run(experiment: PartExperiment) -> str:
    """Parts and systems in words, and the readings."""
    parts = [f"{name}: {PARTS[name].what}" for name in dict.fromkeys(grid.part for grid in experiment.parts)]
    ways = {
        name: what for grid in experiment.parts for name, what in PARTS[grid.part].systems.items()
        if any(one.partition("+")[0] == name for one in grid.systems)
    }  # fmt: skip
    readings = [one.name for one in experiment.readings]
    opened = f" The paper leaves sizes open; readings: {'; '.join(readings)}." if len(readings) > 1 else ""
    told = ". ".join(parts)
    return f"{told}. By {'; '.join(f'{name}: {what}' for name, what in ways.items())}.{opened}"


def _answer(experiment: PartExperiment, shown: pd.DataFrame) -> str:
    """How many times faster than the baseline each system is; without one, who is fastest how often."""
    known = shown.dropna(subset="value")
    if known.empty:
        return ""
    keys = ["part", "shape", "topology"]
    baseline = experiment.figure.get("baseline", "")
    if baseline:
        base, base_sent = (known[known["system"] == baseline].set_index(keys)[what] for what in ("value", "sent"))
        told = []
        for name in experiment.systems:
            one = known[known["system"] == name].set_index(keys)["value"]
            ratio = (base / one).dropna()
            if name != baseline and len(ratio):
                sent = (known[known["system"] == name].set_index(keys)["sent"] / base_sent).dropna()
                bytes_told = f" with {_span(sent)} of its bytes" if len(sent) and (sent - 1).abs().max() > 1e-3 else ""
                told.append(f"{name} {_span(ratio)}{bytes_told}")
        points = "one point" if len(base) == 1 else f"{len(base)} points"
        return f"{experiment.title}: as fast as {baseline} at {points}: {listed(told)}." if told else ""
    best = Counter(_shortest(own) for _, own in known.groupby(keys, observed=True, sort=False))
    if best.total() == 1:
        return f"{experiment.title}: the shortest is {next(iter(best))}."
    parts = [f"{name} at {count}" for name, count in best.most_common()]
    return f"{experiment.title}: of {best.total()} points, the shortest is {listed(parts)}."


def _shortest(own: pd.DataFrame) -> str:
    """The system of one point that takes the least time; all of them that do."""
    names = list(own.loc[own["value"] <= own["value"].min() * (1 + ALIKE), "system"].astype(str))
    return names[0] if len(names) == 1 else f"{listed(names)} alike"


def _span(ratios: pd.Series) -> str:
    """`1.2x to 1.4x`, once where both ends read alike."""
    ends = [times(float(ratios.min())), times(float(ratios.max()))]
    return " to ".join(dict.fromkeys(ends))


def _figures(experiment: PartExperiment, shown: pd.DataFrame) -> list[Figure]:
    known = shown.dropna(subset="value")
    if known.empty:
        return []
    is_of_readings = experiment.figure.get("kind") == OF_READINGS
    on_axis = [] if is_of_readings else list(ON_AN_AXIS)
    axis = next((name for name in on_axis if known[name].notna().all() and len(set(known[name])) > 1), "")
    names = [name for name in experiment.systems if name in set(known["system"].astype(str))]
    drawn = known.assign(
        system=known["system"].astype(str),
        shape=part_memory.by_reading(experiment, known) if is_of_readings else _rows(known),
        panel=known["topology"].astype(str) if axis else known["part"].astype(str),
    )  # fmt: skip
    name, scale = _unit(known["value"])
    scaled = drawn.assign(**{column: drawn[column] * scale for column in ("value", "low", "high", "reported")})
    is_simulated = set(known["engine"].astype(str)) == {"sim"}
    engine = "simulated" if is_simulated else "measured"
    interval = "5 to 95 % of the draws" if is_simulated else "95 % intervals of the median"
    caption = (
        f"Time of one call, {engine}, of {'each' if is_of_readings else 'the default'} reading; "
        f"{'bands' if axis else 'lines'} are {interval}."
        + " Hollow: what the paper reports." * bool(drawn["reported"].notna().any())
    )
    unit = f"time, {name}"
    return [
        figure(
            f"parts-{experiment.name}", "Time of one call", _gap(drawn) or _answer(experiment, shown), caption,
            (lambda narrow: lines_figure(scaled, axis, (ON_AN_AXIS[axis], unit), names, narrow)) if axis
            else (lambda narrow: rows_figure(scaled, unit, names, narrow)),
            _point_table(drawn),
        )
    ]  # fmt: skip


def _rows(known: pd.DataFrame) -> list[str]:
    """What a row of the figure is called: its shape, and where there are several topologies that."""
    several = len(set(known["topology"].astype(str))) > 1
    return [
        f"{shape} {topology.partition('-')[0]}" if several else shape
        for shape, topology in zip(known["shape"].astype(str), known["topology"].astype(str))
    ]


def _gap(drawn: pd.DataFrame) -> str:
    """How far what was obtained is from what was reported, and what of a call makes up most of its time."""
    known = drawn.dropna(subset="reported")
    if known.empty:
        return ""
    ratio = known["value"] / known["reported"]
    told = []
    for system in dict.fromkeys(known["system"]):
        own = ratio[known["system"] == system]
        told.append(f"{system} {_span(own)}")
    worst = known.loc[(known["reported"] - known["value"]).abs().idxmax()]
    name, scale = _unit(known["reported"])
    parts = ", ".join(
        f"{what} {number(value * scale)}" for what, value in _made_of(worst).items() if value == value
    )
    return (
        f"Obtained over reported: {listed(told)}. Furthest apart is {worst['system']} at {worst['shape']} on "
        f"{worst['topology']} ({worst['part']}): {number(worst['value'] * scale)} {name} ({parts}) against "
        f"{number(worst['reported'] * scale)} reported."
    )


def _made_of(row: pd.Series) -> dict[str, float]:
    """Seconds of a call: operators, collectives that nothing hides, launches that the device waits for."""
    exposed, host = float(row["exposed_communication"]), float(row["host_bound"])
    operators = float(row["value"]) - exposed - host
    return {"operators": 0.0 if abs(operators) < 1e-9 else operators, "exposed collectives": exposed, "host": host}


def _point_table(drawn: pd.DataFrame) -> Table:
    name, scale = _unit(drawn["value"])
    made_of = ["operators", "exposed collectives", "host"]
    columns = ["part", "shape", "topology", "system", f"time, {name}", "5–95 %", *made_of, "reported", "missing"]
    rows = [
        [str(row["part"]), row["shape"], str(row["topology"]), row["system"],
         Linked(number(row["value"] * scale), row["case"]), interval(row["low"] * scale, row["high"] * scale),
         *(number(value * scale) for value in _made_of(row).values()), number(row["reported"] * scale),
         number((row["reported"] - row["value"]) * scale)]
        for _, row in drawn.iterrows()
    ]  # fmt: skip
    caption = "Times, what they are made of, and what is missing of what was reported"
    return Table(columns, rows, caption, frozenset(columns[4:]))


def _studies(own: pd.DataFrame) -> list[Table]:
    """What became of numbers: a line a case, or a part of one."""
    tables = []
    for part, rows in own[own["engine"] == "count"].groupby("part", observed=True, sort=False):
        have = [name for name in STUDIED if name in set(rows["metric"])]
        if not have:
            continue
        lines: dict[tuple[str, str, str], dict[str, float]] = {}
        for _, row in rows[rows["metric"].isin(have)].iterrows():
            said = {k: v for k, v in row["detail"].items() if k in ("step", "replicas")}
            where = ", ".join(f"{name} {value}" for name, value in said.items())
            lines.setdefault((row["case"], str(row["system"]), where), {})[row["metric"]] = row["value"]
        headings = ["system", "at", *(STUDIED[name][0] for name in have)]
        body = [
            [Linked(system, case), where,
             *(STUDIED[name][1](found[name]) if name in found and pd.notna(found[name]) else "" for name in have)]
            for (case, system, where), found in lines.items()
        ]  # fmt: skip
        tables.append(Table(headings, body, f"{part}: {PARTS[str(part)].what}", frozenset(headings[2:])))
    return tables


def case_table(calls: pd.DataFrame, own: pd.DataFrame) -> Table:
    """Every case with its time, and what it sends and holds."""
    name, scale = _unit(calls["value"])
    rows = [
        [
            row["case"],
            number(row["value"] * scale) if pd.notna(row["value"]) else str(row["status"]),
            interval(row["low"] * scale, row["high"] * scale),
            number(row["exposed_communication"] * scale),
            *(size(row[name]) if pd.notna(row[name]) else "–" for name in ("sent_link", "sent_nic")),
            size(row["peak_memory"]) if pd.notna(row["peak_memory"]) else "–",
            str(row["engine"]),
            "" if row["status"] == "passed" else str(row["reason"]),
        ]
        for _, row in calls.head(MOST_TABLE_ROWS).iterrows()
    ]
    for _, row in own[own["metric"].isin(COUNTED)].iterrows():
        told = COUNTED[row["metric"]].format(row["value"]) if pd.notna(row["value"]) else str(row["status"])
        rows.append([row["case"], told, "", "–", "–", "–", "–", str(row["engine"]), str(row["reason"] or "")])
    columns = ["case", f"time, {name}", "interval", "exposed", "sent in the node", "beyond", "peak memory"]
    caption = "Every case; what the rank sends that sends most"
    return Table([*columns, "engine", "note"], rows, caption, frozenset(columns[1:]))
