"""What a run would do: expected time and memory of its cases, from a few of them tried in `sim` for a few seconds.

Nothing is written and nothing is measured; a case whose program was not among those tried shows no memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from moebench import kinds
from moebench.cases.case import Case
from moebench.cases.gates import ENGINE as COUNT
from moebench.environment import usable_cores
from moebench.results.rows import Row
from moebench.run import Plan

BUDGET_S = 6.0
LONGEST_S = 18.0  # until each system has been tried once
PROCESS_START_S = 4.0  # of a measuring process: torch's import and the warm-up


@dataclass(frozen=True)
class Estimate:
    """What is expected of one case.

    Attributes:
        time_s: of this machine's time, its share of the processes that run side by side included.
        memory_bytes: peak of a rank; status: `passed`, `out-of-memory`, `unsupported`, or empty where not tried.
    """

    case: Case
    time_s: float | None
    memory_bytes: float | None
    status: str


def estimates(ready: Plan, budget_s: float = BUDGET_S) -> list[Estimate]:
    """An estimate a case, in the plan's order."""
    tried, trace_s, replay_s = _pilot(ready, budget_s)
    mean_s = sum(trace_s.values()) / len(trace_s) if trace_s else 0.0
    cores = usable_cores()
    found, traced = [], set()
    for case in ready.cases:
        key = _program(case, ready)
        memory, step_s, status = tried.get(key, (None, None, ""))
        time_s: float | None = None
        if not _is_tried(case):
            time_s, status = kinds.of(case.workload.kind, "counting")(case)
        elif case.engine != "sim":
            time_s = None if step_s is None else _measuring_s(step_s, case)
        else:
            once_s = 0.0 if key in traced else trace_s.get(_stem(case), mean_s)
            time_s = (replay_s + once_s) / cores if trace_s else None
            traced.add(key)
        found.append(Estimate(case, time_s, memory, status))
    return found


def _pilot(ready: Plan, budget_s: float) -> tuple[dict, dict[str, float], float]:
    """Memory, step time and status of the programs tried; time of a trace with its replay by system without options,
    and of a replay alone.
    """
    tried: dict[tuple, tuple[float | None, float | None, str]] = {}
    spent: dict[str, list[float]] = {}
    replay_s = 0.0
    started = perf_counter()
    for case in _in_turn(ready.cases):
        key, stem, passed_s = _program(case, ready), _stem(case), perf_counter() - started
        if key in tried:
            continue
        if tried and passed_s > (budget_s if stem in spent else max(budget_s, LONGEST_S)):
            break
        rows, once_s = _simulated([case], ready)
        if len(tried) == 1:
            replay_s = max(0.0, _simulated([case, case], ready)[1] - once_s)
        spent.setdefault(stem, []).append(once_s)
        values = {row.metric: row.value for row in rows if not row.detail}
        status = next((row.status for row in rows if row.status != "passed"), "passed")
        tried[key] = (values.get("peak_memory"), values.get(case.workload.metric), status)
    later = {stem: (times[1:] or times) for stem, times in spent.items()}  # the first one also imports
    return tried, {stem: sum(times) / len(times) for stem, times in later.items()}, replay_s


def _in_turn(cases: Sequence[Case]) -> list[Case]:
    """Those that can be tried, one of every system in front: a paper's own, which stands first, may take longest."""
    able = [case for case in cases if _is_tried(case)]
    first: dict[str, Case] = {}
    for case in able:
        first.setdefault(_stem(case), case)
    return [*reversed(first.values()), *able]


def _is_tried(case: Case) -> bool:
    """Whether one program tells how long a case takes."""
    return case.engine != COUNT and bool(kinds.KINDS[case.workload.kind].programs)


def _stem(case: Case) -> str:
    """The system without its options."""
    return case.system.partition("+")[0]


def _simulated(cases: Sequence[Case], ready: Plan) -> tuple[list[Row], float]:
    """Rows of the last of `cases`, and how long all took."""
    from moebench.sim.engine import run_cases

    begun = perf_counter()
    rows: list[Row] = []
    for part in run_cases(cases, ready.topologies, ready.suite, 1):
        rows = part
    return rows, perf_counter() - begun


def _program(case: Case, ready: Plan) -> tuple:
    return (case.system, case.workload, ready.topologies[case.topology].ranks, case.conventions)


def _measuring_s(step_s: float, case: Case) -> float:
    if case.engine == "cluster":
        from moebench.cluster.engine import measuring_s

        return measuring_s(step_s)
    from moebench.local.engine import BLOCKS, POINTS_A_PROCESS, PROCESSES

    start_s = PROCESS_START_S / (POINTS_A_PROCESS if case.workload.issued_ahead else 1)
    return PROCESSES * (start_s + 2 * BLOCKS * step_s)


def total_s(found: Sequence[Estimate]) -> float | None:
    """Expected time of the whole run; None where nothing is known."""
    known = [e.time_s for e in found if e.time_s is not None]
    return sum(known) * len(found) / len(known) if known else None
