"""The page of one routing rule: its definition, where its tokens go, what training does to that, and the data."""

from typing import Any

from moebench.gates.study import EVALUATION, TRAINING
from moebench.report.gate_figures import gate_figure
from moebench.report.gate_rows import GateRows
from moebench.report.parts import Linked, Table, figure, number, percent, times
from moebench.workloads.gates.registry import get_gate
from moebench.workloads.layer import GateSpec
from moebench.workloads.suite import GateExperiment

_SHARES = ("dropped_share", "tokens_without_expert")
_NAMES = {
    "capacity": "slots an expert",
    "experts_per_token": "experts a token",
    "imbalance": "busiest expert over the even share",
    "dropped_share": "routes dropped",
    "tokens_without_expert": "tokens without an expert",
    "rounds": "rounds",
}


def gate_page(experiment: GateExperiment, gate: GateSpec, found: GateRows, kept_by: str) -> dict[str, Any]:
    """What the template shows of a rule.

    Args:
        kept_by: systems that keep it, as a sentence's end.
    """
    rule, label = get_gate(gate.name), gate.label
    trained = experiment.in_training.get(label, gate)
    bars, moments, loads = found.bars(label), found.moments(label), found.loads(label)
    finding = _finding(experiment, label, found)
    facts = [
        ("chosen", rule.formula),
        ("weight", rule.weight),
        ("auxiliary loss", rule.aux),
        ("slots", rule.capacity.replace("the rule", "the capacity rule")),
        ("evaluation", rule.evaluation or "the same"),
        ("source", rule.source),
        ("kept by", kept_by),
    ]
    if trained != gate:
        facts.append(("in the training", trained.label))
    facts.append(("its rows", Linked(f"case {found.case(label)}", found.case(label))))
    return {
        "id": f"gate-{experiment.name}-{gate.name}",
        "title": rule.title,
        "label": label,
        "facts": facts,
        "figure": figure(
            f"gate-{experiment.name}-{gate.name}", f"{rule.title}: tokens of each expert", finding,
            _caption(experiment, found.has_evaluation(label), not moments.empty),
            lambda narrow: gate_figure(bars, moments, loads, narrow),
        ),
        "tables": [_given_table(experiment, label, found), _expert_table(experiment, label, found),
                   *([_training_table(label, found)] if not moments.empty else [])],
    }  # fmt: skip


def _caption(experiment: GateExperiment, has_evaluation: bool, has_training: bool) -> str:
    parts = [f"Above: routes of {experiment.tokens:,} tokens on given logits to each of {experiment.experts} experts."]
    if has_evaluation:
        parts.append("Bars: in training; dashes: kept in evaluation, where the rule is another one.")
    if has_training:
        parts.append(
            "Below: a short training; the shade is an expert's load over the even share, and nothing is drawn below a "
            "quarter of it."
        )
    return " ".join(parts)


def _finding(experiment: GateExperiment, label: str, found: GateRows) -> str:
    """What the rows say, in sentences."""
    told = []
    for routing in experiment.routings:
        busiest, dropped = found.value(label, "imbalance", routing), found.value(label, "dropped_share", routing)
        if busiest is not None and dropped is not None:
            told.append(f"on {routing} logits {_load_words(busiest)} and {_dropped_words(dropped)}")
    sentences = ["; ".join(told) + "."] if told else []
    sentences = [text[:1].upper() + text[1:] for text in sentences]
    moments, pair = found.moments(label), found.consistency(label)
    if moments.empty:
        return " ".join(sentences)
    first, last = moments.iloc[0], moments.iloc[-1]
    loss, evenness, drops = (
        _change(write(first[name]), write(last[name]))
        for name, write in (("loss", _two), ("imbalance", _two), ("dropped", percent))
    )
    sentences.append(
        f"In the training the loss {loss}, the busiest expert {evenness} times the even share, the share of drops "
        f"{drops}."
    )
    if pair is None:
        sentences.append("There is no router that could learn.")
    else:
        granted = _granted(experiment, label)
        sentences.append(
            f"Before it {percent(pair[0])} of a cluster's routes went to the {granted} experts that it uses most, "
            f"after it {percent(pair[1])}."
        )
    return " ".join(sentences)


