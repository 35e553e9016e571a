"""Baselines: values that somebody accepted, as JSON files made for git (sorted keys, a line a value).

A baseline is a folder. `exact.json` holds what is the same on every machine, for all cases; `samples-<machine>.json`
the samples of the last runs accepted on one machine. A run is compared with the samples of its own machine only.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moebench.compare.escape import plain
from moebench.compare.machine import slug_of
from moebench.compare.read import read_json
from moebench.compare.side import CaseInfo, Exact, Key, Machine, Samples, Side
from moebench.results.store import storage, write_atomically
from moebench.workloads.errors import InputError, one_of

SCHEMA_VERSION = 1
EXACT_FILE, SAMPLES_FILE = "exact.json", "samples-{}.json"
_SEPARATOR = " | "  # between metric and part in the files


def folder_of(base: Path, name: str) -> Path:
    """Where a baseline of a name lies.

    Raises:
        InputError: the name is no plain file name.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name):
        raise InputError(f"baseline {plain(name)!r}: a name is one word, such as main or release-2")
    return base / name


def read_baseline(base: Path, name: str, machine: Machine | None) -> Side:
    """A baseline with the samples of one machine, if it has them.

    Raises:
        InputError: there is none of that name, or a file of it is damaged.
    """
    folder = folder_of(base, name)
    if not (folder / EXACT_FILE).is_file():
        there = sorted(path.parent.name for path in base.glob(f"*/{EXACT_FILE}"))
        raise one_of("baseline", name, there, f"{base}")
    document = _document(folder / EXACT_FILE)
    side = Side(f"baseline {name}", document["suite"], document["created"], document["commit"])
    _read_cases(side, document["cases"])
    if machine is not None:
        file = folder / SAMPLES_FILE.format(slug_of(machine))
        if file.is_file():
            side.machine = machine
            _read_samples(side, _document(file))
    return side


def machines_of(base: Path, name: str) -> list[Machine]:
    """The machines that a baseline has samples of."""
    files = sorted(folder_of(base, name).glob(SAMPLES_FILE.format("*")))
    return [Machine(_document(file)["machine"]) for file in files]


def write_baseline(base: Path, name: str, exact: Side, pool: Mapping[str, Any] | None, machine: Machine | None) -> None:
    """Replace the files of a baseline.

    Args:
        exact: cases and exact values; pool: the document of a machine's samples, or None to leave them.

    Raises:
        StorageError: the folder can't be written.
    """
    folder = folder_of(base, name)
    with storage(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / EXACT_FILE, text_of(_exact_document(name, exact)))
        if pool is not None and machine is not None:
            write_atomically(folder / SAMPLES_FILE.format(slug_of(machine)), text_of(pool))


def _exact_document(name: str, side: Side) -> dict[str, Any]:
    cases: dict[str, dict[str, Any]] = {}
    for (case, engine), info in side.cases.items():
        facts: dict[str, Any] = {"hash": info.hash, "status": info.status, "reason": info.reason, "torch": info.torch}
        facts |= {"cost_model": info.cost_model, "machine": info.machine, "what_if": info.what_if}
        said = {name: fact for name, fact in facts.items() if name == "hash" or fact not in (None, "")}
        cases.setdefault(case, {})[engine] = {"of": said}
    for key, exact in side.exact.items():
        cases[key.case][key.engine][name_of(key)] = [exact.value, exact.unit]
    return {
        "schema_version": SCHEMA_VERSION,
        "baseline": name,
        "suite": side.suite,
        "created": side.created,
        "commit": side.commit,
        "cases": cases,
    }


