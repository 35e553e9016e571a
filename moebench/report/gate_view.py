"""The section of an experiment about routing rules: who keeps them, how even their loads are, and a page for each."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from moebench.claims.scoreboard import Score
from moebench.claims.words import listed
from moebench.gates.learn import AUXILIARY
from moebench.report.gate_figures import overview_figure
from moebench.report.gate_page import gate_page
from moebench.report.gate_rows import GateRows, gate_rows
from moebench.report.parts import Figure, Table, figure, number, percent
from moebench.results.rows import SUPPORTED
from moebench.results.store import RunFolder
from moebench.systems.registry import reference
from moebench.workloads.suite import GateExperiment

TRAINED = "end of the training"
PASSED = "✔"

Statuses = Mapping[tuple[str, str], tuple[str, str]]  # (gate, system) -> status and reason


def experiment_view(
    folder: RunFolder, experiment: GateExperiment, frame: pd.DataFrame, scores: Sequence[Score]
) -> dict[str, Any]:
    """The template's view of one experiment.

    Args:
        frame: rows of the run.
    """
    found, statuses = gate_rows(folder, experiment), statuses_of(experiment, frame)
    pages = [
        gate_page(experiment, gate, found, _kept_by(gate.label, statuses))
        for gate in experiment.gates
        if gate.label in found.gates
    ]
    return {
        "name": experiment.name,
        "title": experiment.title,
        "question": experiment.question,
        "layer": _what_is_run(experiment, found),
        "answer": _answer(experiment, statuses),
        "figures": _overview(experiment, found),
        "tables": _support_tables(statuses),
        "pages": pages,
        "not_published": experiment.not_published,
        "caveats": experiment.caveats,
        "cases": _case_table(frame[frame["experiment"] == experiment.name]),
    }


def statuses_of(experiment: GateExperiment, frame: pd.DataFrame) -> Statuses:
    """What the run says of each rule of the experiment and each system, here or in another of its experiments.

    A case that ran out of memory, or was skipped, passed the correctness gate before.
    """
    labels = {gate.label for gate in experiment.gates}
    rows = frame[frame["gate"].isin(labels) & (frame["conventions"] == "common") & frame["sample"].isna()]
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for gate, system, status, reason, metric in zip(
        rows["gate"], rows["system"], rows["status"], rows["reason"], rows["metric"]
    ):
        key, is_own = (str(gate), str(system)), metric == SUPPORTED
        if is_own or key not in found:
            status = status if status in ("unsupported", "wrong", "failed") else "passed"
            found[key] = (status, reason or "")
    return found


def _what_is_run(experiment: GateExperiment, found: GateRows) -> str:
    text = (
        f"Rules by themselves, under common conventions with a capacity factor of {experiment.capacity_factor:g}: "
        f"{experiment.tokens:,} tokens of one rank with given logits choose among {experiment.experts} experts. "
        "The correctness gate: outputs, losses and gradients of the rule's definition, on real ranks. In the rules p "
        "is the softmax of a token's logits, P_e the mean of p_e over the tokens, f_e the choices of e a token."
    )
    training = experiment.training
    if training is None or not found.has_training:
        return text
    return (
        f"{text} The training: {training.steps} steps of a small layer (model size {training.d_model}, Adam, "
        f"{training.tokens} tokens a step, auxiliary loss with weight {AUXILIARY:g}) on tokens of {training.clusters} "
        "clusters, each of which should undergo a linear map of its own, which no expert alone can do for two."
    )


def _answer(experiment: GateExperiment, statuses: Statuses) -> str:
    """How many rules each system keeps."""
    gates = {gate for gate, _ in statuses}
    told = []
    for system in (name for name in experiment.systems if name != reference().name):
        own = {gate: status for (gate, name), (status, _) in statuses.items() if name == system}
        others = [gate for gate, status in own.items() if status != "passed"]
        if own:
            told.append(
                f"{system} passes the correctness gate with {len(own) - len(others)} of {len(own)} routing rules"
                + (f"; not with {listed(others)}" if others else "")
            )
    return f"{listed(told)}." if told and gates else ""


def _kept_by(gate: str, statuses: Statuses) -> str:
    names = [name for (own, name), (status, _) in statuses.items() if own == gate and status == "passed"]
    return listed([name for name in names if name != reference().name]) or "–"


def _support_tables(statuses: Statuses) -> list[Table]:
    """A line a system: the rules that it keeps, the others, and an example of why."""
    rows = []
    for system in dict.fromkeys(name for _, name in statuses if name != reference().name):
        own = {gate: status for (gate, name), status in statuses.items() if name == system}
        kept = [gate for gate, (status, _) in own.items() if status == "passed"]
        by_status: dict[str, list[str]] = {}
        for gate, (status, _) in own.items():
            by_status.setdefault(status, []).append(gate)
        others = [f"{status}: {', '.join(gates)}" for status, gates in by_status.items() if status != "passed"]
        reason = next((reason for status, reason in own.values() if status != "passed"), "")
        rows.append([system, f"{PASSED} {len(kept)} of {len(own)}", ", ".join(kept), "; ".join(others), reason])
    columns = ["system", "correctness gate", "keeps", "does not", "why, for example"]
    if not any(row[3] for row in rows):
        columns, rows = columns[:3], [row[:3] for row in rows]
    return [Table(columns, rows, "Who keeps which rule")] if rows else []


def _overview(experiment: GateExperiment, found: GateRows) -> list[Figure]:
    points = _points(experiment, found)
    if points.empty:
        return []
    table_rows = [
        [row["gate"], row["where"], f"{number(row['imbalance'])}x", f"{100 * row['dropped']:.1f} %"]
        for _, row in points.iterrows()
    ]
    columns = ["gate", "where", "busiest expert over the even share", "routes dropped"]
    return [
        figure(
            f"even-{experiment.name}", "How evenly each rule uses the experts", _overview_finding(points),
            "Routes to the busiest expert over the even share, where 1 is even, and routes that find no slot. Given "
            "logits: independent (iid), and those of a router that prefers few experts (zipf).",
            lambda narrow: overview_figure(points, experiment.experts, narrow),
            Table(columns, table_rows, "Balance and drops", frozenset(columns[2:])),
        )
    ]  # fmt: skip


def _points(experiment: GateExperiment, found: GateRows) -> pd.DataFrame:
    """Columns gate, where, imbalance, dropped."""
    rows: list[dict[str, Any]] = []
    for gate in found.gates:
        for routing in experiment.routings:
            imbalance, dropped = (found.value(gate, name, routing) for name in ("imbalance", "dropped_share"))
            rows.append({"gate": gate, "where": routing, "imbalance": imbalance, "dropped": dropped})
        moments = found.moments(gate)
        if not moments.empty:
            last = moments.iloc[-1]
            rows.append({"gate": gate, "where": TRAINED, "imbalance": last["imbalance"], "dropped": last["dropped"]})
    return pd.DataFrame(rows).dropna() if rows else pd.DataFrame()


def _overview_finding(points: pd.DataFrame) -> str:
    """Who stays even whatever the logits, and who does not."""
    worst = points.groupby("gate", sort=False)["imbalance"].max()
    even = list(worst[worst < 1.005].index)
    uneven = points.loc[points["imbalance"].idxmax()]
    told = [f"Even whatever the logits: {listed(even)}."] if even else []
    told.append(
        f"The most uneven is {uneven['gate']} ({uneven['where']}): its busiest expert gets "
        f"{number(uneven['imbalance'])} times the even share, and {percent(uneven['dropped'])} of the routes find no "
        "slot."
    )
    return " ".join(told)


def _case_table(own: pd.DataFrame) -> Table:
    rows = [
        [str(row["case"]), str(row["status"]), str(row["engine"]), row["reason"] or ""]
        for _, row in own[own["metric"] == SUPPORTED].iterrows()
    ]
    return Table(["case", "status", "engine", "note"], rows, "Every case with its status")
