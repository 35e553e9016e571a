"""One section an experiment: its figure redrawn, where the time goes in the cases that matter, and all its cases."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.claims.words import listed
from moebench.report.breakdown_view import breakdown, breakdown_finding, breakdowns, region_table, timelines
from moebench.report.figures import speedup_figure
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, size, times
from moebench.report.rivals_view import best_other_figures, is_cpu_bound, step_time_tables, why_no_ratio
from moebench.report.steps import Step, steps_of
from moebench.results.store import RunFolder
from moebench.workloads.suite import LayerExperiment, LayerShape

MILLI = 1e3
BREAKDOWN = "breakdown"
KEYS = ["gate", "batch_size", "size", "topology", "experts", "engine"]
MOST_TABLE_ROWS = 5_000


def experiment_view(
    folder: RunFolder, experiment: LayerExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict:
    """The template's view of one experiment.

    Args:
        frame: rows of the run, all metrics but region detail included.
    """
    own = in_suite_order(experiment, frame[frame["experiment"] == experiment.name])
    step_times = own[(own["metric"] == "step_time") & own["sample"].isna()]
    by_size = experiment.figure.get("kind") == BREAKDOWN
    point, steps = ("", {}) if by_size else _steps_that_matter(folder, experiment, step_times, scores)
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": layer_words(experiment.layer),
        "answer": _answer(point, steps, _judged_pair(experiment, scores)),
        "figures": [
            *_speedup_figures(experiment, step_times, scores),
            *best_other_figures(experiment, step_times, scores),
            *(breakdowns(folder, experiment, _judged(step_times)) if by_size else []),
            *_where_the_time_goes(experiment, point, steps, scores, _is_drawn_elsewhere(folder, point, frame)),
        ],
        "tables": [] if by_size else step_time_tables(experiment, step_times),
        "not_published": experiment.not_published,
        "caveats": experiment.caveats,
        "cases": _case_table(own, step_times),
    }


def in_suite_order(experiment: LayerExperiment, own: pd.DataFrame) -> pd.DataFrame:
    """An experiment's rows in the order of its lists, default assumptions first, whatever ran first."""
    lists = {
        "gate": [gate.label for gate in experiment.gates],
        "size": list(experiment.sizes),
        "system": list(experiment.systems),
    }
    ranks = {
        name: own[name].map(lambda value, known=known: known.index(value) if value in known else len(known)).astype(int)
        for name, known in lists.items()
    }
    keys = [~own["is_default"].astype(bool), own["conventions"] != "common", ranks["gate"], own["batch_size"]]
    keys += [ranks["size"], ranks["system"]]
    return own.iloc[np.lexsort([np.asarray(key) for key in reversed(keys)])]


def _speedup_figures(experiment: LayerExperiment, step_times: pd.DataFrame, scores: Sequence[Score]) -> list[Figure]:
    """One figure a system that a claim compares with the figure's baseline; without such claims one a system."""
    baseline = experiment.figure.get("baseline", "")
    if experiment.figure.get("kind") != "speedup" or baseline not in set(step_times["system"]):
        return []
    claimed = [s.claim.system for s in scores if s.claim.baseline == baseline and s.claim.experiment == experiment.name]
    others = [name for name in dict.fromkeys(claimed or experiment.systems) if name != baseline]
    found = []
    for name in others:
        points = _points(step_times, name, baseline)
        if not points.empty:
            shipped = _points(step_times, name, baseline, "as-shipped")
            found.append(_speedup_figure(experiment, _with_shipped(points, shipped), name, baseline, scores))
    return found


def _with_shipped(points: pd.DataFrame, shipped: pd.DataFrame) -> pd.DataFrame:
    """The points with a column `shipped`: their speedup when each system keeps its own conventions."""
    if shipped.empty:
        return points.assign(shipped=np.nan)
    return points.merge(shipped[[*KEYS, "value"]].rename(columns={"value": "shipped"}), on=KEYS, how="left")


def _points(step_times: pd.DataFrame, system: str, baseline: str, conventions: str = "common") -> pd.DataFrame:
    """Speedups of the default assumption, one row a point."""
    kept = step_times[step_times["is_default"] & (step_times["conventions"] == conventions)]
    keys = KEYS
    ours = kept[kept["system"] == system].set_index(keys)
    theirs = kept[kept["system"] == baseline].set_index(keys)
    rows = []
    for key in ours.index.intersection(theirs.index, sort=False):
        a, b = ours.loc[key], theirs.loc[key]
        if "unsupported" in (a["status"], b["status"]):  # one has no such layer: nothing to compare
            continue
        entry = dict(zip(keys, key))
        entry |= {"ours_ms": a["value"] * MILLI, "theirs_ms": b["value"] * MILLI}
        entry["note"] = why_no_ratio({baseline: b, system: a})
        entry["value"] = np.nan if entry["note"] else b["value"] / a["value"]
        entry |= {"low": np.nan, "high": np.nan} if entry["note"] else _ratio_interval(a, b)
        entry["case"], entry["baseline_case"] = a["case"], b["case"]
        rows.append(entry)
    return pd.DataFrame(rows)


