"""Files that pytest-benchmark saved as one side of a comparison.

One file is one process. A folder of files is one run of several processes: `pytest --benchmark-autosave` twice.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moebench.compare.escape import plain
from moebench.compare.machine import machine_of_pytest
from moebench.compare.side import PYTEST, CaseInfo, Key, Machine, Side, samples_of
from moebench.workloads.errors import InputError

METRIC = "time"


def is_pytest(document: Any) -> bool:
    """Whether a JSON document is what pytest-benchmark saves."""
    return isinstance(document, dict) and "benchmarks" in document and "machine_info" in document


def read_pytest(name: str, documents: Mapping[Path, Any]) -> Side:
    """The benchmarks of some files, each file a process of one run.

    Raises:
        InputError: a file is not what pytest-benchmark writes, or the files come from different machines.
    """
    side = Side(plain(name), PYTEST)
    timed: dict[str, list[list[float]]] = {}
    machines: dict[Path, Machine] = {}
    for path, document in documents.items():
        info = document["machine_info"]
        machines[path] = machine_of_pytest(info if isinstance(info, Mapping) else {})
        for case, values in _benchmarks(path, document["benchmarks"]):
            timed.setdefault(case, []).append(values)
    kinds = {json.dumps(machine.facts, sort_keys=True) for machine in machines.values()}
    if len(kinds) > 1:
        raise InputError(f"{name}: its files come from different machines; give one machine's")
    last = max(documents.values(), key=lambda document: str(document.get("datetime", "")))
    side.machine = next(iter(machines.values()))
    side.created, side.commit = plain(str(last.get("datetime", "")), 60), _commit(last.get("commit_info"))
    for case, processes in timed.items():
        side.cases[case, PYTEST] = CaseInfo("")
        problem = "" if all(processes) else "no samples are kept: save them with --benchmark-save-data"
        side.samples[Key(case, PYTEST, METRIC)] = samples_of("s", processes, problem=problem)
    return side


def _benchmarks(path: Path, benchmarks: Any) -> list[tuple[str, list[float]]]:
    """Name and samples of each; a name that stands there twice is an error."""
    if not isinstance(benchmarks, Sequence) or isinstance(benchmarks, str):
        raise InputError(f"{path}: benchmarks is not a list")
    found: dict[str, list[float]] = {}
    for index, item in enumerate(benchmarks):
        where = f"{path}: benchmarks[{index}]"
        if not isinstance(item, Mapping):
            raise InputError(f"{where}: not an object")
        name = item.get("fullname") or item.get("name")
        stats = item.get("stats")
        if not isinstance(name, str) or not isinstance(stats, Mapping):
            raise InputError(f"{where}: missing {'stats' if isinstance(name, str) else 'fullname'}")
        data = stats.get("data") or []
        if not isinstance(data, list) or not all(_is_number(value) for value in data):
            raise InputError(f"{where}: stats.data holds something else than numbers")
        if plain(name) in found:
            raise InputError(f"{where}: the name {plain(name)} stands there a second time")
        found[plain(name)] = [float(value) if abs(value) < 1e300 else math.inf for value in data]
    return list(found.items())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _commit(info: Any) -> str:
    if not isinstance(info, Mapping) or not info.get("id"):
        return ""
    return plain(str(info["id"]), 60) + ("+" if info.get("dirty") else "")
