"""The section of an experiment about training jobs: speedups by point, where each step goes, what its ranks hold."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.report.job_gap import by_case, gap_tables
from moebench.report.kernel_figures import kernel_figure
from moebench.report.model_figures import speedups
from moebench.report.parts import Figure, Linked, Table, figure, interval, number, percent, times
from moebench.results.store import RunFolder
from moebench.workloads.suite import JobExperiment, JobReading

# Metrics of a case that stand in the tables: name, heading, and how it is written.
TIMES = (
    ("iteration_time", "step, s", number),
    ("attention_and_gemm", "products, s", number),
    ("exposed_comm", "exposed, s", number),
    ("other", "other, s", number),
    ("bubble_time", "of it bubble, s", number),
    ("throughput", "ktokens/s", lambda value: number(value / 1e3)),
    ("mfu", "MFU", percent),
)
MEMORY = (
    ("memory_activations", "activations, GB", lambda value: number(value / 1e9)),
    ("memory_model_states", "model states, GB", lambda value: number(value / 1e9)),
    ("memory_other", "other, GB", lambda value: number(value / 1e9)),
    ("memory_total", "in all, GB", lambda value: number(value / 1e9)),
)
POINT = ["model", "topology", "global_batch", "micro_batch", "stages", "chunks", "skew"]
WHERE = (
    "Products: matrix products and attention of the stage that computes longest, over the step. Exposed: its compute "
    "waits for collectives in flight. Other is the rest of the step, the wait for other stages (bubble) with it."
)


def experiment_view(
    folder: RunFolder, experiment: JobExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    own = frame[(frame["experiment"] == experiment.name) & frame["sample"].isna()]
    steps = own[own["metric"] == "iteration_time"]
    baseline = experiment.figure.get("baseline", "")
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_run(experiment),
        "answer": _answer(experiment, steps, baseline),
        "figures": _figures(experiment, steps, baseline),
        "tables": [
            *gap_tables(folder, experiment, own, scores),
            *_uneven(own),
            _table(own, MEMORY, "What a rank of the fullest stage holds"),
        ],
        "not_published": experiment.not_published,
        "caveats": (*experiment.caveats, WHERE),
        "cases": _table(own, TIMES, "Every case", has_notes=True),
    }


def _what_is_run(experiment: JobExperiment) -> str:
    readings = "; ".join(f"{one.name}: {_said(one)}" for one in experiment.readings)
    return (
        f"A step of {', '.join(experiment.models)}: all micro-batches through the pipeline, gradients summed over the "
        f"replicas, parameters updated. Stages are traced by themselves and put together. By reading: {readings}."
    )


def _said(reading: JobReading) -> str:
    parts = [f"{_list(reading.stages)} stages"]
    parts += [f"of {reading.chunks} chunks"] if reading.chunks > 1 else []
    parts += [f"{_list(reading.layers)} layers"] if reading.layers else []
    parts += [f"{_list(reading.global_batches)} sequences", f"{reading.micro_batch} a micro-batch"]
    parts += [f"routes skewed by {reading.skew:g}"] if reading.skew else []
    return ", ".join(parts)


def _list(values: Sequence[int]) -> str:
    return "/".join(map(str, dict.fromkeys(values)))


def _answer(experiment: JobExperiment, steps: pd.DataFrame, baseline: str) -> str:
    """How many times faster than the baseline the first system is, at the points of the default reading."""
    if not baseline or baseline == experiment.systems[0]:
        return ""
    found = speedups(steps[steps["is_default"].astype(bool)], baseline, POINT)
    found = found[found["system"] == experiment.systems[0]].dropna(subset="speedup")
    if found.empty:
        return ""
    values = found["speedup"].to_numpy(dtype=float)
    least, most = number(values.min()), number(values.max())
    spread = least if least == most else f"{least} to {most}"
    points = "one point" if len(values) == 1 else f"{len(values)} points"
    return f"{_said_system(experiment.systems[0])} is {spread} times as fast as {_said_system(baseline)} at {points}."


def _figures(experiment: JobExperiment, steps: pd.DataFrame, baseline: str) -> list[Figure]:
    found = speedups(steps[steps["is_default"].astype(bool)], baseline, POINT) if baseline else steps[:0]
    if found.empty:
        return []
    answer = _answer(experiment, steps, baseline)
    sizes = found["topology"].astype(str).str.partition("-")
    points = pd.DataFrame(
        {
            "shape": found["model"].astype(str) + " " + sizes[0],
            "direction": sizes[2],
            "implementation": found["system"].astype(str),
            "value": found["speedup"],
            "low": found["speedup_low"],
            "high": found["speedup_high"],
            "note": "",
        }
    )
    table = Table(
        ["model", "topology", "sequences", "system", f"speedup over {baseline}", "5–95 %"],
        [
            [row["model"], str(row["topology"]), str(int(row["global_batch"])), row["system"],
             Linked(times(row["speedup"]), row["case"]), interval(row["speedup_low"], row["speedup_high"], "x")]
            for _, row in found.iterrows()
        ],
        f"{experiment.title}: speedups of the default reading",
        frozenset(("sequences", f"speedup over {baseline}", "5–95 %")),
    )  # fmt: skip
    short = _short_names(experiment)
    points["implementation"] = points["implementation"].map(lambda name: short.get(name, name))
    names = list(dict.fromkeys(points["implementation"]))
    label = f"speedup over {' '.join(short.get(baseline, baseline).split())}"
    return [
        figure(
            f"jobs-{experiment.name}",
            label.capitalize(),
            answer or experiment.question,
            f"Time of {_said_system(baseline)} over time of each system, simulated; lines are 5 to 95 % of the draws. "
            "The model, then nodes x GPUs; a panel is a node type.",
            lambda narrow: kernel_figure(points, label, names, None, narrow),
            table,
        )
    ]


MOST_LETTERS = 16  # of a name in a legend


def _short_names(experiment: JobExperiment) -> dict[str, str]:
    """Long names as a legend has room for them: the paper's word, or options without what all have, a line each."""
    words = {system: word for own in experiment.variants.values() for word, system in own.items()}
    found = {name: word for name, word in words.items() if len(word) <= MOST_LETTERS}
    is_one = len({name.partition("+")[0] for name in experiment.systems}) == 1
    for name in experiment.systems:
        stem, *options = name.split("+")
        if len(name) > MOST_LETTERS:
            found.setdefault(name, "\n".join(options if is_one and options else [stem, *options]))
    return found


