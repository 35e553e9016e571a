"""Many runs, one value of each quantity: read fast, because a history is long and most of every run is not asked for.

A run's file is searched for the rows of a few metrics; their samples and draws are never parsed. A run that can't be
read is left out with its reason, so that one damaged folder hides no history.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from moebench.compare.escape import plain
from moebench.compare.machine import machine_of
from moebench.compare.metrics import DECIDED, DERIVED, is_exact
from moebench.compare.read import read_json
from moebench.compare.read_pytest import METRIC, is_pytest, read_pytest
from moebench.compare.read_run import commit_of, part_of, torch_version, what_if
from moebench.compare.side import MEASURED_ENGINES, CaseInfo, Key
from moebench.results import lines
from moebench.results.rows import CPU_BOUND, TIMES, problem
from moebench.results.store import RESULTS_FILE, RUN_FILE
from moebench.workloads.errors import InputError

METRICS = (*TIMES, METRIC)

_SAMPLE = re.compile(rb'"sample"\s*:\s*\d')
_DRAWS = re.compile(rb'"draws"\s*:\s*\[[^\]]*\]\s*,?')
_TRAILING_COMMA = re.compile(rb",\s*}\s*$")


@dataclass(frozen=True, slots=True)
class Point:
    """The value of one quantity in one run."""

    value: float
    run: int
    case: CaseInfo


@dataclass
class Series:
    """One quantity over time; of a measured one all points are of one machine."""

    suite: str
    key: Key
    machine: str
    unit: str
    points: list[Point] = field(default_factory=list)

    @property
    def is_measured(self) -> bool:
        """Whether a clock gave the values."""
        return not is_exact(self.key.engine, self.key.metric)

    @property
    def values(self) -> np.ndarray:
        """The values, oldest first."""
        return np.array([point.value for point in self.points])


@dataclass(frozen=True, slots=True)
class RunPoint:
    """When and of what code a run was.

    Attributes:
        suite, machine: what was run, and where; cases: how many were planned.
        path: of its folder, None for a file of pytest-benchmark. finished: whether all its cases have rows.
    """

    name: str
    created: str
    commit: str
    suite: str = ""
    machine: str = ""
    cases: int = 0
    path: Path | None = None
    finished: bool = True


@dataclass
class History:
    """All runs of a folder, oldest first, and the series of their values.

    Attributes:
        others: runs that have no part in it: not finished, what-ifs (--set), or without values of the metrics.
        left_out: why a run could not be read.
    """

    runs: list[RunPoint] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    others: list[RunPoint] = field(default_factory=list)


@dataclass(frozen=True)
class _Found:
    """The values of one run."""

    run: RunPoint
    time: float
    suite: str
    values: list[tuple[Key, str, str, float, CaseInfo]]  # key, machine, unit, value, case


def read_history(base: Path, metrics: Sequence[str] = (), since: str = "", last: int | None = None) -> History:
    """The history of a folder: its run folders, and files of pytest-benchmark.

    Args:
        metrics: which; default the times.
        since: leave out what was run before this date; last: and all but so many runs.

    Raises:
        InputError: there is no such folder, nothing in it can be read, or `since` is no date.
    """
    history = read_runs(base, metrics, since, last)
    if not history.runs:
        why = f"; left out: {history.left_out[0]}" if history.left_out else ""
        raise InputError(f"{base}: no finished run with values of {', '.join(metrics or METRICS)}{why}")
    return history


def read_runs(base: Path, metrics: Sequence[str] = (), since: str = "", last: int | None = None) -> History:
    """The same, whether or not there is any run with values.

    Raises:
        InputError: there is no such folder, or `since` is no date.
    """
    if not base.is_dir():
        raise InputError(f"{base}: no such folder")
    for name in set(metrics) & set(DERIVED):
        raise InputError(f"--metric {name}: follows from the times; look at {', '.join(TIMES)}")
    for name in set(metrics) & set(DECIDED):
        raise InputError(f"--metric {name}: more of it is neither better nor worse")
    first = _time(since, f"--since {since}") if since else None
    history = History()
    found: list[_Found] = []
    for path in _candidates(base):
        try:
            one = _run(path, metrics or METRICS) if path.name == RUN_FILE else _pytest(path)
        except InputError as error:
            history.left_out.append(plain(str(error), 400))
            continue
        if one is not None and (first is None or one.time >= first):
            found.append(one)
    found.sort(key=lambda one: (one.time, one.run.name))
    kept = [one for one in found if one.values][-(last or 0) :]
    history.others = [one.run for one in found if not one.values and not (last and kept and one.time < kept[0].time)]
    _fill(history, kept)
    return history


def _candidates(base: Path) -> Iterator[Path]:
    """Files that may stand for a run."""
    runs = sorted(base.glob(f"*/{RUN_FILE}"))
    yield from runs
    inside = {path.parent for path in runs}
    for path in sorted(base.rglob("*.json")):
        if not inside & set(path.parents):
            yield path


def _fill(history: History, found: Sequence[_Found]) -> None:
    series: dict[tuple[str, Key, str], Series] = {}
    for number, one in enumerate(found):
        history.runs.append(one.run)
        for key, machine, unit, value, case in one.values:
            own = series.setdefault((one.suite, key, machine), Series(one.suite, key, machine, unit))
            if own.unit == unit:
                own.points.append(Point(value, number, case))
    history.series = list(series.values())


def _run(file: Path, metrics: Sequence[str]) -> _Found | None:
    """The values of a run folder; none where it is not finished, or a what-if."""
    record = read_json(file)
    lines.check_version(record.get("schema_version") if isinstance(record, dict) else None, file)
    try:
        environment, suite = record["environment"], plain(str(record["suite"]["name"]))
        digests = {name: str(part.get("digest") or "") for name, part in record["topologies"].items()}
        machine, torch = machine_of(environment).title, torch_version(environment)
        run = RunPoint(
            plain(str(file.parent)), plain(str(record["created"]), 60), commit_of(environment), suite, machine,
            int(record["cases"]), file.parent, record["finished"] is not None,
        )  # fmt: skip
        time = _time(str(record["created"]), f"{file}: created")
        cost_model, changed = environment.get("cost_model"), what_if(record)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file}: not what moebench writes: {error}") from None
    if not run.finished or changed:
        return _Found(run, time, suite, [])
    values: dict[Key, tuple[Key, str, str, float, CaseInfo]] = {}
    for item in _rows(file.parent / RESULTS_FILE, metrics):
        detail, engine = item.get("detail", {}), plain(item["engine"])
        if item["value"] is None or detail.get("mark") == CPU_BOUND:
            continue
        key = Key(plain(item["case"]), engine, plain(item["metric"]), part_of(detail))
        digest = digests.get(item["topology"], "")[:12] or None
        case = CaseInfo(plain(item["case_hash"]), torch, cost_model, digest)
        where = machine if engine in MEASURED_ENGINES and not is_exact(engine, item["metric"]) else ""
        values.setdefault(key, (key, where, item.get("unit", ""), item["value"], case))
    return _Found(run, time, suite, list(values.values()))


def _rows(file: Path, metrics: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Rows of some metrics that are no samples, without their draws, of the whole cases."""
    names = b"|".join(re.escape(json.dumps(metric)[1:-1].encode()) for metric in metrics)
    wanted = re.compile(rb'"metric"\s*:\s*"(?:' + names + rb')"')
    data = lines.read(file)
    whole = lines.whole_bytes(data, file)
    end = 0
    for match in wanted.finditer(data, 0, whole):
        if match.start() < end:
            continue  # a second match in the same line
        begin = data.rfind(b"\n", 0, match.start()) + 1
        end = data.find(b"\n", match.start())
        end = whole if end < 0 else end
        line = data[begin:end]
        if _SAMPLE.search(line):
            continue
        yield _row(_TRAILING_COMMA.sub(b"}", _DRAWS.sub(b"", line)), f"{file}, at byte {begin}")


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not a JSON object: {error}") from None
    if not isinstance(item, dict):
        raise InputError(f"{where}: not a JSON object")
    lines.check_version(item.pop("schema_version", None), where)
    item.pop("last", None)
    found = problem(item)
    if found:
        raise InputError(f"{where}: {found}")
    return item


def _pytest(file: Path) -> _Found | None:
    """The values of one file of pytest-benchmark; None where it is something else."""
    document = read_json(file)
    if not is_pytest(document):
        return None
    side = read_pytest(str(file), {file: document})
    machine = side.machine.title if side.machine else ""
    values = []
    for key, samples in side.samples.items():
        if samples.processes and not samples.problem:
            value = float(np.median(np.concatenate(samples.processes)))
            values.append((key, machine, samples.unit, value, side.cases[key[:2]]))
    run = RunPoint(side.name, side.created, side.commit, side.suite, machine, len(side.cases))
    return _Found(run, _time(side.created, f"{file}: datetime"), side.suite, values)


def _time(text: str, where: str) -> float:
    """Seconds of an ISO date, taken as UTC where it names no zone."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InputError(f"{where}: {text!r} is not a date such as 2026-11-30") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