def samples_document(machine: Machine, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The document of a machine's samples; each run as `run_document` gives it."""
    return {"schema_version": SCHEMA_VERSION, "machine": dict(machine.facts), "runs": runs}


def run_document(side: Side, keep: Mapping[Key, Samples]) -> dict[str, Any]:
    """One run of the pool."""
    cases: dict[str, Any] = {}
    for key, samples in keep.items():
        cases.setdefault(key.case, {}).setdefault(key.engine, {})[name_of(key)] = {
            "clock_mhz": samples.clock_mhz,
            "hash": side.cases[key[:2]].hash,
            "samples": [[float(f"{value:.6g}") for value in group] for group in samples.processes],
            "unit": samples.unit,
        }
    return {"cases": cases, "commit": side.commit, "created": side.created}


def quantities(run: Mapping[str, Any]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Every quantity of a run of the pool."""
    for case, engines in run["cases"].items():
        for engine, values in engines.items():
            for name, quantity in values.items():
                yield key_of(case, engine, name), quantity


def without(run: Mapping[str, Any], changed: Collection[Key]) -> dict[str, Any]:
    """The cases of a run of the pool that are left when some quantities go."""
    kept: dict[str, Any] = {}
    for key, quantity in quantities(run):
        if key not in changed:
            kept.setdefault(key.case, {}).setdefault(key.engine, {})[name_of(key)] = quantity
    return kept


def pool_of(base: Path, name: str, machine: Machine) -> list[dict[str, Any]]:
    """The runs whose samples a baseline holds for a machine."""
    file = folder_of(base, name) / SAMPLES_FILE.format(slug_of(machine))
    return _document(file)["runs"] if file.is_file() else []


def name_of(key: Key) -> str:
    """Metric and part, as the files write it."""
    return key.metric + (_SEPARATOR + key.part if key.part else "")


def key_of(case: str, engine: str, name: str) -> Key:
    """The key of a value under its case and engine."""
    metric, _, part = name.partition(_SEPARATOR)
    return Key(case, engine, metric, part)


def text_of(document: Any) -> str:
    """JSON with sorted keys, a line a value or a list of numbers."""
    return "".join(_lines(document, "")) + "\n"


def _lines(value: Any, indent: str) -> list[str]:
    """Pieces of text: objects and lists of lists go over several lines, everything else stays on one."""
    inner = indent + " "
    if isinstance(value, Mapping) and value:
        parts = [f"{inner}{json.dumps(str(k))}: {''.join(_lines(value[k], inner))}" for k in sorted(value)]
        return ["{\n", ",\n".join(parts), f"\n{indent}}}"]
    if isinstance(value, list) and value and isinstance(value[0], list | Mapping):
        return ["[\n", ",\n".join(inner + "".join(_lines(item, inner)) for item in value), f"\n{indent}]"]
    return [json.dumps(value, allow_nan=False)]


def _document(file: Path) -> dict[str, Any]:
    """A checked document of a baseline."""
    document = read_json(file)
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise InputError(f"{file}: schema_version {version!r} is unknown; this moebench reads {SCHEMA_VERSION}")
    assert isinstance(document, dict)
    needed = {"suite": str, "created": str, "commit": str, "cases": dict}
    if file.name != EXACT_FILE:
        needed = {"machine": dict, "runs": list}
    for key, kind in needed.items():
        if not isinstance(document.get(key), kind):
            raise InputError(f"{file}: {key} is missing, or not of type {kind.__name__}")
    try:
        (_check_cases if file.name == EXACT_FILE else _check_runs)(document)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{file}: not what `moebench accept` wrote: {error}") from None
    return document


def _check_cases(document: dict[str, Any]) -> None:
    for case, engines in document["cases"].items():
        for engine, values in engines.items():
            info = _info(values["of"])
            if not isinstance(info.hash, str) or not isinstance(info.status, str):
                raise ValueError(f"case {case} under {engine}: of")
            for name, pair in values.items():
                if name != "of" and not _is_exact(pair):
                    raise ValueError(f"case {case} under {engine}: {name} is {pair!r}")


def _is_exact(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], str) and _is_finite(pair[0])


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _check_runs(document: dict[str, Any]) -> None:
    if not all(isinstance(text, str) for text in document["machine"].values()):
        raise ValueError("machine")
    for run in document["runs"]:
        for key, quantity in quantities(run):
            groups, clock = quantity["samples"], quantity["clock_mhz"]
            if not (clock is None or _is_finite(clock)) or not isinstance(quantity["unit"], str):
                raise ValueError(f"{key.case}: {key.metric}: unit or clock_mhz")
            if not isinstance(quantity["hash"], str) or not all(_is_finite(v) for group in groups for v in group):
                raise ValueError(f"{key.case}: {key.metric}: hash or samples")


def _info(of: Mapping[str, Any]) -> CaseInfo:
    return CaseInfo(**of)


def _read_cases(side: Side, cases: Mapping[str, Any]) -> None:
    for case, engines in cases.items():
        for engine, values in engines.items():
            side.cases[case, engine] = _info(values["of"])
            for name, pair in values.items():
                if name != "of":
                    side.exact[key_of(case, engine, name)] = Exact(float(pair[0]), pair[1])


def _read_samples(side: Side, document: Mapping[str, Any]) -> None:
    """Pool the runs: of a quantity those whose case is what it is now."""
    found: dict[Key, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, run in enumerate(document["runs"]):
        for key, quantity in quantities(run):
            case = side.cases.get(key[:2])
            if case is not None and case.hash == quantity["hash"]:
                found.setdefault(key, []).append((number, quantity))
    for key, runs in found.items():
        groups = [(number, np.asarray(group, dtype=float)) for number, q in runs for group in q["samples"] if group]
        clocks = [q["clock_mhz"] for _, q in runs if q["clock_mhz"]]
        side.samples[key] = Samples(
            runs[-1][1]["unit"], tuple(group for _, group in groups), tuple(number for number, _ in groups),
            float(np.median(clocks)) if clocks else None,
        )  # fmt: skip
