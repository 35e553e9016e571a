"""The section of an experiment about exchanges: maps of who is faster where, times, and what claims would need."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.claims.words import listed
from moebench.report.exchange_figures import condition_map, times_figure
from moebench.report.exchange_needs_view import needs_figures
from moebench.report.exchange_plane_view import plane_figures
from moebench.report.exchange_points import calls, crossing, speedups
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, size, times
from moebench.results.store import RunFolder
from moebench.workloads.exchange import EXCHANGES, size_words
from moebench.workloads.suite import ExchangeExperiment

GIGA = 1e9
MOST_TABLE_ROWS = 5_000
MEASURED = (
    "Measured: the time from the first rank's going in to the last one's coming out, several exchanges back to back; "
    "of ranks on CPUs it is gloo over TCP and says nothing about GPUs."
)


def experiment_view(
    folder: RunFolder, experiment: ExchangeExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    found = calls(frame[frame["experiment"] == experiment.name], experiment.topologies)
    baseline = experiment.figure.get("baseline", experiment.exchanges[0])
    points = speedups(found, experiment.exchanges, baseline)
    own_scores = [score for score in scores if score.claim.experiment == experiment.name]
    figures = [
        *_maps(experiment, points, found, baseline),
        *needs_figures(folder, experiment, own_scores),
        *plane_figures(folder, experiment, own_scores),
        *_times(experiment, found),
    ]
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_exchanged(experiment),
        "answer": _answer(experiment, points, baseline),
        "figures": figures,
        "tables": [],
        "not_published": experiment.not_published,
        "caveats": [*experiment.caveats, *[MEASURED] * bool(set(found["engine"]) - {"sim"})],
        "cases": _case_table(found),
    }


def _what_is_exchanged(experiment: ExchangeExperiment) -> str:
    each = [f"{name}: {EXCHANGES[name]}" for name in experiment.exchanges]
    return (
        f"One exchange between all ranks, as many bytes to each; a payload is what a GPU sends in all, its own part "
        f"included. {'; '.join(each)}. 4x8 means 4 nodes of 8 GPUs."
    )


def _answer(experiment: ExchangeExperiment, points: pd.DataFrame, baseline: str) -> str:
    """Who is fastest how often on the default machine."""
    own = _of_default(experiment, points)
    if own.empty:
        return ""
    at = own.groupby(["topology", "payload_bytes"], observed=True)["is_fastest"].any()
    wins = own[own["is_fastest"]]["exchange"].value_counts()
    parts = [f"{baseline} is the fastest at {len(at) - int(at.sum())}"]
    parts += [f"{name} at {count}" for name, count in wins.items()]
    return (
        f"{experiment.title}: of {len(at)} pairs of topology and payload on {own['node_type'].iloc[0]}, "
        f"{listed(parts)}."
    )


def _of_default(experiment: ExchangeExperiment, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the first node type that ran."""
    if frame.empty:
        return frame
    default = experiment.node_types[0]
    node_type = default if default in set(frame["node_type"]) else frame["node_type"].iloc[0]
    return frame[frame["node_type"] == node_type]


