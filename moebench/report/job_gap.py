"""What is missing of a reported step time: which part would have to take longer, and what other claims say of products.

Where a paper prints how long products took on a kind of GPU, in whichever experiment, that factor is asked of the steps
of the same system on the same kind: what would they take if their products did so? Nothing is fitted.
"""

from collections.abc import Sequence

import pandas as pd

from moebench.claims.evidence import Evidence
from moebench.claims.job_query import obtain
from moebench.claims.reported import UNITS
from moebench.claims.scope import CantAnswer
from moebench.claims.scoreboard import Score
from moebench.report.parts import Table, number, percent, times
from moebench.results.store import RunFolder
from moebench.workloads.suite import JobExperiment

PARTS = ("attention_and_gemm", "exposed_comm", "other")
STEP, PRODUCTS, SLOWER = "iteration_time", "attention_and_gemm", "iteration_time_slower_products"


def gap_tables(
    folder: RunFolder, experiment: JobExperiment, own: pd.DataFrame, scores: Sequence[Score]
) -> list[Table]:
    """Tables of the experiment's reported step times; none without any."""
    found = [one for one in (_step(folder, experiment, own, score) for score in scores) if one is not None]
    return [*_alone(found, own), *_products(found, own, _factors(folder, scores))] if found else []


class _Step:
    """A reported step time with the case that stands for it."""

    def __init__(self, score: Score, case: str, own: pd.DataFrame) -> None:
        self.claim, self.case = score.claim, case
        self.node_type = str(own[own["case"] == case]["topology"].iloc[0]).partition("-")[2]
        assert not isinstance(self.claim.value, str)
        self.reported_s = self.claim.value * UNITS[self.claim.unit][1]


def _step(folder: RunFolder, experiment: JobExperiment, own: pd.DataFrame, score: Score) -> _Step | None:
    claim = score.claim
    is_time = claim.metric == STEP and claim.experiment == experiment.name
    if not is_time or score.obtained is None or isinstance(claim.value, str):
        return None
    return _Step(score, obtain(claim, folder.suite, Evidence.of(folder)).conditions[0].cases[0], own)


def _alone(steps: Sequence[_Step], own: pd.DataFrame) -> list[Table]:
    """How many times as long each part of a step would have to take, alone, for the reported time."""
    values = {name: by_case(own, name) for name in (*PARTS, STEP)}
    rows = []
    for one in steps:
        found = {name: values[name].get(one.case) for name in (*PARTS, STEP)}
        if any(value is None or pd.isna(value) for value in found.values()):
            continue
        step_s = float(found[STEP] or 0.0)
        factors = [_factor(float(found[name] or 0.0), one.reported_s - step_s) for name in PARTS]
        rows.append([one.claim.id, one.case, number(one.reported_s), number(step_s), *factors])
    headings = ["reported, s", "obtained, s", "products", "exposed", "other"]
    title = "For the reported time, one part alone would have to take so many times as long"
    return [Table(["number", "case", *headings], rows, title, frozenset(headings))] if rows else []


def _products(
    steps: Sequence[_Step], own: pd.DataFrame, factors: dict[tuple[str, str], tuple[float, str]]
) -> list[Table]:
    """What the steps would take with products as long as another claim has them; replayed, and in proportion."""
    now, slower, scale = by_case(own, STEP), by_case(own, SLOWER, whole=False), _scale(own)
    rows = []
    for one in steps:
        factor, source = factors.get((one.claim.system, one.node_type), (0.0, ""))
        if not factor or one.case not in slower or one.case not in now:
            continue
        what_if_s = now[one.case] + (factor - 1) / (scale - 1) * (slower[one.case] - now[one.case])
        gaps = [percent(abs(value / one.reported_s - 1)) for value in (now[one.case], what_if_s)]
        seconds = map(number, (one.reported_s, now[one.case], what_if_s))
        rows.append([one.claim.id, times(factor), source, *seconds, *gaps])
    headings = ["products longer", "reported, s", "obtained, s", "if so, s", "off", "off if so"]
    title = "What if products took as long as the paper measured them on the same kind of GPU"
    columns = ["number", headings[0], "measured in", *headings[1:]]
    return [Table(columns, rows, title, frozenset(headings))] if rows else []


def _factors(folder: RunFolder, scores: Sequence[Score]) -> dict[tuple[str, str], tuple[float, str]]:
    """By system and node type, how many times as long as here a paper's products took, and the number that says so."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for score in scores:
        claim, ours = score.claim, score.obtained
        if claim.metric != PRODUCTS or not isinstance(ours, float) or isinstance(claim.value, str):
            continue
        try:
            (topology, *others) = obtain(claim, folder.suite, Evidence.of(folder)).conditions[0].topologies
        except CantAnswer:
            continue
        if not others:
            found.setdefault((claim.system, topology.partition("-")[2]), (claim.value / ours, claim.id))
    return found


def by_case(own: pd.DataFrame, metric: str, whole: bool = True) -> dict[str, float]:
    """A metric's values.

    Args:
        whole: of the rows without a detail.
    """
    part = own[own["metric"] == metric]
    if whole and "detail" in part:
        part = part[part["detail"].map(lambda detail: not detail).astype(bool)]
    return dict(zip(part["case"].astype(str), part["value"]))


def _scale(own: pd.DataFrame) -> float:
    """How many times as long products take in the rows that say what a step is then."""
    part = own[own["metric"] == SLOWER]
    return float(part["detail"].iloc[0]["times"]) if len(part) else 1.0


def _factor(part_s: float, missing_s: float) -> str:
    """What a part of a step is to be multiplied with to add so much."""
    if part_s <= 0 or part_s + missing_s <= 0:
        return "–"
    return times(1 + missing_s / part_s)
