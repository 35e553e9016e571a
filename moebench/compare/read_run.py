"""A run folder of moebench as one side of a comparison."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moebench.compare.escape import plain
from moebench.compare.machine import machine_of, versions_of
from moebench.compare.metrics import NOT_COMPARED, is_exact
from moebench.compare.side import MEASURED_ENGINES, PARTS, CaseInfo, Exact, Key, Side, samples_of
from moebench.local.throttle import THROTTLED
from moebench.results import lines
from moebench.results.rows import CPU_BOUND
from moebench.results.store import RunFolder

CLOCK, MOST_CLOCK_MHZ = "sm_clock_mhz", 1e6


def read_run(path: Path) -> Side:
    """The whole cases of a run.

    Raises:
        InputError: no run, or not what moebench wrote; names file, line and key.
    """
    folder = RunFolder.open(path)
    record = folder.record
    side = empty_side(plain(str(path)), record)
    reader = _Reader(side, record)
    for number, item in lines.objects(folder.results):
        reader.take(item, number)
    reader.finish()
    side.path = path
    if any(engine in MEASURED_ENGINES for _, engine in side.cases):
        side.machine = machine_of(record["environment"])
    return side


def empty_side(name: str, record: Mapping[str, Any]) -> Side:
    """What run.json says, without any value."""
    environment, filters = record["environment"], record["filters"]
    return Side(
        name,
        plain(str(record["suite"]["name"])),
        created=str(record["created"]),
        commit=commit_of(environment),
        finished=record["finished"] is not None,
        whole=not any(filters.values()),
        environment=versions_of(environment),
        what_if=what_if(record),
    )


def what_if(record: Mapping[str, Any]) -> str:
    """What --set made of the machine, as it was written; what an emulated network was really given is no what-if."""
    if record["engine"] == "cluster":
        return ""
    overrides = record["filters"].get("overrides") or {}
    return plain(", ".join(f"{name}={text}" for name, text in overrides.items()), 200)


def commit_of(environment: Mapping[str, Any]) -> str:
    """The commit of the code that ran, with `+` where files were changed since; empty where nobody knows."""
    git = environment.get("git") or {}
    commit = plain(str(git.get("commit") or ""), 60)
    return f"{commit}+" if commit and git.get("changed") else commit


def torch_version(environment: Mapping[str, Any]) -> str | None:
    """The version without its build: the CPU's and a GPU's trace the same operators."""
    version = (environment.get("packages") or {}).get("torch")
    return plain(str(version), 40).partition("+")[0] if version else None


class _Reader:
    """Sorts rows into exact values and samples."""

    def __init__(self, side: Side, record: Mapping[str, Any]) -> None:
        environment = record["environment"]
        self.side = side
        self.torch, self.cost_model = torch_version(environment), environment.get("cost_model")
        self.digests = {name: str(part.get("digest") or "") for name, part in record["topologies"].items()}
        self.names: dict[str, str] = {}  # as written -> as shown
        self.timed: dict[Key, dict[int, list[float]]] = {}
        self.clocks: dict[Key, list[float]] = {}
        self.units: dict[Key, str] = {}
        self.problems: dict[Key, str] = {}

    def take(self, item: Mapping[str, Any], number: int) -> None:
        """One row, and its line."""
        name, engine, metric = self._shown(item["case"]), self._shown(item["engine"]), item["metric"]
        status = item.get("status", "passed")
        place = (name, engine)
        self._stands(place, number)
        if place not in self.side.cases or status != "passed":
            machine = self.digests.get(item["topology"]) or None
            reason = plain(item.get("reason", "")) if status != "passed" else ""
            self.side.cases[place] = CaseInfo(
                plain(item["case_hash"]), self.torch, self.cost_model, machine and machine[:12], status, reason,
                self.side.what_if,
            )  # fmt: skip
        value = item["value"]
        if value is None or metric in NOT_COMPARED:
            return
        detail = item.get("detail")
        key = Key(name, engine, self._shown(metric).replace("|", "/"), part_of(detail) if detail else "")
        if item.get("sample") is not None:
            self._stands(key, number)
            self._sample(key, item, detail or {})
        elif engine in MEASURED_ENGINES and (detail or {}).get("mark") == CPU_BOUND:
            self.problems[key] = "the cores, not the network, set the pace (cpu-bound)"
        elif is_exact(engine, metric):
            self.side.exact[key] = Exact(value, item.get("unit", ""))
            self._stands(key, number)

    def _stands(self, what: tuple[str, ...], number: int) -> None:
        """Note a line of a quantity or a case."""
        self.side.lines[what] = (self.side.lines.get(what, (number,))[0], number)

    def _shown(self, text: str) -> str:
        """A text as it is shown; the same few come again in every row."""
        return self.names.get(text) or self.names.setdefault(text, plain(text))

    def _sample(self, key: Key, item: Mapping[str, Any], detail: Mapping[str, Any]) -> None:
        process = detail.get("process", 0)
        self.units[key] = item.get("unit", "")
        if detail.get("mark") == THROTTLED:
            self.timed.setdefault(key, {})
            return
        self.timed.setdefault(key, {}).setdefault(process if isinstance(process, int) else 0, []).append(item["value"])
        clock = detail.get(CLOCK)
        if isinstance(clock, int | float) and 0 < clock < MOST_CLOCK_MHZ:
            self.clocks.setdefault(key, []).append(float(clock))

    def finish(self) -> None:
        """Put the samples of each quantity together."""
        for key, by_process in self.timed.items():
            self.side.samples[key] = samples_of(
                self.units[key],
                [by_process[number] for number in sorted(by_process)],
                self.clocks.get(key, ()),
                self.problems.get(key, "" if by_process else "the GPU throttled in every sample"),
            )


def part_of(detail: Mapping[str, Any]) -> str:
    """Which of the values of a metric a row holds: `region=gate, phase=forward`; the regime by its bare name."""
    found = [(name, plain(str(detail[name]), 60)) for name in PARTS if name in detail]
    return ", ".join(text if name == "regime" else f"{name}={text}" for name, text in found)