def _why(experiment: ExchangeExperiment, found: pd.DataFrame) -> str:
    """What each exchange sends at the default payload on the middle topology: what it saves, and what it pays."""
    own = _of_default(experiment, found)
    own = own[own["payload_bytes"] == experiment.payload_bytes].dropna(subset=["nic_messages", "value"])
    topologies = list(dict.fromkeys(own["topology"].astype(str)))
    if not topologies:
        return ""
    here = own[own["topology"] == topologies[(len(topologies) - 1) // 2]].drop_duplicates("exchange")
    sent = [
        f"{row['exchange']} {row['nic_messages']:.0f} of {size(row['nic_bytes'] / max(row['nic_messages'], 1))}"
        for _, row in here.iterrows()
    ]
    inside = [f"{row['exchange']} {size(row['inside_bytes'])}" for _, row in here.iterrows()]
    spent = [f"{row['exchange']} {number(row['time_us'])} us" for _, row in here.iterrows()]
    return (
        f"At {size_words(experiment.payload_bytes)} on {here['topology'].iloc[0]} a node sends "
        f"{size(here['nic_bytes'].iloc[0])} to others whatever the exchange, in messages: {listed(sent)}; between its "
        f"own GPUs it sends: {listed(inside)}; one exchange takes: {listed(spent)}."
    )


def _maps(
    experiment: ExchangeExperiment, points: pd.DataFrame, found: pd.DataFrame, baseline: str
) -> list[Figure]:
    """A map a kind of node; those of all but the default one behind folds."""
    figures: list[Figure] = []
    for node_type, own in points.groupby("node_type", sort=False, observed=True) if not points.empty else ():
        why = "" if figures else _why(experiment, found)
        engine = "simulated on the nominal machine" if set(own["engine"]) == {"sim"} else "measured"
        figures.append(
            figure(
                f"map-{experiment.name}-{node_type}", f"Who is faster, {node_type}",
                f"{_map_finding(own, baseline)} {why}".strip(),
                f"Time of {baseline} over the exchange's own, {engine}, by nodes x GPUs. Above 1 the exchange is "
                f"faster than {baseline}, below 1 slower. Framed: the fastest of all; where no field is, {baseline} "
                "is. A dash: no number (it does not fit into memory).",
                partial(condition_map, own.assign(size=own["size"].astype(str)), baseline),
                _map_table(own, str(node_type), baseline),
            )
        )  # fmt: skip
    return [*figures[:1], *(replace(one, is_folded=True) for one in figures[1:])]


def _map_finding(own: pd.DataFrame, baseline: str) -> str:
    """Up to what payload each exchange beats the baseline, and the ends of its speedups."""
    told = []
    for name, part in own.groupby("exchange", sort=False):
        known = part.dropna(subset="value")
        if known.empty:
            continue
        until = {str(on): crossing(part) for on, part in known.groupby("size", sort=False, observed=True)}
        best, worst = known.loc[known["value"].idxmax()], known.loc[known["value"].idxmin()]
        told.append(
            f"{name} is {_until(until, baseline)}: from {times(best['value'])} ({best['payload']} on {best['size']}) "
            f"to {times(worst['value'])} ({worst['payload']} on {worst['size']})."
        )
    return " ".join(told)


def _until(until: Mapping[str, float], baseline: str) -> str:
    """`faster than flat up to 78.4 KiB on 2x8 and 262 KiB on 4x8, and never on 8x8`, from payloads by topology size."""
    some = [f"{size_words(payload)} on {on}" for on, payload in until.items() if 0 < payload < float("inf")]
    always = [on for on, payload in until.items() if payload == float("inf")]
    never = [on for on, payload in until.items() if payload == 0]
    parts = [f"faster than {baseline} up to {listed(some)}"] if some else []
    parts += [f"always faster than {baseline} on {listed(always)}"] if always else []
    parts += [f"never faster than {baseline} on {listed(never)}"] if never else []
    return ", ".join(parts)


def _map_table(own: pd.DataFrame, node_type: str, baseline: str) -> Table:
    rows = [
        [row["payload"], str(row["size"]), row["exchange"], Linked(times(row["value"]), row["case"]),
         interval(row["low"], row["high"], "x"), "yes" if row["is_fastest"] else "", row["note"]]
        for _, row in own.iterrows()
    ]  # fmt: skip
    columns = ["payload", "nodes x GPUs", "exchange", f"speedup over {baseline}", "5–95 %", "fastest", "note"]
    return Table(columns, rows, f"Speedups on {node_type}", frozenset(columns[3:5]))


def _times(experiment: ExchangeExperiment, found: pd.DataFrame) -> list[Figure]:
    """Time against payload on the default node type."""
    own = _of_default(experiment, found).dropna(subset="value")
    if own.empty:
        return []
    node_type = own["node_type"].iloc[0]
    drawn = own.assign(size=own["size"].astype(str))
    kept = list(dict.fromkeys(drawn["size"]))
    drawn = drawn[drawn["size"].isin(kept[:4])]
    rates = (drawn["payload_bytes"] / drawn["value"]).to_numpy()
    ends = drawn.iloc[int(rates.argmax())]
    finding = (
        f"The most that an exchange moves is {number(rates.max() / GIGA)} GB/s a GPU: {ends['exchange']} at "
        f"{ends['payload']} on {ends['topology']}."
    )
    return [
        figure(
            f"times-{experiment.name}", f"Time by payload, {node_type}", finding,
            "Lines: the nominal machine (of measured ranks the median). Bands: 5–95 % of the draws.",
            lambda narrow: times_figure(drawn, experiment.exchanges, narrow),
        )
    ]  # fmt: skip


def _case_table(found: pd.DataFrame) -> Table:
    rows = [
        [
            row["case"],
            number(row["time_us"]) if pd.notna(row["value"]) else str(row["status"]),
            interval(row["low_us"], row["high_us"]),
            number(row["algorithmic_bandwidth"] / GIGA),
            _count(row["nic_messages"]),
            size(row["nic_bytes"]) if pd.notna(row["nic_bytes"]) else "–",
            size(row["peak_memory"]) if pd.notna(row["peak_memory"]) else "–",
            row["engine"],
            row["note"],
        ]
        for _, row in found.head(MOST_TABLE_ROWS).iterrows()
    ]
    columns = ["case", "time, us", "interval, us", "GB/s a GPU", "messages a node", "bytes a node", "peak memory"]
    columns += ["engine", "note"]
    caption = "Every case: its time, the payload over it, and what a node sends to others"
    if len(found) > MOST_TABLE_ROWS:
        caption += f" (the first {MOST_TABLE_ROWS:,} of {len(found):,}; all are in results.jsonl)"
    return Table(columns, rows, caption, frozenset(columns[1:7]))


def _count(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:,.0f}"
