"""From a run folder to what the page's template shows: plain values, no markup but the figures."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import moebench
from moebench import kinds
from moebench.claims.scoreboard import Score, asked_for, scoreboard
from moebench.claims.verdict import NOT_RUN
from moebench.claims.words import DEFINITIONS
from moebench.compare.escape import plain
from moebench.report.claims_view import (
    card,
    claim_key,
    counts_table,
    experiment_key,
    not_run_table,
    rests_table,
    score_sentence,
    score_table,
    the_map,
)
from moebench.report.facts import facts_text
from moebench.report.machines_view import machine_tables, machines_sentence
from moebench.report.parts import Table, drawing, size
from moebench.report.side_by_side import side_by_side
from moebench.report.tables import anchors_of, with_lines
from moebench.report.text import printable
from moebench.results.lines import SCHEMA_VERSION, places
from moebench.results.rows import BY_SIZE, SUBJECTS, USED
from moebench.results.store import RunFolder
from moebench.results.table import table
from moebench.rows.parts import FORMULA, PER_GPU, RANK_TIME, TIER
from moebench.workloads.machine import Parameter

METRICS = (
    *SUBJECTS,
    "peak_memory",
    "flops",
    "device_bytes",
    "launches",
    "floor_time",
    "floor_ratio",
    "achieved_bandwidth",
    "achieved_rate",
    "algorithmic_bandwidth",
    "nic_bytes",
    "nic_messages",
    "inside_bytes",
    *("throughput", "mfu", "exposed_comm", "attention_and_gemm", "other", "bubble_time", "bubble", "bubble_uneven"),
    "iteration_time_slower_products",
    *("memory_activations", "memory_model_states", "memory_other", "memory_total"),
    *("setting_time", "settings"),
    *("link_bytes", "exposed_communication", "host_bound", "loss", "control_deviation", FORMULA),
    *(PER_GPU, RANK_TIME),
    *("error", "largest_error", "gradient_error", "gradient_largest_error"),
    *("alltoall_share_of_step", "alltoall_over_expert_time", "lasting_memory", "kept_share"),
    *(BY_SIZE, USED, TIER, "exposed_transfer", "busy_time"),
    *("best_partition_count", "prediction_error", "optimisation_time"),
)

READING = (
    "A verdict is computed from the rows of this run, never typed; it needs 90 % of the draws. "
    + " ".join(f"“{word}”: {meaning}." for word, meaning in DEFINITIONS.items())
    + " The error of a speedup is taken on its gain, so that 1.02x does not reproduce 1.13x.",
    "What the paper leaves open altogether is an assumption: each is shown, and none enters a maximum.",
    "Under common conventions all systems keep the same tokens with the same weights. As shipped, each has its own "
    "capacity rounding, drop order, noise and normalisation, and they no longer compute the same function.",
)

ENGINES = {
    "sim": "Engine sim: the real program of each system was traced operator by operator, forward, backward and "
    "optimiser step, and replayed on a described machine. A draw is one machine out of the ranges below; the same draw "
    "serves every system.",
    "local": "Engine local: the real program ran in one process of the machine that is described below. A time is the "
    "median of its samples, with a bootstrap 95 % interval.",
    "count": "Engine count: a rule ran for real on seeded data in one process, and what it did was counted. Nothing is "
    "timed, so no machine has a part in it.",
    "cluster": "Engine cluster: the real program ran on real ranks. A time is from the first rank in to the last one "
    "out, the median of its samples, with a bootstrap 95 % interval. A case whose processors and not its network set "
    "the pace is marked cpu-bound: its number is shown, and no figure, comparison or verdict uses it.",
}


LONGEST = ("gate", "exchange")  # kinds whose sections have the most drawings


ONCE = (
    "Figures are drawn once here, as wide as on a desk, for this report is of a quick run: `moebench report` with the "
    "run's folder writes it with drawings for phones too."
)


def page(folder: RunFolder, scores: Sequence[Score] | None = None, for_phones: bool = True) -> dict[str, Any]:
    """Everything the template needs; see `moebench.report.html.write_report`."""
    with drawing(for_phones):
        every = scoreboard(folder.suite, folder) if scores is None else scores
        return _page(folder, *asked_for(every, folder), for_phones)


def _page(folder: RunFolder, scores: list[Score], others: str, for_phones: bool) -> dict[str, Any]:
    suite, record = folder.suite, folder.record
    frame = printable(table(folder, *METRICS, with_samples=False))
    lines = {plain(case): span for case, span in places(folder.results).items()}
    obtained = {score.claim.id: score.found for score in scores if score.found is not None}
    defaults = {name: found.conditions[0] for name, found in obtained.items()}
    present = set(frame["experiment"])
    shown = [e for e in suite.experiments if e.name in present]
    sections = [partial(kinds.of(e.kind, "view"), folder, e, frame, scores) for e in shown]
    a_map = partial(the_map, scores, obtained, _Draws(folder), _parameters(folder))
    longest = [place for kind in LONGEST for place, e in enumerate(shown) if e.kind == kind]
    *experiments, drawn_map = side_by_side([*sections, a_map], longest)
    for experiment in experiments:
        experiment["cases"] = with_lines(experiment["cases"], lines)
    cards = [
        card(score, defaults.get(score.claim.id))
        for score in scores
        if score.verdict != NOT_RUN or score.obtained is not None
    ]
    topologies = folder.topologies
    return {
        "title": suite.title,
        "suite": suite.name,
        "created": record["created"].replace("T", " "),
        "headline": suite.title,
        "has_claims": bool(scores),
        "lead": _lead(scores, others, frame, record),
        "findings": [_titled(e["title"], e["answer"]) for e in experiments if e["answer"]],
        "facts": facts_text(scores),
        "counts": counts_table(scores, {e.name: e.title for e in suite.experiments}),
        "scoreboard": score_table(scores, defaults),
        "claims": cards,
        "anchors": {
            **anchors_of(experiment["cases"] for experiment in experiments),
            **{experiment_key(experiment["name"]): f"experiment-{experiment['name']}" for experiment in experiments},
            **{claim_key(score): "not-run" for score in scores},
            **{claim_key(score): f"claim-{score.claim.id}" for score in scores if score.obtained is not None},
        },
        "not_run": not_run_table(scores),
        "map": drawn_map,
        "experiments": experiments,
        "machines_sentence": machines_sentence(topologies.values()),
        "rests": rests_table(scores),
        "machines": machine_tables(topologies.values()),
        "reading": [
            *READING,
            *(ENGINES[name] for name in ENGINES if name in set(frame["engine"])),
            *([] if for_phones else [ONCE]),
        ],
        "command": record["environment"]["command"],
        "environment": _environment(record),
        "version": moebench.__version__,
        "schema_version": SCHEMA_VERSION,
    }


def _titled(title: str, answer: str) -> str:
    """What came out of an experiment, where others stand beside it."""
    return answer if answer.startswith(title) else f"{title}: {answer}"


def _lead(scores: list[Score], others: str, frame: Any, record: dict) -> list[str]:
    """What came out, in two sentences, and what did not come out at all."""
    cases = frame["case"].nunique()
    state = "" if record["finished"] else f" This run is unfinished: {cases} of {record['cases']} cases."
    bad = frame[frame["status"].isin(["wrong", "failed"])]
    reasons = bad.groupby("system", observed=True)["reason"].first().items()
    trouble = [f"{name} has no number: {reason}." for name, reason in reasons]
    told = score_sentence(scores) if scores or not others else "No claim of the paper is about what was run."
    told = f"{told} {others}." if others else told
    return [f"{told} {cases:,} cases.{state}", *trouble]


class _Draws:
    """The values that each parameter of some topologies took, draw by draw."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    def __call__(self, topologies: tuple[str, ...]) -> dict[str, Any]:
        from moebench.sim.uncertainty import draw

        suite = self._folder.suite
        return draw(_parameters(self._folder)(topologies), suite.samples, suite.seed)