def _ratio_interval(ours: pd.Series, theirs: pd.Series) -> dict[str, float]:
    """Of the draws, 5 to 95 %; of measured medians, between the quotients of the ends of their own intervals."""
    if len(ours["draws"]) < 3 or len(ours["draws"]) != len(theirs["draws"]):
        return {"low": theirs["low"] / ours["high"], "high": theirs["high"] / ours["low"]}
    ratios = (theirs["draws"] / ours["draws"])[1:]
    ratios = ratios[~np.isnan(ratios)]
    if not ratios.size:
        return {"low": np.nan, "high": np.nan}
    low, high = np.percentile(ratios, (5, 95))
    return {"low": low, "high": high}


def _speedup_figure(
    experiment: LayerExperiment, points: pd.DataFrame, system: str, baseline: str, scores: Sequence[Score]
) -> Figure:
    marks = pd.DataFrame(
        [
            {"gate": s.claim.scope["gate"], "batch_size": int(s.claim.scope["batch_size"]), "value": s.claim.value,
             "label": f"reported {s.claim.value:g}x"}
            for s in scores
            if (s.claim.system, s.claim.baseline, s.claim.experiment) == (system, baseline, experiment.name)
            and {"gate", "batch_size"} <= set(s.claim.scope)
        ],
        columns=["gate", "batch_size", "value", "label"],
    )  # fmt: skip
    hollow = "Hollow: reported. " if len(marks) else ""
    return figure(
        f"speedup-{experiment.name}-{system}",
        f"{system} against {baseline}",
        _speedup_finding(points, system, baseline),
        f"{hollow}Solid: obtained on the default assumptions under common conventions, with {_interval_words(points)}; "
        f"one line a topology (nodes x ranks). Dotted: no difference.",
        lambda narrow: speedup_figure(points, marks, f"speedup over {baseline}", narrow),
        _points_table(points, system, baseline),
    )


def _interval_words(points: pd.DataFrame) -> str:
    """What the intervals of speedups are, by the engines that they come from."""
    engines = set(points["engine"])
    simulated = ["the 5–95 % interval of the draws"] * ("sim" in engines)
    measured = ["where measured, what the 95 % intervals of both step times leave possible"] * bool(engines - {"sim"})
    return listed(simulated + measured)


def _speedup_finding(points: pd.DataFrame, system: str, baseline: str) -> str:
    known = points.dropna(subset="value")
    if known.empty:
        return f"There is no point at which both {system} and {baseline} have a number."
    best, worst = known.loc[known["value"].idxmax()], known.loc[known["value"].idxmin()]
    out = points[points["note"] != ""]
    text = (
        f"{system} is {times(worst['value'])} to {times(best['value'])} as fast as {baseline}: most with "
        f"{best['gate']} at batch size {best['batch_size']} on {best['size']}, least with {worst['gate']} at "
        f"{worst['batch_size']} on {worst['size']}."
    )
    for note, part in out.groupby("note", sort=False):
        where = [
            f"{gate} at batch size {listed([str(b) for b in sorted(of_gate['batch_size'].unique())])}"
            for gate, of_gate in part.groupby("gate", sort=False)
        ]
        text += f" With {listed(where)}: {note}."
    return text


def _points_table(points: pd.DataFrame, system: str, baseline: str) -> Table:
    rows = [
        [p["gate"], str(p["batch_size"]), p["topology"], str(p["experts"]),
         Linked(number(p["theirs_ms"]), p["baseline_case"]), Linked(number(p["ours_ms"]), p["case"]),
         times(p["value"]), interval(p["low"], p["high"], "x"), times(p["shipped"]), p["note"]]
        for _, p in points.iterrows()
    ]  # fmt: skip
    columns = ["gate", "batch", "topology", "experts", f"{baseline}, ms", f"{system}, ms", "speedup", "interval"]
    columns += ["as shipped", "note"]
    caption = f"{system} against {baseline}, point by point; as shipped, the two do not compute the same function"
    return Table(columns, rows, caption, frozenset(columns[1:2] + columns[3:9]))


def layer_words(layer: LayerShape) -> str:
    """What is computed, for someone who has only the report."""
    return (
        f"One layer: D = {layer.d_model:,} wide, experts of {layer.d_ffn:,} with {layer.activation}, sequences of "
        f"{layer.sequence:,} tokens, {layer.dtype}, capacity factor {layer.capacity_factor:g}, {layer.routing.kind} "
        "routing; a step is forward, backward, gradient synchronisation and optimiser. 4x8 means 4 nodes of 8 ranks."
    )


