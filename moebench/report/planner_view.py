"""The section of a search for the fastest parallel setting: what is ranked, how far that is decided, why not others."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.planner.describe import options_of
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, percent
from moebench.report.planner_figure import planner_figure
from moebench.results.store import RunFolder
from moebench.workloads.suite import PlannerExperiment

DRAWN = 8  # settings of a search that are drawn
KTOKENS = 1e3
COLUMNS = ("setting", "system and options", "ktokens/s", "5–95 %", "GB a rank", "bubble", "fastest in")
HOW = (
    "A search tries every setting: numbers that do not go, then memory, are reasons against one; a floor under its "
    "step (all micro-batches through equal stages, no ends) leaves out what can't be the fastest in any draw and is "
    "slower than the first one in at least 90 % of them. The first setting, and others within 1 % of it, are traced "
    "whole. Settings marked = can't be told apart from the first one: it is faster in less than 90 % of the draws in "
    "which it fits. Bubble: the share of the time of all stages in which they compute no micro-batch, the sums of "
    "gradients and the update among it."
)


def experiment_view(
    folder: RunFolder, experiment: PlannerExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    own = frame[(frame["experiment"] == experiment.name) & frame["sample"].isna()]
    steps = own[own["metric"] == "iteration_time"].drop_duplicates("case")
    ranked = _ranked(folder, experiment, own)
    figures = [_figure(experiment, ranked)] if not ranked.empty else []
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_run(experiment),
        "answer": _answer(ranked),
        "figures": figures,
        "tables": [_ranking(ranked), _outcomes(own)],
        "not_published": experiment.not_published,
        "caveats": (*experiment.caveats, HOW),
        "cases": _cases(steps, own),
    }


def _what_is_run(experiment: PlannerExperiment) -> str:
    sizes = ", ".join(map(str, experiment.micro_batches))
    systems = ", ".join(options_of(name, True) for name in experiment.systems)
    return (
        f"Every way to train {', '.join(experiment.models)} with {systems}: a step of "
        f"{experiment.global_batch} sequences, micro-batches of {sizes}, all stages, chunks and replicas that divide."
    )


def _ranked(folder: RunFolder, experiment: PlannerExperiment, own: pd.DataFrame) -> pd.DataFrame:
    """A row a ranked setting, what it is as columns; searches by their fastest one; intervals are of throughput."""
    rows = own[own["metric"] == "setting_time"]
    if rows.empty:
        return rows
    detail = pd.DataFrame(list(rows["detail"]), index=rows.index)
    found = pd.concat([rows[["case", "system", "model", "topology", "value", "low", "high"]], detail], axis=1)
    tokens = rows["model"].map(lambda name: _tokens(experiment, str(name))).astype(float)
    found["rate"] = tokens / rows["value"] / KTOKENS
    found["rate_low"], found["rate_high"] = tokens / rows["high"] / KTOKENS, tokens / rows["low"] / KTOKENS
    found["best_rate"] = found.groupby(found["case"].astype(str))["rate"].transform("max")
    return found.sort_values(["best_rate", "case", "place"], ascending=[False, True, True], kind="stable")


def _tokens(experiment: PlannerExperiment, model: str) -> int:
    from moebench.workloads.load_decoder import load_decoder

    return experiment.global_batch * load_decoder(model).sequence


def _setting(row: Any) -> str:
    chunks = f"x{row['chunks']}" if row["chunks"] > 1 else ""
    return f"n{row['ranks']} pp{row['stages']}{chunks} dp{row['replicas']} mb{row['micro_batch']}"


def _answer(ranked: pd.DataFrame) -> str:
    """The fastest of all searches of each model, and whether that is decided."""
    said = []
    for model, part in ranked.groupby("model", observed=True, sort=False) if not ranked.empty else ():
        best = part.sort_values("rate", ascending=False).iloc[0]
        same = part[(part["case"] == best["case"]) & part["is_undecided"]]
        what = options_of(best["setting"], True)
        ties = "" if len(same) < 2 else f"; {len(same)} of its settings can't be told apart"
        said.append(
            f"{model} trains fastest with {what} on {_places(best)}: {number(best['rate'])} thousand tokens a "
            f"second{ties}."
        )
    return " ".join(said)


def _places(row: Any) -> str:
    chunks = f" of {row['chunks']} chunks" if row["chunks"] > 1 else ""
    return (
        f"{_many(row['ranks'], 'rank')} a layer, {_many(row['stages'], 'stage')}{chunks}, "
        f"{_many(row['replicas'], 'replica')} and micro-batches of {row['micro_batch']}"
    )


def _many(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _figure(experiment: PlannerExperiment, ranked: pd.DataFrame) -> Figure:
    drawn = ranked[ranked["place"] <= DRAWN]
    points = pd.DataFrame(
        {
            "search": [f"{row['model']}, {options_of(str(row['system']), True)}" for _, row in drawn.iterrows()],
            "setting": drawn.apply(lambda row: f"{row['place']}  {_setting(row)}", axis=1),
            **{
                name: 100 * (drawn[column].astype(float) - 1)
                for name, column in (("value", "slowdown"), ("low", "slowdown_low"), ("high", "slowdown_high"))
            },
        }
    )
    return figure(
        f"planner-{experiment.name}",
        "The fastest settings",
        _answer(ranked),
        "How much longer than the first setting of its search each takes, simulated; lines are 5 to 95 % of the draws, "
        "each within one draw. Options stand in the table of ranked settings.",
        lambda narrow: planner_figure(points, narrow),
        None,
    )


def _ranking(ranked: pd.DataFrame) -> Table:
    rows = [
        [
            f"{row['place']}{'=' if row['is_undecided'] and row['place'] > 1 else ''}  {_setting(row)}",
            Linked(f"{row['model']}, {options_of(row['setting'], True)}", row["case"]),
            number(row["rate"], 4),
            interval(row["rate_low"], row["rate_high"]),
            number(row["memory"] / 1e9),
            percent(row["bubble"]),
            percent(row["best"]),
        ]
        for _, row in ranked.iterrows()
    ]
    caption = "Ranked settings: ranks that share a layer (n), stages x chunks (pp), replicas (dp), micro-batch (mb)"
    return Table(COLUMNS, rows, caption, frozenset(COLUMNS[2:]))


def _outcomes(own: pd.DataFrame) -> Table:
    rows = [
        [
            Linked(f"{row['model']}, {options_of(str(row['system']), True)}", row["case"]),
            row["detail"]["outcome"],
            f"{row['value']:,.0f}",
            _wrapping(row["detail"]["example"]) or "–",
        ]
        for _, row in own[own["metric"] == "settings"].iterrows()
    ]
    columns = ["case", "outcome", "settings", "such as"]
    return Table(columns, rows, "What became of all settings", frozenset(("settings",)))


def _wrapping(example: str) -> str:
    """The name that an example begins with in words, which a line can break between."""
    name, _, rest = example.partition(" ")
    return f"{options_of(name, True)} {rest}" if rest else example


def _cases(steps: pd.DataFrame, own: pd.DataFrame) -> Table:
    columns = ["case", "step, s", "5–95 %", "MFU", "note"]
    used = dict(zip(*(own[own["metric"] == "mfu"][name] for name in ("case", "value"))))
    rows = [
        [
            row["case"],
            number(row["value"], 4),
            interval(row["low"], row["high"]),
            percent(used[row["case"]]) if row["case"] in used else "–",
            "" if row["status"] == "passed" else f"{row['status']}: {row['reason']}",
        ]
        for _, row in steps.iterrows()
    ]
    return Table(columns, rows, "Every search: the best setting", frozenset(("step, s", "5–95 %", "MFU")))
