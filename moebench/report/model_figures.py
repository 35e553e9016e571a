"""The figure of an experiment about whole models, and what it says: speedups over a baseline, or one metric."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from moebench.report.kernel_figures import kernel_figure
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, times
from moebench.workloads.suite import ModelExperiment

POINT = ["model", "gate", "batch_size", "dtype", "topology"]
SHORT = {"gpt2-s-moe": "S", "gpt2-l-moe": "L"}
# What is drawn of a metric where there is no baseline: its name in a sentence, its unit, and what the rows take to it.
METRICS = {
    "step_time": ("Time of a step", "ms", 1e3),
    "exposed_communication": ("Exposed communication", "ms", 1e3),
    "alltoall_share_of_step": ("All-to-alls of a step", "%", 100.0),
    "best_partition_count": ("Most parts of a range", "parts", 1.0),
    "optimisation_time": ("Time of the passes", "s", 1.0),
    "prediction_error": ("Prediction off by", "%", 100.0),
}


@dataclass(frozen=True)
class Drawn:
    """What an experiment's figure shows.

    Attributes:
        rows: those of the metric at the default reading, with columns shown, shown_low and shown_high.
        label: of the axis; baseline: whose time is divided by each system's, empty where the metric itself is shown.
    """

    rows: pd.DataFrame
    label: str
    what: str
    unit: str
    baseline: str = ""


def drawn_of(experiment: ModelExperiment, own: pd.DataFrame) -> Drawn:
    """What to draw of an experiment's rows in their order."""
    baseline = str(experiment.figure.get("baseline", ""))
    if baseline:
        found = speedups(own[own["metric"] == "step_time"], baseline)
        names = {f"speedup{end}": f"shown{end}" for end in ("", "_low", "_high")}
        return Drawn(found.rename(columns=names), f"speedup over {baseline}", "Speedup", "x", baseline)
    what, unit, scale = METRICS.get(experiment.metric, (experiment.metric, "", 1.0))
    rows = own[own["metric"] == experiment.metric].drop_duplicates([*POINT, "system"])
    draws = [scale * draws_of(row) for _, row in rows.iterrows()]
    return Drawn(_with(rows, "shown", draws), f"{what.lower()}, {unit}", what, unit)


def answer_of(experiment: ModelExperiment, drawn: Drawn) -> str:
    """What the figure says in a sentence; empty where there is nothing."""
    known = drawn.rows.dropna(subset="shown")
    first = experiment.systems[0]
    asked = [name for name in experiment.systems if name != drawn.baseline]
    if drawn.baseline:  # the variants of the system in question; rivals are in the figure
        asked = [name for name in asked if name.partition("+")[0] == first.partition("+")[0]]
    found = {name: known.loc[known["system"] == name, "shown"].to_numpy(dtype=float) for name in asked}
    found = {name: values for name, values in found.items() if len(values)}
    if not found:
        return ""
    if len(found) > 1:
        means = ", ".join(f"{name} {number(float(values.mean()))}" for name, values in found.items())
        points = len(known[POINT].drop_duplicates())
        what = f"Times as fast as {drawn.baseline}" if drawn.baseline else f"{drawn.what} in {drawn.unit}"
        return f"{what}, on average over {points} point{'s' if points > 1 else ''}: {means}."
    [(name, values)] = found.items()
    if drawn.baseline:
        if len(values) == 1:
            return f"{name} is {number(values[0])} times as fast as {drawn.baseline} at one point."
        return (
            f"{name} is {number(values.min())} to {number(values.max())} times as fast as {drawn.baseline} at "
            f"{len(values)} points, {number(values.mean())} on average."
        )
    span = " to ".join(dict.fromkeys((number(values.min()), number(values.max()))))
    return f"{drawn.what} of {name}: {span} {drawn.unit} at {len(values)} point{'s' if len(values) > 1 else ''}."