def _judged_pair(experiment: LayerExperiment, scores: Sequence[Score]) -> tuple[str, str] | None:
    """System and baseline of the experiment's first claim that has a value."""
    judged = [s.claim for s in scores if s.claim.experiment == experiment.name and s.obtained]
    return (judged[0].system, judged[0].baseline) if judged else None


def _steps_that_matter(
    folder: RunFolder, experiment: LayerExperiment, step_times: pd.DataFrame, scores: Sequence[Score]
) -> tuple[str, dict[str, Step]]:
    """The point at which the claim is strongest, and every system's step there, in the suite's order."""
    point = _point_that_matters(step_times, _judged_pair(experiment, scores), scores, experiment)
    if point is None:
        return "", {}
    here = _judged(step_times)
    here = here[here["case"].str.startswith(f"{point}/")]
    here = here[here["case"] == point + "/" + here["system"].astype(str)]
    steps = steps_of(folder, list(here["case"]))
    return point, {s: steps[s] for s in experiment.systems if s in steps}


def _answer(point: str, steps: Mapping[str, Step], pair: tuple[str, str] | None) -> str:
    """Step times at the point, the fastest first, and what makes the difference between those that a claim compares."""
    if not steps:
        return ""
    ordered = sorted(steps.items(), key=lambda item: item[1].step_s)
    each = [f"{name} {number(step.step_s * MILLI)} ms" for name, step in ordered]
    return f"At {point} a step takes: {listed(each)}. {breakdown_finding(region_table(steps), steps, pair)}"


def _is_drawn_elsewhere(folder: RunFolder, point: str, frame: pd.DataFrame) -> bool:
    """Whether an experiment of breakdowns has the same point of another one."""
    kept = [e.name for e in folder.suite.experiments if e.figure.get("kind") == BREAKDOWN]
    points = {f"{name}/{point.partition('/')[2]}" for name in kept}
    return any(str(case).rpartition("/")[0] in points for case in frame["case"].unique()) if points else False


def _where_the_time_goes(
    experiment: LayerExperiment, point: str, steps: Mapping[str, Step], scores: Sequence[Score], is_drawn: bool
) -> list[Figure]:
    """Breakdown of every system, and timelines of the two that a claim compares, at the claim's best point.

    Args:
        is_drawn: whether the breakdown stands in another section.
    """
    if not steps:
        return []
    pair = _judged_pair(experiment, scores)
    found = [] if is_drawn else [breakdown(experiment, point, steps, pair=pair)]
    if pair and all(name in steps and steps[name].tracks is not None for name in pair):
        found.append(timelines(experiment, point, [steps[pair[1]], steps[pair[0]]]))
    return found


def _point_that_matters(
    step_times: pd.DataFrame, pair: tuple[str, str] | None, scores: Sequence[Score], experiment: LayerExperiment
) -> str | None:
    """Where the claimed speedup is largest within the claim's gate and batch size; else where the slowest step is."""
    if pair is not None:
        scope = next(s.claim.scope for s in scores if (s.claim.system, s.claim.baseline) == pair and s.obtained)
        points = _points(step_times, *pair).dropna(subset="value")
        for key in ("gate", "batch_size"):
            if key in scope:
                points = points[points[key].astype(str) == scope[key]]
        if not points.empty:
            p = points.loc[points["value"].idxmax()]
            return f"{experiment.name}/{p['gate']}/b{p['batch_size']}/{p['topology']}/e{p['experts']}"
    kept = _judged(step_times)
    kept = kept[kept["is_default"]]
    if kept.empty:
        return None
    return str(kept.loc[kept["value"].idxmax(), "case"]).rpartition("/")[0]


def _judged(step_times: pd.DataFrame) -> pd.DataFrame:
    """The rows whose number may be judged by."""
    return step_times[(step_times["status"] == "passed") & ~step_times["detail"].map(is_cpu_bound)]


def _case_table(own: pd.DataFrame, step_times: pd.DataFrame) -> Table:
    memory = own[own["metric"] == "peak_memory"].set_index("case")["value"]
    flops = own[(own["metric"] == "flops") & own["detail"].map(lambda d: not d)].set_index("case")["value"]
    rows = [
        [
            row["case"],
            number(row["value"] * MILLI) if row["status"] == "passed" else row["status"],
            interval(row["low"] * MILLI, row["high"] * MILLI),
            size(memory[row["case"]]) if row["case"] in memory.index else "–",
            number(flops[row["case"]] / 1e12) if row["case"] in flops.index else "–",
            row["engine"],
            row["reason"] or "",
        ]
        for _, row in step_times.head(MOST_TABLE_ROWS).iterrows()
    ]
    columns = ["case", "step, ms", "interval, ms", "peak memory", "TFLOP a rank", "engine", "note"]
    caption = "Every case with its step time, memory and operations"
    if len(step_times) > MOST_TABLE_ROWS:
        caption += f" (the first {MOST_TABLE_ROWS:,} of {len(step_times):,}; all are in results.jsonl)"
    return Table(columns, rows, caption, frozenset(columns[1:5]))
