"""The section of an experiment about whole models: speedups by point and cluster, and every number in a table."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.report.kernel_figures import kernel_figure
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, percent, times
from moebench.results.store import RunFolder
from moebench.workloads.suite import ModelExperiment

# Metrics of a case that stand in the table: name, heading, and how it is written.
COLUMNS = (
    ("step_time", "step, ms", lambda value: number(1e3 * value)),
    ("exposed_communication", "exposed, ms", lambda value: number(1e3 * value)),
    ("alltoall_share_of_step", "all-to-alls of step", percent),
    ("alltoall_over_expert_time", "all-to-alls over experts", times),
    ("best_partition_count", "most parts", lambda value: f"{value:.0f}"),
    ("prediction_error", "prediction off by", lambda value: f"{100 * value:.1f} %"),
    ("optimisation_time", "passes, s", number),
    ("peak_memory", "memory, GiB", lambda value: number(value / 2**30)),
)
POINT = ["model", "gate", "batch_size", "dtype", "topology"]
SHORT = {"gpt2-s-moe": "S", "gpt2-l-moe": "L"}


def experiment_view(
    folder: RunFolder, experiment: ModelExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    own = frame[(frame["experiment"] == experiment.name) & frame["sample"].isna()]
    steps = own[own["metric"] == "step_time"]
    baseline = experiment.figure.get("baseline", "")
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_run(experiment),
        "answer": _answer(experiment, steps, baseline),
        "figures": _figures(experiment, steps, baseline),
        "tables": [],
        "not_published": experiment.not_published,
        "caveats": experiment.caveats,
        "cases": _case_table(own),
    }


def _what_is_run(experiment: ModelExperiment) -> str:
    readings = "; ".join(
        f"{one.name}: "
        + ", ".join(
            f"{' and '.join(map(str, sizes))} on {gpu} in {one.dtypes.get(gpu, 'fp32')}"
            for gpu, sizes in one.batches.items()
        )
        for one in experiment.readings
    )
    return (
        "A training step of GPT-2 with two experts a GPU in every other block: data parallel but for the experts, "
        f"whose tokens are exchanged among all GPUs. Sequences a GPU of {' and '.join(experiment.models)}, by reading "
        f"of the paper: {readings}."
    )


def _answer(experiment: ModelExperiment, steps: pd.DataFrame, baseline: str) -> str:
    """How many times faster than the baseline the first system is, at the points of the default reading."""
    found = speedups(steps[steps["is_default"].astype(bool)], baseline)
    found = found[found["system"] == experiment.systems[0]].dropna(subset="speedup") if baseline else found[:0]
    if found.empty:
        return ""
    values = found["speedup"].to_numpy(dtype=float)
    if len(values) == 1:
        return f"{experiment.systems[0]} is {number(values[0])} times as fast as {baseline} at one point."
    return (
        f"{experiment.systems[0]} is {number(values.min())} to {number(values.max())} times as fast as {baseline} at "
        f"{len(values)} points, {number(values.mean())} on average."
    )


def speedups(steps: pd.DataFrame, baseline: str, point: Sequence[str] = POINT) -> pd.DataFrame:
    """Every row with its baseline's time over its own, and 5 to 95 % of that over the draws.

    Args:
        point: columns that make a point.
    """
    rows = []
    for _, own in steps.groupby(list(point), sort=False, observed=True):
        base = own[own["system"] == baseline]
        for _, row in own.iterrows():
            theirs = _draws(base.iloc[0]) if len(base) else np.array([np.nan])
            ours = _draws(row)
            with np.errstate(invalid="ignore"):
                ratio = theirs / ours if len(theirs) in (1, len(ours)) else np.array([np.nan])
            known = ratio[1:][~np.isnan(ratio[1:])]
            low, high = np.percentile(known, (5, 95)) if known.size > 1 else (np.nan, np.nan)
            rows.append({**row.to_dict(), "speedup": ratio[0], "speedup_low": low, "speedup_high": high})
    return pd.DataFrame(rows, columns=[*steps.columns, "speedup", "speedup_low", "speedup_high"])


def _draws(row: pd.Series) -> np.ndarray:
    draws = row["draws"]
    if isinstance(draws, (list, tuple, np.ndarray)) and len(draws):
        return np.array([np.nan if value is None else value for value in draws], dtype=float)
    return np.array([np.nan if row["value"] is None else row["value"]], dtype=float)


def _figures(experiment: ModelExperiment, steps: pd.DataFrame, baseline: str) -> list[Figure]:
    found = speedups(steps[steps["is_default"].astype(bool)], baseline) if baseline else steps[:0]
    if found.empty:
        return []
    points = pd.DataFrame(
        {
            "shape": [
                f"{SHORT.get(model, model)} {gate} {topology.partition('-')[0]}"
                for model, gate, topology in zip(found["model"], found["gate"], found["topology"].astype(str))
            ],
            "direction": [topology.partition("-")[2] for topology in found["topology"].astype(str)],
            "implementation": found["system"].astype(str),
            "value": found["speedup"],
            "low": found["speedup_low"],
            "high": found["speedup_high"],
            "note": "",
        }
    )
    table = Table(
        ["model", "gate", "batch", "topology", "system", f"speedup over {baseline}", "5–95 %"],
        [
            [row["model"], row["gate"], str(int(row["batch_size"])), str(row["topology"]), row["system"],
             Linked(times(row["speedup"]), row["case"]), interval(row["speedup_low"], row["speedup_high"], "x")]
            for _, row in found.iterrows()
        ],
        f"{experiment.title}: speedups of the default reading",
        frozenset(("batch", f"speedup over {baseline}", "5–95 %")),
    )  # fmt: skip
    engine = "simulated" if set(found["engine"].astype(str)) == {"sim"} else "measured"
    caption = (
        f"Time of {baseline} over time of each system, {engine}; lines are 5 to 95 % of the draws. S and L are the "
        "models, then gate and nodes x GPUs; a panel is a cluster."
    )
    names = list(dict.fromkeys(found["system"].astype(str)))
    label = f"speedup over {baseline}"
    return [
        figure(
            f"models-{experiment.name}",
            f"Speedup over {baseline}",
            _answer(experiment, steps, baseline) or experiment.question,
            caption,
            lambda narrow: kernel_figure(points, label, names, None, narrow),
            table,
        )
    ]


def _case_table(own: pd.DataFrame) -> Table:
    """A row a case, a column a metric that any case has."""
    keys = [*POINT, "system"]
    plain = own[own["detail"].map(lambda detail: not detail).astype(bool)] if "detail" in own else own
    first = own[own["metric"] == "step_time"].drop_duplicates(keys)
    have = [one for one in COLUMNS if one[0] in set(plain["metric"])]
    values = {
        metric: {
            tuple(row[key] for key in keys): row["value"]
            for _, row in plain[plain["metric"] == metric].iterrows()
        }
        for metric, _, _ in have
    }
    rows = []
    for _, row in first.iterrows():
        key = tuple(row[name] for name in keys)
        cells = []
        for metric, _, written in have:
            value = values[metric].get(key)
            cells.append("–" if value is None or pd.isna(value) else written(float(value)))
        note = "" if row["status"] == "passed" else f"{row['status']}: {row['reason']}"
        rows.append([row["case"], row["dtype"], *cells, note])
    headings = [heading for _, heading, _ in have]
    return Table(["case", "dtype", *headings, "note"], rows, "Every case", frozenset(headings))