def figures_of(experiment: ModelExperiment, drawn: Drawn) -> list[Figure]:
    """The figure and the table behind it; none without rows."""
    found = drawn.rows
    if found.empty:
        return []
    missing = [_missing(row, drawn) for _, row in found.iterrows()]
    points = pd.DataFrame(
        {
            "shape": [
                f"{SHORT.get(model, model)} {gate} {topology.partition('-')[0]}"
                for model, gate, topology in zip(found["model"], found["gate"], found["topology"].astype(str))
            ],
            "direction": [topology.partition("-")[2] for topology in found["topology"].astype(str)],
            "implementation": found["system"].astype(str),
            "value": found["shown"].where(found["shown"] > 0),
            "low": found["shown_low"].where(found["shown_low"] > 0),
            "high": found["shown_high"],
            "note": missing,
        }
    )
    names = list(dict.fromkeys(found["system"].astype(str)))
    return [
        figure(
            f"models-{experiment.name}",
            drawn.label[:1].upper() + drawn.label[1:],
            answer_of(experiment, drawn) or experiment.question,
            _caption(drawn),
            lambda narrow: kernel_figure(points, drawn.label, names, None, narrow, bool(drawn.baseline)),
            _table(experiment, drawn),
        )
    ]


def _missing(row: pd.Series, drawn: Drawn) -> str:
    """Why a system has no mark; what does not run at all is in the table alone."""
    if row["status"] == "out-of-memory":
        return "out of memory"
    return f"0 {drawn.unit}" if row["shown"] == 0 else ""


def _caption(drawn: Drawn) -> str:
    engine = "simulated" if set(drawn.rows["engine"].astype(str)) == {"sim"} else "measured"
    what = f"Time of {drawn.baseline} over time of each system" if drawn.baseline else drawn.what
    has_draws = bool(drawn.rows["shown_low"].notna().any())
    lines = "; lines are 5 to 95 % of the draws" if has_draws else ", on the nominal machine"
    models = "S and L are the models" if set(drawn.rows["model"]) & {"gpt2-s-moe", "gpt2-l-moe"} else "The model"
    return (
        f"{what}, {engine}{lines}. {models}, then gate and nodes x GPUs; a panel is a cluster. The default reading of "
        "the paper."
    )


def _table(experiment: ModelExperiment, drawn: Drawn) -> Table:
    def written(value: float) -> str:
        return times(value) if drawn.baseline else number(value)

    rows = [
        [
            row["model"], row["gate"], str(int(row["batch_size"])), str(row["topology"]), row["system"],
            Linked("–" if pd.isna(row["shown"]) else written(row["shown"]), row["case"]),
            interval(row["shown_low"], row["shown_high"], drawn.unit if drawn.baseline else ""),
        ]
        for _, row in drawn.rows.iterrows()
    ]  # fmt: skip
    return Table(
        ["model", "gate", "batch", "topology", "system", drawn.label, "5–95 %"],
        rows,
        f"{experiment.title}: the default reading",
        frozenset(("batch", drawn.label, "5–95 %")),
    )


def speedups(steps: pd.DataFrame, baseline: str, point: Sequence[str] = POINT) -> pd.DataFrame:
    """Every row with its baseline's time over its own, and 5 to 95 % of that over the draws.

    Args:
        point: columns that make a point.
    """
    rows: list[int] = []
    ratios: list[np.ndarray] = []
    for _, own in steps.groupby(list(point), sort=False, observed=True):
        base = own[own["system"] == baseline]
        for at, row in own.iterrows():
            theirs = draws_of(base.iloc[0]) if len(base) else np.array([np.nan])
            ours = draws_of(row)
            with np.errstate(invalid="ignore"):
                ratios.append(theirs / ours if len(theirs) in (1, len(ours)) else np.array([np.nan]))
            rows.append(at)
    return _with(steps.loc[rows], "speedup", ratios)


def _with(rows: pd.DataFrame, name: str, draws: Sequence[np.ndarray]) -> pd.DataFrame:
    """Rows with columns of a name: the nominal value, and `_low` and `_high`, 5 to 95 % of the others."""
    spans = [span_of(one[1:]) for one in draws]
    columns = [[float(one[0]) for one in draws], [low for low, _ in spans], [high for _, high in spans]]
    return rows.assign(**dict(zip((name, f"{name}_low", f"{name}_high"), columns)))


def span_of(values: np.ndarray) -> tuple[float, float]:
    """5 and 95 % of draws; NaN of fewer than two."""
    known = values[~np.isnan(values)]
    if known.size < 2:
        return float("nan"), float("nan")
    low, high = np.percentile(known, (5, 95))
    return float(low), float(high)


def draws_of(row: pd.Series) -> np.ndarray:
    """The value on the nominal machine, then those of the draws; the value alone where there are none."""
    draws = row["draws"]
    if isinstance(draws, (list, tuple, np.ndarray)) and len(draws):
        return np.array([np.nan if value is None else value for value in draws], dtype=float)
    return np.array([np.nan if row["value"] is None else row["value"]], dtype=float)