def _two(value: float) -> str:
    return number(value, 2)


def _change(first: str, last: str) -> str:
    return f"stays at {first}" if first == last else f"goes from {first} to {last}"


def _granted(experiment: GateExperiment, label: str) -> int:
    """Experts of a cluster, as the consistency counts them."""
    gate = next(gate for gate in experiment.gates if gate.label == label)
    top_k = experiment.in_training.get(label, gate).top_k
    assert experiment.training is not None
    return max(top_k, experiment.experts // experiment.training.clusters)


def _load_words(busiest: float) -> str:
    return "every expert gets its even share" if busiest < 1.005 else (
        f"the busiest expert gets {number(busiest)} times the even share"
    )  # fmt: skip


def _dropped_words(dropped: float) -> str:
    return f"{percent(dropped)} of the routes are dropped" if dropped else "nothing is dropped"


def _phases(label: str, found: GateRows) -> list[str]:
    return [TRAINING, EVALUATION] if found.has_evaluation(label) else [TRAINING]


def _given_table(experiment: GateExperiment, label: str, found: GateRows) -> Table:
    """A line a metric, a column a kind of logits and a phase."""
    places = [(routing, phase) for routing in experiment.routings for phase in _phases(label, found)]
    rows = []
    for metric, name in _NAMES.items():
        values = [found.value(label, metric, *place) for place in places]
        if any(value is not None for value in values):
            rows.append([name, *(_cell(metric, value) for value in values)])
    for term in found.terms(label):
        rows.append([f"auxiliary loss: {term}", *(number(found.term(label, term, *place)) for place in places)])
    columns = ["on given logits", *(_place(*place) for place in places)]
    return Table(columns, rows, f"{label} on given logits", frozenset(columns[1:]))


def _place(routing: str, phase: str) -> str:
    return routing if phase == TRAINING else f"{routing}, {phase}"


def _cell(metric: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f} %" if metric in _SHARES else number(value)


def _expert_table(experiment: GateExperiment, label: str, found: GateRows) -> Table:
    """Tokens of each expert, wanted and kept."""
    bars = found.bars(label)
    has_evaluation = found.has_evaluation(label)
    columns = ["expert"]
    for routing in experiment.routings:
        columns += [f"{routing}: wanted", f"{routing}: kept", *([f"{routing}: in evaluation"] * has_evaluation)]
    rows = []
    for expert in sorted(bars["expert"].unique()):
        cells = [f"{expert:.0f}"]
        for routing in experiment.routings:
            own = bars[(bars["routing"] == routing) & (bars["expert"] == expert)].iloc[0]
            cells += [f"{own[name]:,.0f}" for name in ("wanted", "kept", *(["evaluated"] * has_evaluation))]
        rows.append(cells)
    return Table(columns, rows, f"{label}: tokens of each expert", frozenset(columns[1:]))


def _training_table(label: str, found: GateRows) -> Table:
    """A line a step that was kept."""
    moments = found.moments(label)
    shown = {
        "step": ("step", "{:.0f}".format),
        "loss": ("loss", number),
        "aux": ("auxiliary loss", number),
        "imbalance": ("busiest expert", times),
        "dropped": ("dropped", lambda share: f"{100 * share:.1f} %"),
        "experts_per_token": ("experts a token", number),
    }
    have = [name for name in shown if name in moments]
    columns = [shown[name][0] for name in have]
    rows = [[shown[name][1](row[name]) for name in have] for _, row in moments.iterrows()]
    return Table(columns, rows, f"{label}: steps of the training", frozenset(columns[1:]))