def _parameters(folder: RunFolder) -> Any:
    """Every parameter of some topologies, in the first one that has it."""

    def of(names: tuple[str, ...]) -> dict[str, Parameter]:
        found: dict[str, Parameter] = {}
        for name in names:
            found = (folder.topologies[name].parameters() if name in folder.topologies else {}) | found
        return found

    return of


def _environment(record: dict) -> Table:
    environment = record["environment"]
    git = environment.get("git")
    rows = [
        ["moebench", environment["moebench"] + (f", commit {git['commit'][:12]}" if git else "")
         + (" with uncommitted changes" if git and git["changed"] else "")],
        ["run", f"{record['cases']:,} cases, started {record['created']}, "
                + (f"finished {record['finished']}" if record["finished"] else "not finished")],
        ["engine", f"{record['engine']} asked for"],
        ["system", f"{environment['system']} on {environment['machine']}, Python {environment['python']}"],
        ["processor", f"{environment['cpu'] or 'unknown'}, {environment['cores']} cores"],
        ["memory", size(environment["memory_bytes"]) if environment["memory_bytes"] else "unknown"],
        ["GPUs", ", ".join(environment["gpus"]) or "none"],
        ["packages", ", ".join(f"{name} {v}" for name, v in environment["packages"].items() if v)],
        ["seed", str(environment["seed"])],
    ]  # fmt: skip
    return Table(["what", "value"], rows, "Environment of the run")
