"""An experiment of models that turns strategies of a system off in turn: peak memory and speed, drawn and tabled."""

from collections.abc import Sequence

import pandas as pd

from moebench.claims.scope import ranks_of
from moebench.report.ablation_figure import ablation_figure
from moebench.report.model_figures import POINT, draws_of, span_of
from moebench.report.parts import Figure, Linked, Table, figure, number
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of
from moebench.workloads.suite import ModelExperiment

GB = 1e9


def points_of(experiment: ModelExperiment, own: pd.DataFrame) -> pd.DataFrame:
    """A row a case: where it is, what it is called, GB a GPU and thousand tokens a second of all GPUs.

    Args:
        own: rows of the experiment.
    """
    keys = [*POINT, "system"]
    peaks = own[own["metric"] == "peak_memory"].drop_duplicates(keys).set_index(keys)["value"]
    steps = own[own["metric"] == "step_time"].drop_duplicates(keys)
    found = []
    for _, row in steps.iterrows():
        ranks = ranks_of(str(row["topology"]).partition("-")[0])
        shape = shape_of(row["model"], GateSpec("switch"), int(row["batch_size"]), ranks)
        speeds = 1e-3 * shape.tokens * ranks / draws_of(row)
        low, high = span_of(speeds[1:])
        sequences = "sequence" if row["batch_size"] == 1 else "sequences"
        found.append(
            {
                "place": f"{ranks} GPUs, {int(row['batch_size'])} {sequences} each",
                "topology": str(row["topology"]),
                "name": experiment.words.get(row["system"], row["system"]),
                "system": row["system"],
                "memory": peaks.get(tuple(row[key] for key in keys), float("nan")) / GB,
                "speed": float(speeds[0]),
                "speeds": speeds,
                "speed_low": low,
                "speed_high": high,
                "note": "" if row["status"] == "passed" else str(row["status"]).replace("-", " "),
                "case": row["case"],
            }
        )
    return pd.DataFrame(found)


def ablation_figures(experiment: ModelExperiment, own: pd.DataFrame, answer: str) -> list[Figure]:
    """The figure of all readings with the table behind it; none without rows.

    Args:
        own: rows of the experiment in their order.
    """
    points = points_of(experiment, own)
    if points.empty:
        return []
    names = list(dict.fromkeys(points["name"]))
    baseline = experiment.words.get(experiment.figure["baseline"], experiment.figure["baseline"])
    names.sort(key=lambda name: name != baseline)
    return [
        figure(
            f"ablation-{experiment.name}",
            "Memory and speed with each strategy off in turn",
            answer or experiment.question,
            "Simulated: tensors of a GPU at the fullest moment of a step, and tokens a second of all GPUs; lines are 5 "
            f"to 95 % of the draws, dotted is {baseline}.",
            lambda narrow: ablation_figure(points, names, narrow),
            table=_table(points, baseline),
        )
    ]


def answer_of(experiment: ModelExperiment, own: pd.DataFrame) -> str:
    """Which single option's change costs most memory and most speed, at every point of the default reading."""
    points = points_of(experiment, own[own["is_default"].astype(bool)])
    if points.empty:
        return ""
    baseline = experiment.figure["baseline"]
    said = []
    for place, each in points.groupby("place", sort=False):
        base = each[each["system"] == baseline]
        others = each[each["system"].str.startswith(f"{baseline}+") & each["speed"].notna()]
        if base.empty or others.empty or base["speed"].isna().all():
            continue
        heavy, slow = others.loc[others["memory"].idxmax()], others.loc[others["speed"].idxmin()]
        more, ratio = heavy["memory"] - float(base["memory"].iloc[0]), slow["speed"] / float(base["speed"].iloc[0])
        said.append(f"{place}: {heavy['name']} takes {number(more)} GB more, {slow['name']} is {_slower(ratio)}.")
    return " ".join(said)


def _table(points: pd.DataFrame, baseline: str) -> Table:
    rows: list[Sequence[str]] = []
    for place, own in points.groupby("place", sort=False):
        base = own[own["name"] == baseline]
        for _, row in own.iterrows():
            cells = [str(place), row["name"], Linked(row["note"] or number(row["speed"]), row["case"])]
            if len(base) and row["name"] != baseline:
                first = base.iloc[0]
                low, high = span_of((row["speeds"] / first["speeds"])[1:])
                span = "" if pd.isna(low) else f"{_change(low)} to {_change(high)}"
                cells += [_change(row["speed"] / first["speed"]), span]
                rows.append([*cells, number(row["memory"]), _more(row["memory"] - first["memory"])])
            else:
                rows.append([*cells, "–", "", number(row["memory"]), "–"])
    columns = ["where", "strategies", "thousand tokens/s", f"against {baseline}", "5–95 %", "GB a GPU", "GB more"]
    return Table(columns, rows, f"Every strategy against {baseline}, draw by draw", frozenset(columns[2:]))


def _more(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:+.2f}".replace("-", "−")


def _slower(ratio: float) -> str:
    return f"{100 * abs(1 - ratio):.0f} % {'slower' if ratio < 1 else 'faster'}"


def _change(ratio: float) -> str:
    return "–" if pd.isna(ratio) else f"{100 * (ratio - 1):+.1f} %".replace("-", "−")