def _said_system(name: str) -> str:
    """A name in words, which a narrow page can break."""
    stem, *options = name.split("+")
    return f"{stem} with {', '.join(options)}" if options else stem


def _uneven(own: pd.DataFrame) -> list[Table]:
    """Where most of the time in which stages compute no micro-batch is that one takes longer than the others."""
    whole, uneven = by_case(own, "bubble"), by_case(own, "bubble_uneven")
    rows = [
        [case, percent(whole[case]), percent(share)]
        for case, share in uneven.items()
        if case in whole and share > 0.5 * whole[case] > 0
    ]
    headings = ["no micro-batch", "one takes longer"]
    title = (
        "Where stages compute no micro-batch most of all because one takes longer, the last with head and loss or the "
        "first with the embedding, and less as the pipeline fills, drains and sums: shares of all stages' time"
    )
    return [Table(["case", *headings], rows, title, frozenset(headings))] if rows else []


def _table(own: pd.DataFrame, columns: Sequence[tuple[str, str, Any]], title: str, has_notes: bool = False) -> Table:
    """A row a case, a column a metric that any case has."""
    plain = own[own["detail"].map(lambda detail: not detail).astype(bool)] if "detail" in own else own
    first = own[own["metric"] == "iteration_time"].drop_duplicates(["case"])
    have = [one for one in columns if one[0] in set(plain["metric"])]
    values = {
        metric: dict(zip(part["case"], part["value"]))
        for metric, _, _ in have
        for part in (plain[plain["metric"] == metric],)
    }
    rows = []
    for _, row in first.iterrows():
        cells = []
        for metric, _, written in have:
            value = values[metric].get(row["case"])
            cells.append("–" if value is None or pd.isna(value) else written(float(value)))
        note = "" if row["status"] == "passed" else f"{row['status']}: {row['reason']}"
        rows.append([row["case"], *cells, *([note] if has_notes else [])])
    headings = [heading for _, heading, _ in have]
    return Table(["case", *headings, *(["note"] if has_notes else [])], rows, title, frozenset(headings))
