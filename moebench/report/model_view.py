"""The section of an experiment about whole models: its figure, and every number in a table."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.report import ablation_view
from moebench.report.kept_table import kept_tables
from moebench.report.memory_tables import NOTE, memory_tables
from moebench.report.model_figures import POINT, answer_of, drawn_of, figures_of
from moebench.report.parts import Figure, Table, number, percent, times
from moebench.results.store import RunFolder
from moebench.workloads.layer import GateSpec
from moebench.workloads.model import shape_of
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
    ("kept_share", "routes kept", lambda value: f"{100 * value:.1f} %"),
    ("peak_memory", "memory, GiB", lambda value: number(value / 2**30)),
)


def experiment_view(
    folder: RunFolder, experiment: ModelExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    own = _in_order(frame[(frame["experiment"] == experiment.name) & frame["sample"].isna()], experiment)
    answer, figures = _drawn(experiment, own)
    memory = memory_tables(experiment, own, [one.claim for one in scores])
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_run(experiment),
        "answer": answer,
        "figures": figures,
        "tables": [*kept_tables(own), *memory],
        "not_published": experiment.not_published,
        "caveats": (*experiment.caveats, *([NOTE] if memory else [])),
        "cases": _case_table(own),
    }


def _drawn(experiment: ModelExperiment, own: pd.DataFrame) -> tuple[str, list[Figure]]:
    """What the figure says in a sentence, and the figure."""
    if experiment.figure.get("kind") == "model-ablation":
        answer = ablation_view.answer_of(experiment, own)
        return answer, ablation_view.ablation_figures(experiment, own, answer)
    drawn = drawn_of(experiment, own[own["is_default"].astype(bool)])
    return answer_of(experiment, drawn), figures_of(experiment, drawn)


def _in_order(own: pd.DataFrame, experiment: ModelExperiment) -> pd.DataFrame:
    """Rows as the suite lists models, gates, clusters and systems, the default reading first; they come as they end."""
    orders: dict[str, list[str]] = {
        "model": list(experiment.models),
        "gate": [gate.label for gate in experiment.gates],
        "topology": [f"{size}-{gpu}" for gpu in experiment.node_types for size in experiment.sizes],
        "system": list(experiment.systems),
    }
    keys = pd.DataFrame({"other": ~own["is_default"].astype(bool)}, index=own.index)
    for name in ("topology", "gate", "model", "dtype", "batch_size", "system"):
        if name in orders:
            places = {one: place for place, one in enumerate(orders[name])}
            keys[name] = [places.get(str(one), len(places)) for one in own[name]]
        else:
            keys[name] = own[name].to_list()
    return own.loc[keys.sort_values(list(keys), kind="stable").index]


def _what_is_run(experiment: ModelExperiment) -> str:
    readings = "; ".join(
        f"{one.name}: "
        + ", ".join(
            f"{' and '.join(map(str, sizes))} on {gpu} in {one.dtypes.get(gpu, 'fp32')}"
            for gpu, sizes in one.batches.items()
        )
        for one in experiment.trainings
    )
    others = [one for one in experiment.readings if one not in experiment.trainings]
    instead = "; ".join(f"{one.name}: {new} for {old}" for one in others for old, new in one.instead.items())
    return (
        f"A training step of GPT-2 with {_experts(experiment)}: data parallel but for the experts, whose tokens are "
        f"exchanged among all GPUs. Sequences a GPU of {' and '.join(experiment.models)}, by reading "
        f"of the paper: {readings}." + (f" What claims mean by a system is open too: {instead}." if instead else "")
    )


def _experts(experiment: ModelExperiment) -> str:
    """`two experts a GPU in every other block`, of every kind of model that there is."""
    found = []
    for model in experiment.models:
        shape = shape_of(model, GateSpec("switch"), 1, 1)
        of_gpu = {1: "an expert", 2: "two experts"}.get(shape.experts, f"{shape.experts} experts")
        where = {1: "every block", 2: "every other block"}.get(shape.moe_every, f"one of {shape.moe_every} blocks")
        found.append(f"{of_gpu} a GPU in {where}")
    return " or ".join(dict.fromkeys(found))


def _case_table(own: pd.DataFrame) -> Table:
    """A row a case, a column a metric that any case has."""
    keys = [*POINT, "system"]
    plain = own.drop_duplicates([*keys, "metric"])
    first = plain[plain["metric"] == "step_time"]
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
